"""Prices of the ways in which ranks take a batch: what is priced is what ranks send, and links decide."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import plan_graph, plan_shape, resolve
from mggcn.assemble.rank import Rank
from mggcn.assemble.stack import DRAWN, drawn_sizes
from mggcn.cost.batches import EAGER_S
from mggcn.cost.machine import find_machine
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_sharing import batch_price, expected_sizes, with_batches
from mggcn.planning.op_cost import epoch_cost
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, on_ranks, pattern
from tests.shapes import shape_of

WAYS = ("independent", "cooperative")
MACHINE = find_machine("assumed-cpu")


BATCH = 6


def graph_of() -> Graph:
    """A graph whose epochs have DRAWN steps, the last one smaller than the others."""
    graph = make_graph(pattern("directed", 240, 3), num_features=5, num_classes=3, seed=2)
    rng, train = np.random.default_rng(8), np.zeros((1, 240), bool)
    train[0, rng.permutation(240)[: DRAWN * BATCH - 4]] = True
    labels = ArrayRows(rng.integers(0, 3, 240))
    return dataclasses.replace(graph, labels=labels, splits={"train": ArrayRows(train)})


def sent_in_an_epoch(rank: Rank) -> int:
    """Bytes that the rank sends in its first epoch, as its communicator counts them."""
    before = rank.comm.bytes_sent
    rank.trainer.step(0)
    return rank.comm.bytes_sent - before


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["gcn", "gat"])
@pytest.mark.parametrize("way", WAYS)
def test_priced_bytes_are_those_that_are_counted(way: str, kind: str, ranks: int) -> None:
    """Fails if a row, a hop, a direction, a sum or a step is missing in what is priced, or is not sent.

    An epoch has as many steps as are drawn to price it, so that no byte is an estimate.
    """
    graph = graph_of()
    config = sampled(ranks, {"kind": kind, "hidden": (8, 8)}, (3, 2, 2), batch=BATCH, plan="bound")
    config = with_batches(resolve(config, graph), way)
    plan, partition = plan_graph(config, graph)
    sizes = drawn_sizes(config, graph, plan.shape, row_owners(partition).owner_of(slice(None)))
    price = batch_price(plan, sizes[way], MACHINE)
    assert plan.steps == sizes["cooperative"].steps == DRAWN
    assert price.bytes_sent == sum(on_ranks(config, graph, sent_in_an_epoch))
    assert price.overlap == 1 if way == "cooperative" else price.overlap > 1


def sizes_of_steps(rank: Rank) -> list[list[tuple[int, ...]]]:
    """Sources, edges and received rows of each hop, hop 0 first, of an epoch's steps on a rank."""
    found = []
    for batch in rank.feed.epoch(rank.trainer._seed, 0):
        hops = []
        for block in reversed(rank.feed.stack.blocks):
            own = batch.edges[block]
            far = own.remote
            edges = own.indices.size + (0 if far is None else far.edges.indices.size)
            hops.append((batch.rows[block.sources].size, edges, 0 if far is None else sum(far.received)))
        found.append(hops)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_sizes_are_the_means_of_the_ranks_that_have_most(way: str) -> None:
    """Fails if a hop is counted on another rank, of other steps, or as another hop's."""
    graph = graph_of()
    # Attention multiplies rows first: all hops are exchanged.
    config = sampled(3, {"kind": "gat", "hidden": (8, 8)}, (3, 2, 2), batch=BATCH, plan="bound")
    config = with_batches(resolve(config, graph), way)
    plan, partition = plan_graph(config, graph)
    found = drawn_sizes(config, graph, plan.shape, row_owners(partition).owner_of(slice(None)))[way]
    counted = np.array(on_ranks(config, graph, sizes_of_steps)).max(0).sum(0)
    for size, (sources, edges, received) in zip(reversed(found.stack.capacities), counted, strict=True):
        expected = -(-edges // DRAWN), -(-received // DRAWN)
        assert (size.edges, size.received) == expected
        assert size.sources == max(-(-sources // DRAWN), size.targets)


def test_what_labor_passes_over_counts_in_both_ways() -> None:
    """Fails if rows that LABOR passes over cost nothing where ways are compared, or ranks that share a batch pass over
    their part of it alone: each draws all of it.
    """
    graph = graph_of()
    config = sampled(2, {"kind": "gcn"}, batch=BATCH, plan="bound", draw="labor")
    config = with_batches(resolve(config, graph), "cooperative")
    plan, partition = plan_graph(config, graph)
    sizes = drawn_sizes(config, graph, plan.shape, row_owners(partition).owner_of(slice(None)))
    assert sizes["cooperative"].stack.looked > sizes["independent"].stack.looked > BATCH
    for found in sizes.values():
        blind = dataclasses.replace(found, stack=dataclasses.replace(found.stack, looked=0))
        assert batch_price(plan, found, MACHINE).step_s > batch_price(plan, blind, MACHINE).step_s


def test_the_price_of_a_plan_as_large_as_its_batches_is_the_plans() -> None:
    """Fails if a price has another step, way to the next one or number of steps than the plan's own prediction."""
    graph = graph_of()
    config = with_batches(resolve(sampled(2, {"kind": "gcn"}, batch=BATCH, plan="bound"), graph), "cooperative")
    plan, partition = plan_graph(config, graph)
    sizes = drawn_sizes(config, graph, plan.shape, row_owners(partition).owner_of(slice(None)))["cooperative"]
    assert plan.stack is not None
    price = batch_price(plan, dataclasses.replace(sizes, stack=plan.stack), MACHINE)
    cost = epoch_cost(plan, MACHINE)
    assert price.step == cost.train
    assert price.step_s == cost.step_s
    assert price.epoch_s == DRAWN * cost.step_s
    assert batch_price(plan, sizes, MACHINE).step_s < price.step_s, "bounds are larger than what is drawn"


def test_sharing_a_batch_costs_its_cut() -> None:
    """Fails if the batch of all ranks is drawn for nothing, or each rank's part is."""
    graph = graph_of()
    found = {}
    for way in WAYS:
        config = with_batches(resolve(sampled(2, {"kind": "gcn"}, batch=BATCH, plan="bound"), graph), way)
        cost = epoch_cost(plan_graph(config, graph)[0], MACHINE).batch
        assert cost is not None
        found[way] = cost.sample_s
    # Half of the seeds are drawn for a rank alone; all, and then cut, where ranks share.
    assert found["cooperative"] > 2 * found["independent"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_shapes_batches_are_expected(ranks: int) -> None:
    """Fails if a shared row is counted on several ranks, or more is received than edges begin elsewhere."""
    shape = shape_of(100_000, 2_000_000, 50, 9, num_training=50_000)
    config = sampled(ranks, {"kind": "gcn", "hidden": (64,)}, (10, 10), batch=1024)
    found = expected_sizes(config, shape)
    own, shared = found["independent"], found["cooperative"]
    assert own.distinct == shared.distinct == shared.rows < own.rows
    for block, size in zip(shared.stack.blocks, shared.stack.capacities, strict=True):
        together = shared.stack.together[shared.stack.blocks.index(block)]
        assert 0 <= ranks * size.sources - together.sources < ranks
        assert size.received <= size.edges * (ranks - 1) / ranks
        assert size.received <= together.sources * (ranks - 1) / ranks
        assert shared.exchanged[block] == (ranks * size.received, ranks * size.received_back)


def test_steps_that_are_launched_op_by_op_pay_for_it() -> None:
    """Fails if ranks on GPUs that share batches, whose steps are not captured, are priced as those that are."""
    shape = shape_of(100_000, 2_000_000, 50, 9, num_training=50_000)
    config = sampled(4, {"kind": "gcn", "hidden": (64,)}, (10, 10), batch=1024)
    run: dict[str, Any] = {"device": "cuda", "transport": "nccl", "precision": "fp32"}
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, **run))
    machine, sizes = find_machine("dgx-h100"), expected_sizes(config, shape)
    for way, least in (("independent", 0.0), ("cooperative", 10 * EAGER_S)):
        plan = plan_shape(with_batches(config, way), shape, machine=machine, limit=2**40)
        calls = batch_price(plan, sizes[way], machine).step.parts["overhead"]
        assert calls >= least
        assert calls < 10 * EAGER_S or least
