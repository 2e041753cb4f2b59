"""BatchGNN's tables and figures: rows that macrobatches fetch, by its equations, and predicted epochs.

N vertices, P ranks, M steps of an epoch, B batches of a macrobatch, S bytes of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import graphs
from bench.cpu import accuracy, ranks
from bench.graphs import Made, available, find_data, made_store, store_of
from bench.papers.distgnn import sampled_epoch_s
from bench.papers.drawn import (
    ALL_STEPS,
    FANOUT,
    PRODUCTS,
    SAGE,
    drawn_rows,
    in_steps,
    num_training,
    papers_like,
    relay_s,
)
from bench.papers.items import Item, Ours, Paper
from bench.report import bars, lines, table
from mggcn.assemble.plan import partition_graph, plan_shape, resolve
from mggcn.assemble.stack import seeds_of
from mggcn.blocks.macrobatch import COUNT_BYTES, ID_BYTES, cache_bytes
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import Slot
from mggcn.config import from_tables
from mggcn.cost.batches import Sample
from mggcn.cost.machine import find_machine
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import ReadRows, relay_slots
from mggcn.planning.batches import stack_of
from mggcn.planning.op_cost import epoch_cost, first_sums_s
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import graph_shape

SEEDS, FLOAT = 1_024, 4
NAMED = {"arxiv": ("ogbn-arxiv", "arxiv-like", 4), "products": ("ogbn-products", PRODUCTS, 8)}
LDBC = "LDBC-like"
RMAT = Made(2**20, 7 * 2**20, 8, 4, train=0.008, kind="rmat")
"""Where there is no graph like LDBC1000: as many training vertices, 7 edges a vertex."""
LDBC_RANKS, LDBC_STEPS, LDBC_MACRO = 48, 17, 4
"""Of 304 steps macrobatches have 72; of 17 about as large a share is 4."""
CLUSTER = "xeon-cluster"
MODELS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "aggregator": "mean", "hidden": [64]},
    "gcn": {"kind": "gcn", "hidden": [64]},
    "gin": {"kind": "gin", "hidden": [64], "norm_layer": "batch"},
}
"""Batch norms follow the layers of the paper's GIN (appendix F)."""
SUMS = {"gin": {"weights": "block"}}
"""A drawn neighbour counts once in the paper's GIN."""


def table_5(paper: Paper, _item: Item, args: Any) -> Ours:
    """Rows fetched in an epoch of the named graphs, or of graphs like them, which count for nothing."""
    arxiv, values, rows = paper.graphs["arxiv"], {}, []
    values["arxiv, bound"] = float((4 - 1) * arxiv["vertices"])
    for title, (name, like, parts) in NAMED.items():
        there = available(name, find_data(args.data))
        graph = open_store(store_of(name if there else like, args))
        batch = (
            SEEDS * parts
            if there
            else max(parts, round(SEEDS * parts * num_training(graph) / paper.graphs[title]["training"]))
        )
        sample = {"batch": batch, "draw": "replace", "drop_last": True}
        found = drawn_rows(graph, "random", sample, parts, (0,))
        sums = drawn_rows(graph, "random", sample | {"first": "full"}, parts, (0,))
        whole = max(found.fetched)
        # Of a vertex whose sum is cached its own row is read, too.
        counts = (found.num_fetched(1), found.num_fetched(whole), 2 * sums.num_fetched(max(sums.fetched)))
        if there:
            values |= {
                f"{title}, {system}": float(n) for system, n in zip(("DGL", "BGNN", "BGNNC"), counts, strict=True)
            }
        rows.append(
            [
                name if there else like,
                f"{graph.num_vertices:,}",
                parts,
                found.steps,
                *(f"{n:,}" for n in counts),
                f"{found.bound:,}",
            ]
        )
    head = ["graph", "vertices", "P", "steps", "batch by batch", "all batches", "all, with sums", "(P - 1) N"]
    text = table(head, rows)
    return Ours(values=values, text=text, reason=f"Counted:\n\n{text}")


class Batch(NamedTuple):
    """Vertices that a batch reads, the first `inner` of them the last hop's targets, and the edges of that hop."""

    read: npt.NDArray[np.int64]
    inner: int
    edges: int


