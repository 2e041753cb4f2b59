"""The normalised adjacency times a dense matrix: mggcn and other libraries, each in a process of its own, in turn.

The product is S A S X with self-loops, S the -1/2-th powers of the degrees. Every kind is what its library offers for it;
peers_spmm_cases.py says what one call of each does. glibc keeps its memory for all. Results are compared at 256 places.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import ceilings
from common import Worker, alternate, memory_free, spread, surroundings, table, write_report
from peers_cases import SPMM_GRAPHS, available, find_data, store_of
from peers_data import largest_apart
from peers_env import ADVICE, Peers, find_peers, missing_text
from peers_options import add_options
from peers_spmm_cases import KINDS, OWN, PLAIN
from peers_spmm_report import HEAD, describe, lines_of, plots_of

SHARE_OF_FREE = 0.7
"""Of the free memory, what all processes may need together."""
TOLERANCE, TOLERANCE_BF16 = 1e-4, 2e-2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", default=",".join(SPMM_GRAPHS))
    parser.add_argument("--widths", default="16,41,64,128,256,512")
    parser.add_argument("--kinds", default="", help="of products, separated by semicolons; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser, "scale", "threads", "peers", "ceilings", "data", "cache", "out")
    return parser.parse_args()


def chosen_kinds(peers: Peers, asked: str) -> tuple[list[str], list[str]]:
    """Kinds that can run here, and lines about those that cannot."""
    found, left_out = [], []
    for kind in asked.split(";") if asked else KINDS:
        library, _ = KINDS[kind]
        if library != OWN and library not in peers:
            left_out.append(f"{kind}: {peers.faults.get(library, ADVICE)}")
        elif kind == PLAIN and not importlib.util.find_spec("mggcn.backend.cpu.variants"):
            left_out.append(f"{kind}: mggcn has no other way yet")
        else:
            found.append(kind)
    return found, left_out


def needed_bytes(vertices: int, nonzeros: int, width: int) -> int:
    """About what one process holds: operand, result and a copy, the graph once or twice."""
    return 3 * 4 * vertices * width + 32 * nonzeros


def groups(kinds: list[str], capacity: int) -> list[list[str]]:
    """Share the kinds out to groups of processes that fit side by side; the first is in each. None if two do not fit."""
    base, *others = kinds
    if len(kinds) <= capacity:
        return [kinds]
    step = capacity - 1
    return [[base, *others[first : first + step]] for first in range(0, len(others), step)] if step > 0 else []


class Processes:
    """A process for each kind of product on one graph; a kind that fails is left out, with what it said last."""

    def __init__(self, store: Path, kinds: list[str], peers: Peers, threads: int) -> None:
        self.store, self.kinds, self.peers, self.threads = store, kinds, peers, threads
        self.workers: dict[str, Worker] = {}
        self.left_out: list[str] = []

    def prepare(self, width: int) -> None:
        """Have every process ready for products of a width."""
        for kind in self.kinds:
            job = {"store": str(self.store), "width": width, "kind": kind, "threads": self.threads}
            try:
                if kind in self.workers:
                    self.workers[kind].ready = self.workers[kind].ask("prepare", job)
                else:
                    python = sys.executable if KINDS[kind][0] == OWN else self.peers.python
                    self.workers[kind] = Worker("worker_product.py", "tuned", self.threads, job, python)
                self.workers[kind].ask("forget")
            except RuntimeError as error:
                self.left_out.append(f"{kind}: {str(error).strip().splitlines()[-1]}")
                if kind in self.workers:
                    self.workers.pop(kind).kill()
        self.kinds = list(self.workers)

    def kill(self) -> None:
        for worker in self.workers.values():
            worker.kill()


def measure(processes: Processes, width: int, rounds: int) -> dict[str, Any]:
    """Time every kind of a group at one width; one that dies is left out. Raises: RuntimeError if none is left."""
    processes.prepare(width)
    died: dict[str, str] = {}
    workers = processes.workers
    runs = alternate(workers, 1, rounds, died)
    processes.left_out += [f"{kind}: {why}" for kind, why in died.items()]
    processes.kinds = list(workers)
    results = {kind: worker.ask("result")["result"] for kind, worker in workers.items()}
    repeats = {kind: worker.ready["repeats"] for kind, worker in workers.items()}
    clocks = {
        clock: {kind: [run[clock] / repeats[kind] for run in found[1:]] for kind, found in runs.items()}
        for clock in ("seconds", "cpu_seconds")
    }
    facts = {kind: {key: worker.ready.get(key) for key in ("way", "order_seconds")} for kind, worker in workers.items()}
    if not workers:
        raise RuntimeError("no process is left")
    base = spread(next(iter(clocks["seconds"].values())))["median"]
    return {**clocks, "facts": facts, "apart": apart(results), "base_s": dict.fromkeys(workers, base)}


def apart(results: dict[str, list[float]]) -> dict[str, float]:
    """Largest difference of each result from the first, over the largest number."""
    base = next(iter(results.values()), [])
    largest = max(map(abs, base), default=1.0)
    return {kind: largest_apart(base, numbers) / largest for kind, numbers in results.items()}


def wrong(results: list[dict[str, Any]]) -> list[str]:
    """Kinds whose numbers are not those of the first."""
    return [
        f"{found['graph']}, width {found['width']}, {kind}: {error:.1e} of the largest number off"
        for found in results
        for kind, error in found["apart"].items()
        if not error <= (TOLERANCE_BF16 if "bf16" in kind else TOLERANCE)
    ]


def sizes_of(store: Path) -> tuple[int, int]:
    """Vertices, and nonzeros with self-loops."""
    import numpy as np

    n = int(np.load(store / "indptr.npy", mmap_mode="r").size) - 1
    return n, int(np.load(store / "indices.npy", mmap_mode="r").size) + n


def measure_graph(
    graph: str, store: Path, kinds: list[str], record: dict[str, Any], args: argparse.Namespace
) -> list[str]:
    """Add a graph's figures at every width to the record; return what was left out."""
    vertices, nonzeros = sizes_of(store)
    free, left_out = memory_free(), []
    processes: dict[tuple[str, ...], Processes] = {}
    for width in (int(text) for text in args.widths.split(",")):
        found: dict[str, Any] = {"graph": graph, "width": width, "vertices": vertices, "nonzeros": nonzeros}
        needed = needed_bytes(vertices, nonzeros, width)
        shared_out = groups(kinds, int(SHARE_OF_FREE * free / needed))
        for key in processes.keys() - {tuple(group) for group in shared_out}:
            processes.pop(key).kill()
        if not processes:
            free = memory_free()
            shared_out = groups(kinds, int(SHARE_OF_FREE * free / needed))
        for group in shared_out:
            key = tuple(group)
            # Processes stay for the next width if all fit; groups leave their memory to the next group.
            one = processes.setdefault(key, Processes(store, group, find_peers(args.peers), args.threads))
            try:
                merge(found, measure(one, width, args.rounds))
            except RuntimeError as error:
                left_out.append(f"{graph}, width {width}: {str(error).strip().splitlines()[-1]}")
                processes.pop(key).kill()
                continue
            left_out += one.left_out
            if len(shared_out) > 1:
                processes.pop(key).kill()
        if "seconds" in found:
            record["measured"].append(found)
            print(table(HEAD, lines_of(found, record["ceilings"], args.threads)), file=sys.stderr)
        if not shared_out:
            left_out.append(f"{graph}, width {width}: two processes do not fit into {free / 2**30:.0f} GiB")
    for one in processes.values():
        one.kill()
    return left_out


