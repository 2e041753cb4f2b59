"""How epochs scale: with ranks times threads on the arxiv-like graph, and with the size of the graph.

Ranks: whole runs of `mggcn train`, one of each in turn, over both transports. Sizes, by edges and by vertices: mggcn, DGL
and PyG as in peers_epoch.py; where their processes do not fit side by side, they run one after the other, and the table
says so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import GIB, HERE, MIB, SEED, memory_free, spread, surroundings, table, write_report
from peers_cases import Case, store_of
from peers_env import find_peers, missing_text
from peers_epoch import Comparison
from peers_options import add_options
from peers_switches import OWN, base_settings, switches
from plots import lines

GRAPH, RANK_HIDDEN, SIZE_HIDDEN = "arxiv-like", (256, 256), (128,)
PYG = "scaled"
SHARE_OF_FREE, SHARE_ALONE = 0.7, 0.9
"""Of the free memory, what contenders side by side may need, and one that runs alone."""
OF_MATRICES = {OWN: 4, "DGL": 12, "PyG": 15}
"""About how many matrices of a hidden layer's size a process holds at its peak, from 1 M vertices on: not less than
bench/results/scaling_* shows."""
OF_EDGES = {OWN: 12, "DGL": 60, "PyG": 60}
"""About how many bytes a nonzero takes at the peak of set-up."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="ranks,sizes")
    parser.add_argument("--ways", default="1x1,1x2,2x1", help="ranks x threads of each")
    parser.add_argument("--transports", default="threads,gloo", help="of several ranks")
    parser.add_argument("--factors", default="1,2,4,8,16", help="of the graph's size")
    parser.add_argument("--by", default="edges,vertices", help="what grows: edges alone, or both")
    parser.add_argument("--scale", type=float, default=1.0, help="of the smallest graph")
    parser.add_argument("--rounds", type=int, default=5, help="whole runs of each way, timed epochs of each contender")
    parser.add_argument("--warm-up", type=int, default=1, help="epochs before them")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a whole run; their median counts")
    add_options(parser, "threads", "peers", "cache", "out")
    return parser.parse_args()


def configurations(ways: str, transports: str) -> dict[str, dict[str, Any]]:
    """Name and run settings of every number of ranks and threads."""
    found: dict[str, dict[str, Any]] = {}
    for ranks, threads in (map(int, way.split("x")) for way in ways.split(",")):
        for transport in transports.split(",") if ranks > 1 else ["single"]:
            name = f"{ranks} x {threads}" + (f", {transport}" if ranks > 1 else "")
            found[name] = {"ranks": ranks, "threads": threads, "transport": transport, "order": "locality"}
    return found