def drawn_sets(graph: Graph, config: Any) -> tuple[list[list[Batch]], npt.NDArray[np.uint16]]:
    """Return what each step draws on each rank, and the rank of each vertex."""
    shape = graph_shape(graph, config)
    owner = row_owners(partition_graph(config, graph)).owner_of(slice(None))
    bound = stack_of(config, shape)
    assert bound is not None
    plan = relay_slots(config, shape, bound)
    sampler, slot, seeds = Sampler(graph.adj_t, plan.draws), Slot(plan), seeds_of(config, graph, owner)
    order, found = seeds.order(config.train.seed, 0), list[list[Batch]]()
    for number in range(seeds.num_steps):
        step = seeds.of_step(order, number)
        found.append([])
        for rank in range(config.run.ranks):
            drawn = sampler.draw(slot, seeds.of_rank(step, rank), config.train.seed, number)
            found[-1].append(Batch(drawn.ids.copy(), drawn.sizes[-2], drawn.hops[-1].indices.size))
    return found, owner


def equations_2_5(_paper: Paper, _item: Item, args: Any) -> Ours:
    """The equations on sets that are counted one by one, over what mggcn counts."""
    graph = open_store(store_of("community", args))
    parts = 4
    sample = {"batch": in_steps(graph, 20), "fanout": FANOUT}
    run = {"ranks": parts, "transport": "threads", "order": "random"}
    config = resolve(from_tables({"model": SAGE, "sample": sample, "run": run}), graph)
    steps, owner = drawn_sets(graph, config)
    counted = drawn_rows(graph, "random", {"batch": sample["batch"]}, parts, (8, 0))
    size = FLOAT * graph.num_features

    def fetched(batches: int) -> int:
        """M / B relays, and in each of them every row that a rank lacks once."""
        spans = [steps[first : first + batches] for first in range(0, len(steps), batches)]
        rows = sum(len(_lacking(span, rank, owner)) for span in spans for rank in range(parts))
        return len(spans) * parts * (parts - 1) * COUNT_BYTES + rows * (size + ID_BYTES)

    every = [batch for step in steps for batch in step]
    read, inner, edges = (sum(of) for of in zip(*((b.read.size, b.inner, b.edges) for b in every), strict=True))
    by_equations = {
        "eq. 2": (fetched(1), counted.bytes_sent(1, size)),
        "eq. 3, 8 batches": (fetched(8), counted.bytes_sent(8, size)),
        "eq. 3, all batches": (fetched(len(steps)), counted.bytes_sent(max(counted.fetched), size)),
        "eq. 4": (read * (size + ID_BYTES) + edges * ID_BYTES, cache_bytes(*counted.cached, size)[0]),
        "eq. 5": (inner * (2 * size + ID_BYTES), cache_bytes(*counted.cached, size)[1]),
    }
    values = {name: ours / theirs for name, (ours, theirs) in by_equations.items()}
    rows = [[name, f"{a:,}", f"{b:,}"] for name, (a, b) in by_equations.items()]
    text = table(["equation", "bytes, from the sets", "bytes, as mggcn plan counts"], rows)
    return Ours(values=values, text=text, reason=text)


def _lacking(span: list[list[Batch]], rank: int, owner: npt.NDArray[np.uint16]) -> set[int]:
    """Return the union of the rows of others that a rank's batches read."""
    return {vertex for step in span for vertex in step[rank].read.tolist() if owner[vertex] != rank}


def ldbc_like(args: Any) -> Graph:
    """Return a graph like LDBC1000."""
    if LDBC in graphs.GENERATED:
        return open_store(store_of(LDBC, args))
    return open_store(made_store(f"{LDBC}, R-MAT", RMAT.scaled(args.scale), args.cache))


