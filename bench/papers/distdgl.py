"""DistDGL's tables and figures: batches that are drawn under each order, and predicted steps with the rows that they fetch.

N vertices, P ranks, M steps of an epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from bench import graphs
from bench.cpu import accuracy
from bench.graphs import store_of
from bench.papers.drawn import FANOUT, PRODUCTS, SAGE, drawn_rows, in_steps, papers_like, relay_s
from bench.papers.items import Item, Ours, Paper
from bench.report import MIB, bars, lines, table
from mggcn.assemble.plan import plan_graph, plan_shape, resolve
from mggcn.config import from_tables
from mggcn.cost.batches import Sample
from mggcn.cost.machine import Machine, find_machine, shipped_machines
from mggcn.cost.work import ring_bytes
from mggcn.graph.csr import Graph
from mggcn.graph.named.catalogue import DATASETS
from mggcn.graph.store import open_store
from mggcn.planning.batch_rows import ReadRows, balance
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.shape import GraphShape

ORDERS = {"random": "random", "stream": "stream", "METIS": "metis", "constraints": "metis-balanced"}
FLOAT = 4
MACHINE, CLUSTER = "m5.24xlarge", "xeon-cluster"
BATCH = 2_000
SEEDS = (1, 2, 3)
"""Of orders and draws, whose means count: METIS's parts of another seed have up to a tenth more rows of others."""
NODES = (1, 2, 4, 8, 16)
RANKS = (1, 2, 4)
DEALS = ("ranges", "global")
PRODUCTS_VERTICES = 2_449_029
SIZES = (100_000, 1_000_000, PRODUCTS_VERTICES, 111_059_956)
EMBEDDING = 256
"""Columns of learned rows; the paper does not say."""


def table_1(_paper: Paper, _item: Item, _args: Any) -> Ours:
    """What the catalogue knows of both graphs."""
    values = {}
    for name, known, both in (("products", "ogbn-products", 1), ("papers", "ogbn-papers100M", 2)):
        of = DATASETS[known]
        counts = {"vertices": of.vertices, "edges": both * of.edges, "features": of.features}
        values |= {f"{name}, {what}": float(count) for what, count in counts.items()}
    return Ours(values=values)


def step_parts(graph: Graph, found: ReadRows, order: str, sample: dict[str, Any], machine: Machine) -> dict[str, float]:
    """Predict the parts of a mean step of four ranks: what the slowest rank draws, fetches and computes."""
    ranks = found.ranks
    run = {"ranks": ranks, "order": order, "transport": "gloo", "threads": machine.device.cores}
    settings = {"fanout": FANOUT, "rows": "owners"} | sample
    config = resolve(from_tables({"model": SAGE, "sample": settings, "run": run}), graph)
    plan, _ = plan_graph(config, graph, machine)
    slowest = balance(found.entries)
    drawn = Sample(0, int(found.entries.mean() * slowest), FLOAT * graph.num_features).seconds
    read = Sample(int(found.read.mean() * slowest), 0, FLOAT * graph.num_features).seconds
    fetched = relay_s(dataclasses.replace(plan, read=found), machine)
    computed = epoch_cost(plan, machine).train.seconds * slowest
    threads = machine.device.cores
    return {"sampling": drawn / threads, "copies": read / threads + fetched, "computing": computed}


