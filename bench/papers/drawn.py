"""Dry runs that items share: batches are drawn without features, and their rows and edges counted, for any number of ranks.

N vertices, P ranks, M steps of an epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import graphs
from bench.graphs import available, find_data, store_of
from bench.report import SEED
from mggcn.assemble.plan import partition_graph, resolve
from mggcn.assemble.stack import read_rows, seeds_of
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import Slot
from mggcn.config import from_tables
from mggcn.cost.machine import Machine
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.splits import training_rows
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import ReadRows
from mggcn.planning.batches import slot_plan, stack_of
from mggcn.planning.exchanges import relay_cost
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import graph_shape

PRODUCTS = "products-like, 8 % train"
PAPERS = "papers-like"
FEW = 0.05
"""Share of the communities that has all training vertices of a graph like papers100M, where there is no generated one."""
STEPS = 48
"""Steps of an epoch with which a batch of 4,096 cuts products' training vertices."""
ALL_STEPS = 2**31
SAGE = {"kind": "sage", "aggregator": "mean", "self_loops": False, "hidden": [256, 256]}
FANOUT = [15, 10, 5]


def named_or_like(name: str, like: str, args: Any) -> tuple[str, Graph]:
    """Return a graph by its name if its files are here, else one like it: which it is, and the graph."""
    chosen = name if available(name, find_data(args.data)) else like
    return chosen, open_store(store_of(chosen, args))


def papers_like(args: Any) -> tuple[str, Graph]:
    """Return a graph whose training vertices are those of few communities."""
    return PAPERS, open_store(papers_store(args))


def papers_store(args: Any) -> Path:
    """Return the store of that graph."""
    if PAPERS in graphs.GENERATED:
        return store_of(PAPERS, args)
    return in_few_communities(store_of(PRODUCTS, args))


def in_few_communities(store: Path) -> Path:
    """Return the store of the same graph whose training vertices are those of a few communities; made once."""
    found = store.with_name(f"{store.name}-few")
    if not found.exists():
        graph = open_store(store)
        assert graph.labels is not None
        chosen = np.random.default_rng(SEED).permutation(graph.num_classes)[: max(2, round(FEW * graph.num_classes))]
        train = np.isin(graph.labels.array(), chosen)
        splits = {name: ArrayRows(rows.array() & ~train) for name, rows in graph.splits.items() if name != "train"}
        write_store(dataclasses.replace(graph, splits={"train": ArrayRows(train[None]), **splits}), found)
    return found


def num_training(graph: Graph) -> int:
    training = training_rows(graph, "main", 0)
    assert training is not None
    return int(training.sum())


def in_steps(graph: Graph, steps: int = STEPS, ranks: int = 4) -> int:
    """Return the batch, of all ranks, with which an epoch has about so many steps."""
    return max(ranks, round(num_training(graph) / steps))


def drawn_rows(
    graph: Graph,
    order: str,
    sample: dict[str, Any],
    ranks: int = 4,
    macros: Sequence[int] = (8, 0),
    most: int = ALL_STEPS,
    seed: int = 1,
) -> ReadRows:
    """Draw the first steps of a run on ranks whose vertices an order shares out. sample: settings of [sample]; seed: of the
    order and the draws.
    """
    tables = {
        "model": SAGE,
        "train": {"seed": seed},
        "sample": {"fanout": FANOUT} | sample,
        "run": {"ranks": ranks, "transport": "threads" if ranks > 1 else "single", "order": order},
    }
    config = resolve(from_tables(tables), graph)
    owner = row_owners(partition_graph(config, graph)).owner_of(slice(None))
    return read_rows(config, graph, graph_shape(graph, config), owner, tuple(macros), most=most)


def relay_s(plan: RunPlan, machine: Machine) -> float:
    """Return the seconds in which a step's rows come from their owners, message behind message, as a plan prices them."""
    cost = relay_cost(plan, machine)
    assert cost is not None
    return cost.messages_s + cost.a_step * cost.served_s


def drawn_sizes(graph: Graph, batch: int, fanout: Sequence[int], most: int = 8) -> list[float]:
    """Return the mean vertices of each level of the first batches on one rank: seeds, then the sources of each hop."""
    tables = {
        "model": SAGE | {"hidden": [256] * (len(fanout) - 1)},
        "sample": {"batch": min(batch, num_training(graph)), "fanout": [*fanout], "plan": "bound"},
    }
    config = resolve(from_tables(tables), graph)
    shape = graph_shape(graph, config)
    bound = stack_of(config, shape)
    assert bound is not None
    plan = dataclasses.replace(slot_plan(config, shape, bound, 0), places=False)
    sampler, slot = Sampler(graph.adj_t, plan.draws), Slot(plan)
    seeds = seeds_of(config, graph, np.zeros(graph.num_vertices, np.uint16))
    order = seeds.order(config.train.seed, 0)
    steps = min(most, seeds.num_steps)
    sizes = [sampler.draw(slot, seeds.of_step(order, step), config.train.seed, step).sizes for step in range(steps)]
    return [float(mean) for mean in np.mean(sizes, axis=0)]