def merge(found: dict[str, Any], group: dict[str, Any]) -> None:
    """Add a group's figures; of the kind that all groups have, the first group's stay."""
    for key, by_kind in group.items():
        known = found.setdefault(key, {})
        known |= {kind: value for kind, value in by_kind.items() if kind not in known}


def main() -> None:
    args = parse()
    peers, data = find_peers(args.peers), find_data(args.data)
    print(missing_text(peers), file=sys.stderr, end="")
    around = surroundings()
    around["versions"] |= peers.told
    figures = json.loads(args.ceilings.read_text()) if args.ceilings else ceilings.measured(args.threads)
    settings = {"scale": args.scale, "threads": args.threads, "rounds": args.rounds}
    record: dict[str, Any] = {"surroundings": around, "settings": settings, "ceilings": figures, "measured": []}
    kinds, left_out = chosen_kinds(peers, args.kinds)
    for graph in args.graphs.split(","):
        if not available(graph, data):
            left_out.append(f"{graph}: not in the data folder")
            continue
        left_out += measure_graph(graph, store_of(graph, args.cache, args.scale, data), kinds, record, args)
    record["left_out"] = sorted(set(left_out))
    record["plots"] = plots_of(record["measured"])
    write_report("peers-spmm", "Products of a graph: mggcn and other libraries", describe(record), record, args.out)
    if faults := wrong(record["measured"]):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