def figure_10(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Rows of other ranks that batches of an epoch read, by order, and predicted steps."""
    values, rows, cells, facts = {}, [], {}, []
    machine = find_machine(MACHINE if MACHINE in shipped_machines() else CLUSTER)
    for name, graph in (("products-like", open_store(store_of(PRODUCTS, args))), papers_like(args)):
        sample, seconds, others = {"batch": in_steps(graph), "deal": "ranges"}, {}, {}
        for title, order in ORDERS.items():
            drawn = [_drawn(graph, order, sample, machine, seed) for seed in SEEDS]
            facts += [{"graph": name, "order": order} | one for one in drawn]
            mean = {what: statistics.fmean(one[what] for one in drawn) for what in MEANS}
            seconds[title], others[title] = mean["seconds"], mean["others"]
            ms = [1e3 * one["seconds"] for one in drawn]
            cells_of = [f"{mean[what]:,.0f}" for what in MEANS[:2]] + [f"{mean[what]:.3f}" for what in MEANS[2:-1]]
            rows.append(
                [name, title, drawn[0]["steps"], *cells_of, _ms(mean["seconds"]), f"{min(ms):.2f} .. {max(ms):.2f}"]
            )
        values |= _ratios(name, seconds, others)
        cells[name] = {title: seconds["random"] / s for title, s in seconds.items()}
    head = ["graph", "order", "steps", "rows of a batch", "of others", "balance of rows", "of edges", "of others' rows"]
    text = (
        f"P = 4, fan-outs 15, 10, 5, training vertices dealt by ranges, means of {len(SEEDS)} seeds of orders and draws. "
        f"Balance: the largest rank over the mean, added up over steps; steps predicted on {machine.title}.\n\n"
    )
    text += table([*head, "of rows sent", "ms a step", "of a seed"], rows)
    shares = ", ".join(
        f"{fact['others'] / fact['rows']:.0%} under {fact['order']}"
        for fact in facts
        if fact["graph"] == "products-like" and fact["seed"] == SEEDS[0]
    )
    reason = (
        f"Of a batch's rows on the graph like products {shares} are of others: of the generated graph's edges "
        f"{graphs.GENERATED[PRODUCTS].homophily:.0%} stay in a community, the others end anywhere, and a row is three hops "
        "away."
    )
    plot = bars("Steps by order, predicted", "speed-up over random parts", cells)
    return Ours(values=values, text=text, plots=plot, reason=reason, facts={"drawn": facts})


MEANS = ("rows", "others", "even_read", "even_entries", "even_remote", "even_served", "seconds")


def _drawn(graph: Graph, order: str, sample: dict[str, Any], machine: Machine, seed: int) -> dict[str, Any]:
    """Count what batches of a seed read under an order of that seed; parts of a step, and their sum, predicted."""
    found = drawn_rows(graph, order, sample, seed=seed)
    parts = step_parts(graph, found, order, sample, machine)
    counted = {
        "seed": seed,
        "steps": found.steps,
        "rows": float(found.read.mean()),
        "others": float(found.remote.mean()),
        "fetched": {size: found.num_fetched(size) for size in sorted(found.fetched)},
        "seconds": sum(parts.values()),
    }
    even = {f"even_{what}": balance(getattr(found, what)) for what in ("read", "entries", "remote", "served")}
    return counted | even | parts


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _ratios(name: str, seconds: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {
        f"{name}, rows of others, random over METIS": others["random"] / max(others["METIS"], 1e-9),
        f"{name}, speed-up of METIS": seconds["random"] / seconds["METIS"],
        f"{name}, speed-up of constraints": seconds["random"] / seconds["constraints"],
        f"{name}, speed-up of constraints over METIS": seconds["METIS"] / seconds["constraints"],
    }


def step_s(shape: GraphShape, ranks: int, machine: Machine) -> float:
    """Predict a step of 2,000 seeds a rank from extents: computing, drawing, and rows of random owners."""
    sample = {"batch": BATCH * ranks, "fanout": FANOUT, "plan": "bound"}
    run = {"ranks": ranks, "threads": machine.device.cores}
    plans = [
        plan_shape(from_tables({"model": SAGE, "sample": sample | {"rows": rows}, "run": run}), shape, machine=machine)
        for rows in ("mapped", *["owners"] * (ranks > 1))
    ]
    return epoch_cost(plans[0], machine).step_s + sum(relay_s(plan, machine) for plan in plans[1:])


def figure_8(paper: Paper, _item: Item, args: Any) -> Ours:
    """Speed-ups of epochs with as many seeds a rank, from predicted steps."""
    if MACHINE not in shipped_machines():
        return Ours(values={})
    machine, points, seconds = find_machine(MACHINE), dict[str, list[tuple[float, float]]](), {}
    # Of papers a whole evaluation is planned, too, whose edges on one machine exceed a tile: figures begin at four.
    for graph, first in (("products", 1), ("papers", 4)):
        shape, counts = paper.shape(graph), [nodes for nodes in NODES if nodes >= first]
        for nodes in counts:
            steps = -(-(shape.num_training or 0) // (BATCH * nodes))
            seconds[graph, nodes] = steps * step_s(shape, nodes, machine)
        points[graph] = [(nodes, seconds[graph, first] / seconds[graph, nodes]) for nodes in counts]
    values = {
        "products, 8 over 1, over 8": seconds["products", 1] / seconds["products", 8] / 8,
        "papers, 16 over 4, over 4": seconds["papers", 4] / seconds["papers", 16] / 4,
        "papers on 16 machines, s": seconds["papers", 16],
    }
    rows = [[graph, *(f"{seconds[graph, n]:.1f}" if (graph, n) in seconds else "" for n in NODES)] for graph in points]
    text = table(["seconds of an epoch by machines", *map(str, NODES)], rows)
    plot = lines("Epochs at 2,000 seeds a machine, predicted", "speed-up", "machines", points)
    return Ours(values=values, text=text, plots=plot, reason=f"Predicted seconds:\n\n{text}")


def figure_9(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Curves of GraphSAGE on batches, by ranks and by how seeds are dealt."""
    graph = open_store(store_of("community", args))
    epochs = args.epochs or max(3, round(20 * args.scale))
    batch = in_steps(graph, 40)
    curves, points, rows = {}, dict[str, list[tuple[float, float]]](), []
    for ranks, deal in [(1, "global"), *itertools.product(RANKS[1:], DEALS)]:
        run = {"ranks": ranks, "threads": 1, "transport": "threads" if ranks > 1 else "single"}
        sample = {"batch": batch, "fanout": [10, 5], "deal": deal}
        tables = {
            "model": SAGE | {"hidden": [64]},
            "train": {"lr": 0.003, "epochs": epochs},
            "sample": sample,
            "run": run,
        }
        curves[ranks, deal] = accuracy.trained(graph, from_tables(tables))["curve"]
    top = max(score for _, score in curves[1, "global"])
    for (ranks, deal), curve in curves.items():
        best = max(score for _, score in curve)
        reached = next(((n, s) for n, (s, score) in enumerate(curve, 1) if score >= top - 0.01), (0, 0.0))
        rows.append([ranks, deal, f"{100 * best:.2f}", reached[0] or "never", f"{reached[1]:.1f}"])
        points[f"P = {ranks}, {deal}"] = [(n, 100 * score) for n, (_, score) in enumerate(curve, 1)]
    values = {
        f"points of the peak, {deal}": 100 * (min(max(s for _, s in curves[p, deal]) for p in RANKS[1:]) - top)
        for deal in DEALS
    }
    text = table(["P", "deal", "best validation, %", "epochs to within a point of P = 1", "s"], rows)
    plot = lines("Validation by epochs", "%", "epoch", points)
    return Ours(values=values, text=text, plots=plot, reason=text)


def figure_7(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Bytes of learned rows that a step of four ranks sends, beside an all-reduce of all rows; and a run here."""
    ranks, rows, points = 4, [], []
    for vertices in SIZES:
        shape = GraphShape(
            name="shape",
            num_vertices=vertices,
            num_edges=50 * vertices,
            num_features=EMBEDDING,
            num_classes=47,
            symmetric=True,
            num_training=vertices // 12,
        )
        plan = plan_shape(from_tables(_learned(BATCH * ranks, ranks)), shape)
        learned = plan.ranks[0].learned
        assert learned is not None
        dense = ring_bytes(FLOAT * EMBEDDING * vertices, ranks)
        points.append((float(vertices), dense / learned.bytes_sent))
        rows.append(
            [f"{vertices:,}", f"{learned.bytes_sent / MIB:,.1f}", f"{dense / MIB:,.1f}", f"{points[-1][1]:.2f}"]
        )
    ratios = dict(points)
    values = {"sparse over all-reduce, products": ratios[PRODUCTS_VERTICES]}
    values["growth with N"] = ratios[max(SIZES)] / ratios[min(SIZES)]
    head = ["vertices", "MiB of a rank's rows in a step, at most", "MiB of a ring over all rows", "ratio"]
    text = (
        f"{BATCH:,} seeds a rank, fan-outs 15, 10, 5, {EMBEDDING} columns, 4 ranks; rows are bounds of the fan-outs.\n\n"
        f"{table(head, rows)}\n{learned_here(args)}"
    )
    plot = lines("Learned rows: an all-reduce over sparse pushes", "times the bytes", "vertices", {"4 ranks": points})
    return Ours(values=values, text=text, plots=plot)


def _learned(batch: int, ranks: int, hidden: int = 256) -> dict[str, Any]:
    return {
        "data": {"inputs": f"learned:{EMBEDDING}"},
        "model": SAGE | {"hidden": [hidden, hidden]},
        "sample": {"batch": batch, "fanout": FANOUT},
        "run": {"ranks": ranks, "threads": 1, "transport": "threads"},
    }


def learned_here(args: Any) -> str:
    """Train learned rows on two ranks here: over batches, whose rows alone move, and over the whole graph, all of them."""
    graph = open_store(store_of("community", args))
    seconds = {}
    for name, sample in (("batches", {"batch": in_steps(graph, 10, 2), "fanout": FANOUT}), ("the whole graph", {})):
        tables = _learned(2, 2, 16) | {"train": {"epochs": 2}, "sample": sample}
        seconds[name] = accuracy.trained(graph, from_tables(tables))["seconds"]
    told = ", ".join(f"{s:.2f} s on {name}" for name, s in seconds.items())
    return f"Two ranks here, {graph.num_vertices:,} vertices: an epoch takes {told}.\n"


def figure_6(_paper: Paper, _item: Item, args: Any) -> Ours:
    """Rows copied from others under random parts and METIS's, and the shares of a predicted step."""
    graph = open_store(store_of(PRODUCTS, args))
    batch = max(4, round(32_000 * graph.num_vertices / 2_449_029))
    machine = find_machine(MACHINE if MACHINE in shipped_machines() else CLUSTER)
    sample, cells, others = {"batch": batch, "deal": "ranges"}, {}, {}
    for title in ("random", "METIS"):
        found = drawn_rows(graph, ORDERS[title], sample)
        cells[title] = {what: 1e3 * s for what, s in step_parts(graph, found, ORDERS[title], sample, machine).items()}
        others[title] = float(found.remote.mean())
    values = {"copies": others["random"] / max(others["METIS"], 1e-9)}
    rows = [[title, f"{others[title]:,.0f}", *(f"{ms:.2f}" for ms in of.values())] for title, of in cells.items()]
    text = table(["parts", "rows of others", "sampling, ms", "copies, ms", "computing, ms"], rows)
    return Ours(values=values, text=text, plots=bars("Parts of a step, predicted", "ms", cells))


RUNS = {
    "table-1": table_1,
    "figure-10": figure_10,
    "figure-8": figure_8,
    "figure-9": figure_9,
    "figure-7": figure_7,
    "figure-6": figure_6,
}