def figure_3(_paper: Paper, item: Item, args: Any) -> Ours:
    """Rows that all ranks fetch by macrobatch."""
    graph = ldbc_like(args)
    batch = max(LDBC_RANKS, round(num_training(graph) / LDBC_STEPS))
    found = drawn_rows(graph, "random", {"batch": batch, "draw": "replace"}, LDBC_RANKS, (LDBC_MACRO, 0))
    whole = max(found.fetched)
    counts = {size: found.num_fetched(size) for size in sorted(found.fetched)}
    names = {1: "1", LDBC_MACRO: "72 of 304", whole: "all"}
    values = {names[size]: count / counts[whole] for size, count in counts.items()}
    rows = [[names[size], size, f"{count:,}"] for size, count in counts.items()]
    text = f"{graph.num_vertices:,} vertices, {graph.num_edges:,} edges, {LDBC_RANKS} ranks, "
    text += f"{found.steps} steps of {batch} seeds.\n\n"
    text += table(["macrobatch", "batches", "rows fetched"], rows)
    points = {
        "ours": [(size / whole, values[names[size]]) for size in counts],
        "published": [
            (share, item.published[name]) for share, name in ((1 / 304, "1"), (72 / 304, "72 of 304"), (1.0, "all"))
        ],
    }
    plot = lines("Rows fetched by macrobatch", "over all batches together", "share of an epoch's batches", points)
    return Ours(values=values, text=text, plots=plot, reason=f"Counted:\n\n{text}")


def together(plan: RunPlan, found: ReadRows, size: int, times: float) -> RunPlan:
    """Return the plan with macrobatches of so many batches, which fetch `times` as many rows as were counted."""
    config = dataclasses.replace(plan.config, sample=dataclasses.replace(plan.config.sample, macro=size))
    more = {
        name: {size: np.rint(times * getattr(found, name)[size]).astype(np.int64)}
        for name in ("fetched", "fetched_from")
    }
    return dataclasses.replace(plan, config=config, read=dataclasses.replace(found, **more))


def table_4(paper: Paper, _item: Item, args: Any) -> Ours:
    """Predicted shares of preparing a batch, with rows fetched batch by batch and all together."""
    graph, machine, parts = open_store(store_of("arxiv-like", args)), find_machine(CLUSTER), 4
    whole = num_training(graph)
    batch = max(parts, round(SEEDS * parts * whole / paper.graphs["arxiv"]["training"]))
    found = drawn_rows(graph, "random", {"batch": batch, "draw": "replace"}, parts, (0,))
    shape = paper.shape("arxiv")
    tables = {
        "model": SAGE,
        "sample": {"batch": SEEDS * parts, "fanout": FANOUT, "plan": "bound", "draw": "replace", "rows": "owners"},
        "run": {"ranks": parts, "threads": machine.device.cores},
    }
    plan = plan_shape(from_tables(tables), shape, machine=machine)
    computed = plan.steps * epoch_cost(plan, machine).train.seconds
    # Counts of a smaller graph stand for as many more of the full one's.
    times, threads = SEEDS * parts / batch, machine.device.cores
    row = FLOAT * shape.num_features
    each = Sample(int(times * found.read.mean()), int(times * found.entries.mean()), row).seconds / threads
    seconds, rows = {}, []
    for name, size in (("batch by batch", 1), ("all together", max(found.fetched))):
        fetched = found.steps * relay_s(together(plan, found, size, times), machine)
        seconds[name] = found.steps * each + fetched
        rows.append([name, f"{found.steps * each:.3f}", f"{fetched:.3f}", f"{computed:.3f}"])
    values = {name: s / (s + computed) for name, s in seconds.items()}
    values["all together, over batch by batch"] = values["all together"] / values["batch by batch"]
    text = table(["rows fetched", "drawing and gathering, s", "fetching, s", "computing, s"], rows)
    cells = {name: {"preparing": s, "computing": computed} for name, s in seconds.items()}
    return Ours(
        values=values, text=text, plots=bars("Parts of an epoch on arxiv, predicted", "seconds", cells), reason=text
    )


