"""The order by locality on graphs with random ids: what it costs, sparse products and epochs with and without it, in turn.

Wall-clock seconds, and CPU seconds over threads beside them: those are what other load on the machine changes least. The
epochs are a GCN's with three layers. Predictions are the plan's, on the machine that --machine names.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import SEED, WORKLOADS, surroundings, table, write_report

PRODUCTS = {"num_vertices": 600_000, "num_edges": 7_500_000, "num_classes": 600, "homophily": 0.8, "power": 2.5}
REAL = ("cnr_2000", "dblp_2010")
NAMES = ("products-like", "arxiv-like", "reddit-like", "rmat", *REAL)
CLASSES, RANKS = 40, 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=os.environ.get("MGGCN_DATA"), help="folder of the real graphs")
    parser.add_argument("--graphs", default=",".join(NAMES), help="names of some of the graphs; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of vertices and edges of generated graphs")
    parser.add_argument("--width", type=int, default=128, help="of features, hidden layers and the sparse product")
    parser.add_argument("--rounds", type=int, default=9, help="products and epochs of each order; figures are medians")
    parser.add_argument("--orders", type=int, default=3, help="times that the order is made")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", default="assumed-cpu", help="machine of the predictions: a name, or a tuned file")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def make(name: str, args: argparse.Namespace) -> Any:
    """Return a graph whose ids are random, with random features, labels and a training split."""
    import numpy as np

    from mggcn.graph.csr import ArrayRows
    from mggcn.graph.generate import community, rmat
    from mggcn.graph.store import open_store

    if name == "products-like":
        sizes = PRODUCTS | {
            key: round(PRODUCTS[key] * args.scale) for key in ("num_vertices", "num_edges", "num_classes")
        }
        graph = community(num_features=0, seed=SEED, **sizes)  # type: ignore[arg-type]
    elif name == "rmat":
        graph = rmat(scale=17, edge_factor=max(1, round(16 * args.scale)), seed=SEED)
    elif name in WORKLOADS:
        work = WORKLOADS[name].scaled(args.scale)
        graph = community(work.vertices, work.edges, 0, work.classes, seed=SEED)
    else:
        graph = relabelled(open_store(args.root / name))
    rng, n = np.random.default_rng(SEED), graph.num_vertices
    return dataclasses.replace(
        graph,
        name=name,
        features=ArrayRows(rng.standard_normal((n, args.width), np.float32)),
        labels=ArrayRows(rng.integers(CLASSES, size=n)),
        splits={"train": ArrayRows(rng.random((1, n)) < 0.1)},
        num_classes=CLASSES,
    )


def relabelled(graph: Any) -> Any:
    """Return a symmetric graph with its ids permuted at random."""
    import numpy as np

    from mggcn.graph.csr import CSR, ArrayRows

    n, indptr = graph.num_vertices, graph.adj.indptr.array()
    ids = np.random.default_rng(SEED).permutation(n)
    rows = ids[np.repeat(np.arange(n), np.diff(indptr))]
    keys = np.sort(rows * n + ids[graph.adj.indices.array()])
    pointers = np.concatenate([[0], np.cumsum(np.bincount(keys // n, minlength=n))])
    adj = CSR(ArrayRows(pointers), ArrayRows((keys % n).astype(np.int32)), None, n)
    return dataclasses.replace(graph, adj=adj, adj_t=adj)


def in_turn(functions: dict[str, Callable[[], Any]], rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    """Call all functions once to warm up, then `rounds` times each: A B A B ..."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            began, cpu = time.perf_counter(), time.process_time()
            function()
            if number:
                found[name]["wall"].append(time.perf_counter() - began)
                found[name]["cpu"].append((time.process_time() - cpu) / threads)
    return found


