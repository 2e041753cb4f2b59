"""Training epochs that leave out rows that nothing reads, beside epochs that compute everything, in turn in one process.

Wall-clock seconds of epochs, medians; and CPU seconds over threads, the least of every op, which other load on the machine
changes least. Both must have the same losses: bit for bit, or to rounding where rows are so long that they are summed in
parts. One rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import MIB, SEED, surroundings, table, write_report

KINDS = ("aggregate", "aggregate-grad")
"""Ops whose label has the number of a layer behind it."""


@dataclass(frozen=True)
class Case:
    """A network on a graph: of the data folder, or generated communities with a share of vertices that train."""

    hidden: tuple[int, ...]
    sizes: tuple[int, int, int, int] | None = None
    """Vertices, undirected edges, features, classes."""
    train: float = 0.0


ROUNDING = 1e-5
"""Two losses may differ by this part of theirs: in graphs with rows that are summed in parts."""
CASES = {
    "cora": Case((64,)),
    "amazon_computers": Case((512, 512)),
    "coauthor_cs": Case((512,)),
    "arxiv-like": Case((256, 256), (169_343, 1_170_000, 128, 40), 0.54),
    "products-like": Case((128, 128), (600_000, 7_500_000, 100, 47), 0.08),
    "products-like, few labels": Case((128, 128), (600_000, 7_500_000, 100, 47), 0.002),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=os.environ.get("MGGCN_DATA"), help="folder of the real graphs")
    parser.add_argument("--graphs", nargs="*", default=list(CASES), choices=list(CASES), help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of vertices and edges of generated graphs")
    parser.add_argument("--rounds", type=int, default=9, help="epochs of each kind; figures are medians")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def make(name: str, args: argparse.Namespace) -> Any:
    from mggcn.graph.generate import community
    from mggcn.graph.store import open_store

    case = CASES[name]
    if case.sizes is None:
        return open_store(args.root / name)
    vertices, edges, features, classes = case.sizes
    extents = (round(vertices * args.scale), round(edges * args.scale), features, classes)
    return community(*extents, seed=SEED, train=case.train)


def build(graph: Any, prune: str, name: str, args: argparse.Namespace) -> tuple[Any, Any, dict[str, float]]:
    """Return a rank's trainer, its plan, and the seconds of planning and of set-up."""
    from mggcn.assemble import plan_graph, resolve
    from mggcn.assemble_rank import make_rank
    from mggcn.comm.single import SingleCommunicator
    from mggcn.config import from_tables

    tables = {
        "model": {"hidden": CASES[name].hidden, "dropout": 0.5},
        "train": {"epochs": 1000, "eval_every": 0},
        "run": {"threads": args.threads, "prune": prune},
    }
    config = resolve(from_tables(tables), graph)
    began = time.perf_counter()
    plan, partition = plan_graph(config, graph)
    planned = time.perf_counter()
    rank = make_rank(config, graph, plan, partition, SingleCommunicator())
    return rank.trainer, plan, {"plan": planned - began, "set-up": time.perf_counter() - planned}


def time_ops(runtime: Any, program: Any, found: dict[str, list[float]], threads: int) -> None:
    """Run a program and add the CPU seconds of its ops over the threads to those of earlier runs."""
    runtime.program = program.name
    for op in program.ops:
        began = time.process_time()
        op.run(runtime)
        found.setdefault(op.label, []).append((time.process_time() - began) / threads)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train epochs with and without pruning, in turn."""
    import torch

    torch.set_num_threads(args.threads)
    print(f"{name}: making it", file=sys.stderr)
    graph = make(name, args)
    both = {prune: build(graph, prune, name, args) for prune in ("off", "auto")}
    wall: dict[str, list[float]] = {prune: [] for prune in both}
    ops: dict[str, dict[str, list[float]]] = {prune: {} for prune in both}
    differences: list[float] = []
    for epoch in range(args.rounds + 1):
        losses = []
        for prune, (trainer, plan, _) in both.items():
            began = time.perf_counter()
            losses.append(trainer.step(epoch))
            if epoch:
                wall[prune].append(time.perf_counter() - began)
                time_ops(trainer.runtime, plan.ranks[0].train, ops[prune], args.threads)
        differences.append(abs(losses[0] - losses[1]) / abs(losses[0]))
        if differences[-1] > ROUNDING:
            raise RuntimeError(f"{name}, epoch {epoch + 1}: the loss is {losses[1]} pruned, {losses[0]} otherwise")
    plan = both["auto"][1]
    return {
        "graph": name,
        "hidden": CASES[name].hidden,
        "vertices": graph.num_vertices,
        "nonzeros": plan.figures.num_entries,
        "layers": [
            {"layer": rows.layer, "rows": rows.rows, "nnz": rows.nnz, "pruned": rows.level is not None}
            for rows in plan.ranks[0].rows
        ],
        "wall": wall,
        "ops": ops,
        "seconds": {prune: seconds for prune, (_, _, seconds) in both.items()},
        "largest_loss_difference": max(differences),
        "graph_bytes": {prune: plan.ranks[0].regions["graph"] for prune, (_, plan, _) in both.items()},
    }


def describe(results: list[dict[str, Any]]) -> str:
    """The report's table."""
    lines = []
    for r in results:
        pruned = {f"{kind} {layer['layer']}" for layer in r["layers"] if layer["pruned"] for kind in KINDS}
        epoch, layers = (
            {p: 1000 * sum(min(s) for op, s in r["ops"][p].items() if op in only) for p in ("off", "auto")}
            for only in (set(r["ops"]["off"]), pruned)
        )
        kept = ", ".join(
            f"{layer['layer']}: {layer['nnz'] / r['nonzeros']:.1%}{'' if layer['pruned'] else ' (all computed)'}"
            for layer in reversed(r["layers"])
            if layer["nnz"] is not None
        )
        extra = {what: r["seconds"]["auto"][what] - r["seconds"]["off"][what] for what in ("plan", "set-up")}
        lines.append(
            (
                r["graph"],
                "-".join(map(str, r["hidden"])),
                kept,
                f"{layers['off']:.1f}",
                f"{layers['auto']:.1f}",
                f"{epoch['off']:.1f}",
                f"{epoch['auto']:.1f}",
                f"{epoch['off'] / epoch['auto']:.3f}",
                f"{median(r['wall']['off']) / median(r['wall']['auto']):.3f}",
                f"{(r['graph_bytes']['auto'] - r['graph_bytes']['off']) / MIB:.1f}",
                f"{extra['plan']:.2f}",
                f"{extra['set-up']:.2f}",
            )
        )
    head = ["graph", "hidden", "nonzeros wanted by layer", "layers ms", "pruned", "epoch ms", "pruned", "ratio"]
    text = table([*head, "wall ratio", "MiB more", "plan s more", "set-up s more"], lines)
    text += "\nMilliseconds are CPU time over threads: of the pruned layers' aggregations, and of the ops of an epoch. "
    largest = max(r["largest_loss_difference"] for r in results)
    losses = f"Losses differ by at most {largest:.1e} of theirs." if largest else "All losses are equal, bit for bit."
    return text + f"Ratios above 1: pruned epochs are faster. {losses}\n"


def main() -> None:
    args = parse()
    around = surroundings()
    results = [measure(name, args) for name in args.graphs]
    record = {"surroundings": around, "threads": args.threads, "results": results}
    write_report("pruning", "Rows that nothing reads", describe(results), record, args.out)


if __name__ == "__main__":
    main()