def whole_run(store: Path, run: dict[str, Any], epochs: int) -> dict[str, Any]:
    """A run as `mggcn train` does it, in a fresh process."""
    settings = {"model": {"hidden": RANK_HIDDEN}, "train": {"epochs": epochs, "eval_every": 0}, "run": run}
    command = [sys.executable, str(HERE / "worker_job.py"), str(store), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_ranks(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Whole runs of every way, shuffled in every round."""
    store, ways = store_of(GRAPH, args.cache, args.scale), configurations(args.ways, args.transports)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    shuffled = random.Random(SEED)
    for number in range(args.rounds):
        print(f"ranks: round {number + 1} of {args.rounds}", file=sys.stderr)
        for name in shuffled.sample(list(ways), len(ways)):
            found[name].append(whole_run(store, ways[name], args.epochs))
    return found


def needed_bytes(name: str, vertices: int, nonzeros: int) -> int:
    """About what a contender's process needs at its peak."""
    return OF_MATRICES[name] * 4 * vertices * max(SIZE_HIDDEN) + OF_EDGES[name] * nonzeros


def what_fits(need: dict[str, int], free: int) -> tuple[dict[str, str], bool]:
    """Who is not run, with the reason, and whether the others run one after the other; bytes needed and free."""
    left_out = {
        name: f"not run: it needs about {nbytes / GIB:.0f} GiB, {free / GIB:.0f} are free"
        for name, nbytes in need.items()
        if nbytes > SHARE_ALONE * free
    }
    return left_out, sum(nbytes for name, nbytes in need.items() if name not in left_out) > SHARE_OF_FREE * free


def measure_size(by: str, factor: int, args: argparse.Namespace) -> dict[str, Any]:
    """Every contender on one graph: side by side, or each alone if they do not fit; left out if it does not fit alone."""
    import numpy as np

    sizes = {"num_edges": factor} | ({"num_vertices": factor} if by == "vertices" else {})
    store, case = store_of(GRAPH, args.cache, args.scale, **sizes), Case(GRAPH, SIZE_HIDDEN)
    n = int(np.load(store / "indptr.npy", mmap_mode="r").size) - 1
    nnz = int(np.load(store / "indices.npy", mmap_mode="r").size)
    peers = find_peers(args.peers)
    comparison = Comparison(case, store, peers, args)
    starts = {OWN: comparison.mggcn(base_settings(switches()), keep_weights=True)}
    if "dgl" in peers:
        starts["DGL"] = comparison.dgl()
    if "pyg" in peers:
        starts["PyG"] = comparison.pyg(PYG)
    need = {name: needed_bytes(name, n, nnz) for name in starts}
    left_out, alone = what_fits(need, memory_free())
    starts = {name: start for name, start in starts.items() if name not in left_out}
    print(f"{GRAPH} x {factor} by {by}: {n:,} vertices, {nnz:,} nonzeros, {', '.join(starts)}", file=sys.stderr)
    groups = [{name: start} for name, start in starts.items()] if alone else [starts]
    found: dict[str, Any] = {"by": by, "factor": factor, "vertices": n, "nonzeros": nnz, "alone": alone}
    found |= {"seconds": {}, "peak_bytes": {}, "prepared": {}, "left_out": left_out}
    for group in groups:
        try:
            compared = comparison.run(group, "tuned", args.rounds)
        except RuntimeError as error:
            left_out |= dict.fromkeys(group, str(error).strip().splitlines()[-1])
            continue
        for key in ("seconds", "peak_bytes", "prepared", "left_out"):
            found[key] |= compared[key]
    return found


def describe_ranks(found: dict[str, list[dict[str, Any]]]) -> str:
    base = None
    rows = []
    for name, runs in found.items():
        line = spread([run["seconds_per_epoch"] for run in runs])
        base = base or line["median"]
        rows.append(
            [
                name,
                f"{1000 * line['median']:.0f}",
                f"{1000 * line['min']:.0f} .. {1000 * line['max']:.0f}",
                f"{base / line['median']:.2f}",
                f"{max(run['measured_peak_bytes'] for run in runs) / MIB:.0f}",
            ]
        )
    head = ["ranks x threads", "ms/epoch (median)", "min .. max", "times the first", "peak MiB of a process"]
    return f"## Ranks and threads\n\n{GRAPH}, hidden {RANK_HIDDEN}, whole runs in turn.\n\n{table(head, rows)}"


def describe_sizes(results: list[dict[str, Any]]) -> str:
    rows = []
    for found in results:
        for name, line in found["seconds"].items():
            own = found["seconds"].get(OWN, line)["median"]
            rows.append(
                [
                    found["by"],
                    found["factor"],
                    f"{found['vertices']:,}",
                    f"{found['nonzeros']:,}",
                    name + (" (alone)" if found["alone"] else ""),
                    f"{1000 * line['median']:.0f}",
                    f"{1000 * line['min']:.0f} .. {1000 * line['max']:.0f}",
                    f"{1e9 * line['median'] / found['nonzeros']:.1f}",
                    f"{line['median'] / own:.2f}",
                    f"{found['peak_bytes'][name] / MIB:.0f}",
                ]
            )
        for name, why in found["left_out"].items():
            rows.append([found["by"], found["factor"], f"{found['vertices']:,}", "", name, why, "", "", "", ""])
    head = ["grows", "times", "vertices", "nonzeros", "contender", "ms/epoch (median)", "min .. max", "ns/nonzero"]
    head += ["time / mggcn", "peak MiB"]
    return f"## Size of the graph\n\n{GRAPH}, hidden {SIZE_HIDDEN}, malloc tuned, PyG {PYG}.\n\n{table(head, rows)}"


def plots_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds by nonzeros: a line for every contender, by what grows. Times one is the first point of both."""
    found = []
    for by in dict.fromkeys(size["by"] for size in results):
        points: dict[str, list[tuple[float, float]]] = {}
        for size in (size for size in results if size["by"] == by or size["factor"] == 1):
            for name, line in size["seconds"].items():
                points.setdefault(name, []).append((size["nonzeros"], line["median"]))
        found += lines(f"{GRAPH}, more {by}", "seconds per epoch", "nonzeros", points)
    return found


def main() -> None:
    args = parse()
    parts = args.parts.split(",")
    peers = find_peers(args.peers)
    around = surroundings()
    around["versions"] |= peers.told
    record: dict[str, Any] = {"surroundings": around, "ranks": {}, "sizes": []}
    text = f"Scale {args.scale:g}, {args.rounds} rounds.\n\n"
    if "ranks" in parts:
        record["ranks"] = measure_ranks(args)
        text += describe_ranks(record["ranks"]) + "\n"
    if "sizes" in parts:
        for by in args.by.split(","):
            factors = [int(factor) for factor in args.factors.split(",")]
            # Times one is the same graph whatever grows.
            fresh = [factor for factor in factors if factor > 1 or not record["sizes"]]
            record["sizes"] += [measure_size(by, factor, args) for factor in fresh]
        text += describe_sizes(record["sizes"]) + "\n" + missing_text(peers)
    record["plots"] = plots_of(record["sizes"])
    write_report("scaling", "Epochs by ranks, threads and the size of the graph", text, record, args.out)


if __name__ == "__main__":
    main()