def table_a3(paper: Paper, _item: Item, args: Any) -> Ours:
    """Seconds in which ranks compute A X, estimated by rank and measured on one."""
    estimated = {}
    for parts in (1, 2, 4):
        sample = {"batch": SEEDS * parts, "fanout": FANOUT, "first": "full", "plan": "bound"}
        plan = plan_shape(from_tables({"model": SAGE, "sample": sample, "run": {"ranks": parts}}), paper.shape("arxiv"))
        estimated[parts] = first_sums_s(plan)
    values = {f"{parts} ranks": estimated[parts] / estimated[1] for parts in (2, 4)}
    store, measured = store_of("arxiv-like", args), {}
    for first in ("drawn", "full"):
        settings = {"model.kind": "sage", "model.aggregator": "mean", "model.hidden": "16,16"}
        settings |= {"sample.batch": SEEDS, "sample.fanout": "15,10,5", "sample.first": first}
        measured[first] = ranks.trained(store, settings, 1)["setup_seconds"]
    told = ", ".join(f"{s:.3f} s on {parts}" for parts, s in estimated.items())
    text = (
        f"Estimated: {told} ranks, {paper.graphs['arxiv']['edges']:,} edges. Here, scale {args.scale:g}: "
        f"set-up takes {measured['full']:.2f} s with the cache and {measured['drawn']:.2f} without.\n"
    )
    return Ours(values=values, text=text, reason=text)


def table_a4(_paper: Paper, item: Item, args: Any) -> Ours:
    """Edges of the largest rank less those of the smallest, by step."""
    (_, graph), values, rows = papers_like(args), {}, []
    for title, order in (("random", "random"), ("METIS", "metis")):
        found = drawn_rows(graph, order, {"batch": in_steps(graph), "deal": "ranges"}, 4, (0,), ALL_STEPS)
        values[title] = float(np.ptp(found.entries, axis=1).mean() / found.entries.mean())
        rows.append([title, f"{found.entries.mean():,.0f}", f"{np.ptp(found.entries, axis=1).mean():,.0f}"])
    values["METIS over random"] = values["METIS"] / values["random"]
    text = table(["parts", "edges of a rank's batch", "largest less smallest"], rows)
    return Ours(values=values, text=text, reason=text)


def figure_4_6(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Best validation scores and curves with the first layer drawn and in full."""
    named = "ogbn-arxiv" if available("ogbn-arxiv", find_data(args.data)) else "community"
    graph = open_store(store_of(named, args))
    epochs, values, points, rows = args.epochs or max(3, round(20 * args.scale)), {}, {}, []
    for kind, model in MODELS.items():
        best = {}
        for first in ("drawn", "full"):
            sample = {"batch": in_steps(graph, 40, 1), "fanout": [10, 5], "first": first, **SUMS.get(kind, {})}
            tables = {
                "model": model,
                "train": {"lr": 0.003, "epochs": epochs},
                "sample": sample,
                "run": {"threads": args.threads},
            }
            curve = accuracy.trained(graph, from_tables(tables))["curve"]
            best[first] = 100 * max(score for _, score in curve)
            points[f"{kind}, {first}"] = [(s, 100 * score) for s, score in curve]
            rows.append([kind, first, f"{best[first]:.2f}", f"{curve[-1][0]:.1f}"])
        values[f"{kind}, points"] = best["full"] - best["drawn"]
    text = f"{named}, {graph.num_vertices:,} vertices, {epochs} epochs.\n\n" + table(
        ["model", "first layer", "best validation, %", "s"], rows
    )
    plot = lines("Validation by seconds", "%", "seconds", points)
    return Ours(values=values, text=text, plots=plot, reason=text)


def table_2_3(paper: Paper, _item: Item, _args: Any) -> Ours:
    """Predicted epochs on papers' extents."""
    machine = find_machine(CLUSTER)
    directed, both = paper.shape("papers-directed"), paper.shape("papers")
    return Ours(
        values={
            "P3's settings, BGNN": sampled_epoch_s(directed, 16, machine, 1_000, (32,), (25, 10)),
            "DistDGLv2's settings, BGNN": sampled_epoch_s(both, 64, machine, 1_000),
        },
        text="Of mggcn, without the rows that are fetched, on the described cluster; batches as large as fan-outs allow.\n",
    )


RUNS = {
    "table-5": table_5,
    "equations-2-5": equations_2_5,
    "figure-3": figure_3,
    "table-4": table_4,
    "table-a3": table_a3,
    "table-a4": table_a4,
    "figure-4-6": figure_4_6,
    "table-2-3": table_2_3,
}