def products(graph: Any, orders: dict[str, Any], args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The product of the whole graph with a dense matrix, in every order."""
    import torch

    from mggcn.backend.cpu.backend import CpuBackend
    from mggcn.partition.rows.tiles import build_tiles

    backend = CpuBackend(torch.float32, args.threads)
    dense, out = torch.randn(graph.num_vertices, args.width), torch.empty(graph.num_vertices, args.width)

    def product(owners: Any) -> Callable[[], Any]:
        (tile,) = build_tiles(graph.adj_t, owners, 0, self_loops=True, dtype="float32", threads=args.threads)
        adj = backend.sparse(tile.indptr, tile.indices, tile.values)
        return lambda: backend.spmm(adj, dense, out, accumulate=False, epilogue=None)

    return {name: product(owners) for name, owners in orders.items()}


def epochs(graph: Any, orders: dict[str, Any], args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """An epoch in every order, and the predicted seconds of its sparse products."""
    from mggcn.assemble import STRATEGIES, resolve
    from mggcn.assemble_rank import make_rank
    from mggcn.comm.single import SingleCommunicator
    from mggcn.config import from_tables
    from mggcn.cost.machine import find_machine
    from mggcn.partition.make import stats_of
    from mggcn.partition.rows.partition import RowPartition
    from mggcn.planning.op_cost import epoch_cost
    from mggcn.planning.run import plan_run
    from mggcn.planning.shape import graph_shape

    steps, predicted = {}, {}
    for name, owners in orders.items():
        tables = {
            "model": {"hidden": [args.width] * 2},
            "train": {"epochs": 1000, "eval_every": 0},
            "run": {"threads": args.threads, "order": name},
        }
        config, partition = resolve(from_tables(tables), graph), RowPartition(owners)
        figures = stats_of(graph, partition, self_loops=config.model.self_loops)
        plan = plan_run(config, graph_shape(graph, config.model), figures, STRATEGIES["broadcast"])
        predicted[name] = epoch_cost(plan, find_machine(args.machine)).train.parts["sparse"]
        trainer = make_rank(config, graph, plan, partition, SingleCommunicator()).trainer
        steps[name] = lambda trainer=trainer: trainer.step(0)
    return steps, predicted


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Order one graph several times, then compare."""
    import torch

    from mggcn.partition.locality.order import LocalitySettings, locality
    from mggcn.partition.metis.edge_cut import _halo
    from mggcn.partition.order import assign
    from mggcn.partition.statistics import tile_statistics

    torch.set_num_threads(args.threads)
    print(f"{name}: making it", file=sys.stderr)
    graph = make(name, args)
    settings = LocalitySettings(parts=1, seed=SEED)
    made = in_turn({"order": lambda: locality(graph, settings, args.threads)}, args.orders, 1)["order"]
    found = locality(graph, settings, args.threads)
    orders = {"random": assign(graph.num_vertices, 1, "random", 0), "locality": found.owners}
    spmm = in_turn(products(graph, orders, args), args.rounds, args.threads)
    steps, predicted = epochs(graph, orders, args)
    parts = {
        # Not the seed by which ids were drawn.
        "random": assign(graph.num_vertices, RANKS, "random", SEED + 1),
        "locality": locality(graph, LocalitySettings(parts=RANKS, seed=SEED), args.threads).owners,
    }
    tiles = {order: tile_statistics(graph, owners, self_loops=True) for order, owners in parts.items()}
    return {
        "graph": name,
        "vertices": graph.num_vertices,
        "nonzeros": graph.num_edges,
        "order": made,
        "statistics": dataclasses.asdict(found.statistics) | {"inside_share": found.statistics.inside_share},
        "spmm": spmm,
        "epoch": in_turn(steps, args.rounds, args.threads),
        "predicted_sparse": predicted,
        "path": {order: t.critical_path_over_ideal for order, t in tiles.items()},
        "halo": {order: float(_halo(t.rows_needed).sum()) / graph.num_vertices for order, t in tiles.items()},
    }


def describe(results: list[dict[str, Any]], width: int) -> str:
    """The report's tables."""
    orders, gains, ranks = [], [], []
    for r in results:
        wall, cpu = (median(r["order"][clock]) for clock in ("wall", "cpu"))
        epoch = {order: median(r["epoch"][order]["wall"]) for order in r["epoch"]}
        saved = epoch["random"] - epoch["locality"]
        back = f"{wall / saved:.1f}" if saved > 0 else "never"
        s = r["statistics"]
        orders.append(
            (
                r["graph"],
                f"{r['vertices']:,}",
                f"{r['nonzeros']:,}",
                f"{wall:.2f}",
                f"{cpu:.2f}",
                f"{r['nonzeros'] / cpu / 1e6:.1f}",
                f"{wall / epoch['random']:.1f}",
                back,
                f"{s['inside_share']:.0%}",
                f"{s['gap_before']:,.0f}",
                f"{s['gap']:,.0f}",
            )
        )
        ms = {order: 1000 * median(r["spmm"][order]["wall"]) for order in r["spmm"]}
        ratios = [median(r[what]["random"]["cpu"]) / median(r[what]["locality"]["cpu"]) for what in ("spmm", "epoch")]
        expected = r["predicted_sparse"]["random"] / r["predicted_sparse"]["locality"]
        gains.append(
            (
                r["graph"],
                f"{ms['random']:.0f}",
                f"{ms['locality']:.0f}",
                f"{ms['random'] / ms['locality']:.2f}",
                f"{ratios[0]:.2f}",
                f"{expected:.2f}",
                *(f"{1000 * seconds:.0f}" for seconds in epoch.values()),
                f"{epoch['random'] / epoch['locality']:.2f}",
                f"{ratios[1]:.2f}",
            )
        )
        both = [r[what][order] for what in ("path", "halo") for order in ("random", "locality")]
        ranks.append((r["graph"], *(f"{value:.2f}" for value in both)))
    head = ["graph", "vertices", "nonzeros", "order s", "CPU s", "M nnz / CPU s", "epochs", "pays back after"]
    text = table([*head, "inside clusters", "gap before", "gap"], orders)
    head = ["graph", "product ms", "locality", "ratio", "CPU ratio", "predicted", "epoch ms", "locality", "ratio"]
    text += f"\nWidth {width}, float32, one rank; ratios above 1: the order is faster.\n\n"
    text += table([*head, "CPU ratio"], gains)
    text += f"\n{RANKS} ranks: critical path of the stages over that of equal tiles; rows received, over vertices.\n\n"
    return text + table(["graph", "path random", "path locality", "halo random", "halo locality"], ranks)


def main() -> None:
    args = parse()
    around = surroundings()
    results = [measure(name, args) for name in args.graphs.split(",")]
    record = {"surroundings": around, "width": args.width, "threads": args.threads, "results": results}
    write_report("locality", "An order by locality", describe(results, args.width), record, args.out)


if __name__ == "__main__":
    main()
