"""Training epochs of mggcn, DGL and PyG on one graph at a time, each in a process of its own, in turn and shuffled.

All train the same network from the same weights without dropout; losses must agree. mggcn computes A X once, as its plan
does of itself; DGL and PyG do what their layers do. A second comparison has A X computed once for all. mggcn's rows are
float32 in the order by locality without pruning, unless they say otherwise; a third comparison switches its parts off one
by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ceilings
from common import Worker, alternate, memory_free, spread, surroundings, write_report
from peers_cases import CASES, Case, available, find_data, store_of
from peers_data import largest_apart
from peers_env import Peers, find_peers
from peers_epoch_report import PARTS, describe, plots_of
from peers_options import add_options
from peers_switches import ALL_ON, OWN, base_settings, switches, without

PYG_KINDS = ("fused", "scaled", "csr", "sparse", "scatter")
PILOT_ROUNDS = 2
TOLERANCE, TOLERANCE_BF16 = 1e-4, 2e-2
COMPARED_EPOCHS = 3
SHARE_OF_FREE = 0.6


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="networks on graphs, by name")
    parser.add_argument("--rounds", type=int, default=10, help="timed epochs of each contender")
    parser.add_argument("--warm-up", type=int, default=2, help="epochs before them")
    parser.add_argument("--malloc", default="tuned,default", help="settings of glibc, a comparison for each")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which comparisons; without peers the report's name lists them"
    )
    add_options(parser, "scale", "threads", "peers", "ceilings", "data", "cache", "out")
    return parser.parse_args()


def classes_of(store: Path) -> int:
    """Columns of the last layer: as the store says, or one more than the largest label."""
    import numpy as np

    known = json.loads((store / "meta.json").read_text()).get("num_classes")
    return int(known or np.load(store / "labels.npy").max() + 1)


def scatter_bytes(store: Path, case: Case) -> int:
    """About what autograd keeps of messages that are written out, in float32."""
    import numpy as np

    edges = int(np.load(store / "indices.npy", mmap_mode="r").size)
    return 8 * 4 * edges * max(case.hidden)


class Comparison:
    """Processes that train one network on one graph; mggcn's first, whose initial weights the others read."""

    def __init__(self, case: Case, store: Path, peers: Peers, args: argparse.Namespace) -> None:
        self.case, self.store, self.peers, self.args = case, store, peers, args
        widths = "-".join(map(str, case.hidden))
        self.weights = f"{store}-{widths}.npz"
        self.job = {"store": str(store), "hidden": case.hidden, "classes": classes_of(store), "weights": self.weights}

    def own(self, settings: dict[str, Any], plain: bool, keep_weights: bool, malloc: str) -> Worker:
        job = self.job | {"settings": settings, "plain_rows": plain}
        job["weights"] = self.weights if keep_weights else None
        return Worker("worker_mggcn.py", malloc, self.args.threads, job)

    def peer(self, script: str, extra: dict[str, Any], malloc: str) -> Worker:
        return Worker(script, malloc, self.args.threads, self.job | extra, self.peers.python)

    def run(self, starts: dict[str, Any], malloc: str, rounds: int) -> dict[str, Any]:
        """Start every contender, alternate their epochs, close them. One that cannot start, fails or dies is left out."""
        workers: dict[str, Worker] = {}
        left_out: dict[str, str] = {}
        try:
            for name, start in starts.items():
                try:
                    workers[name] = start(malloc)
                    workers[name].ask("forget")
                except RuntimeError as error:
                    left_out[name] = str(error).strip().splitlines()[-1]
            epochs = alternate(workers, self.args.warm_up, rounds, left_out)
            peaks = {name: worker.close()["memory"]["VmHWM"] for name, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.kill()
        timed = {name: runs[self.args.warm_up :] for name, runs in epochs.items()}
        return {
            "malloc": malloc,
            "left_out": left_out,
            "prepared": {name: worker.ready for name, worker in workers.items()},
            "epochs": timed,
            "losses": {name: [run["loss"] for run in runs] for name, runs in epochs.items()},
            "seconds": {name: spread([run["seconds"] for run in runs]) for name, runs in timed.items()},
            "peak_bytes": peaks,
            "loss_error": loss_errors(epochs),
        }

    def fastest_pyg(self) -> tuple[str, dict[str, Any]]:
        """Try every way of PyG alone; return the fastest one and the seconds of all, "" if there is none."""
        found: dict[str, Any] = {}
        for kind in PYG_KINDS:
            if kind == "sparse" and "torch-sparse" not in self.peers:
                found[kind] = self.peers.faults["torch-sparse"]
            elif kind == "scatter" and scatter_bytes(self.store, self.case) > SHARE_OF_FREE * memory_free():
                found[kind] = "its messages need more than the free memory"
            else:
                start = {kind: self.pyg(kind)}
                try:
                    tried = self.run(start, "tuned", PILOT_ROUNDS)
                except RuntimeError as error:
                    found[kind] = str(error).strip().splitlines()[-1]
                else:
                    found[kind] = tried["seconds"].get(kind, {}).get("median", tried["left_out"].get(kind))
        timed = {kind: value for kind, value in found.items() if isinstance(value, float)}
        return min(timed, key=timed.__getitem__, default=""), found

    def pyg(self, kind: str, precomputed: bool = False) -> Any:
        return lambda malloc: self.peer("worker_pyg.py", {"kind": kind, "precomputed": precomputed}, malloc)

    def dgl(self, precomputed: bool = False) -> Any:
        return lambda malloc: self.peer("worker_dgl.py", {"precomputed": precomputed}, malloc)

    def mggcn(self, settings: dict[str, Any], plain: bool = False, keep_weights: bool = False) -> Any:
        return lambda malloc: self.own(settings, plain, keep_weights, malloc)


def loss_errors(epochs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Largest relative difference of each contender's loss from the first one's over the first epochs."""
    losses = {name: [run["loss"] for run in runs[:COMPARED_EPOCHS]] for name, runs in epochs.items()}
    base = next(iter(losses.values()), [])
    ratios = {name: [a / b for a, b in zip(other, base, strict=True)] for name, other in losses.items()}
    return {name: largest_apart(found, [1.0] * len(found)) for name, found in ratios.items()}


def contenders(comparison: Comparison, part: str, pyg: str) -> dict[str, Any]:
    """What starts every contender of a part of the comparisons; the first one writes the weights."""
    on = switches()
    starts = {OWN: comparison.mggcn(base_settings(on), keep_weights=True)}
    if part == "switches":
        for name, (settings, plain) in without(on).items():
            starts[name] = comparison.mggcn(settings, plain)
        return starts
    aggregated = part == "precomputed"
    suffix = ", A X precomputed" if aggregated else ""
    if not aggregated:
        for name in ("bf16", "prune"):
            if on[name]:
                settings = base_settings(on) | {"run": base_settings(on)["run"] | ALL_ON[name]}
                starts[f"{OWN} {name}"] = comparison.mggcn(settings)
    if "dgl" in comparison.peers:
        starts["DGL" + suffix] = comparison.dgl(aggregated)
    if pyg:
        starts[f"PyG {pyg}" + suffix] = comparison.pyg(pyg, aggregated)
    return starts


def measure(case: Case, store: Path, peers: Peers, args: argparse.Namespace) -> dict[str, Any]:
    """All comparisons of one case; one whose process dies is lost, and said to be."""
    import numpy as np

    comparison = Comparison(case, store, peers, args)
    print(f"{case.name}: starting", file=sys.stderr)
    first = comparison.own(base_settings(switches()), False, True, "tuned")  # writes the weights for the pilots
    first.close()
    pyg, pilots = comparison.fastest_pyg() if "pyg" in peers else ("", {})
    found: dict[str, Any] = {"case": case.name, "pilots": pilots, "comparisons": [], "lost": []}
    found["vertices"] = int(np.load(store / "indptr.npy", mmap_mode="r").size) - 1
    found["nonzeros"] = int(np.load(store / "indices.npy", mmap_mode="r").size)
    for part in args.parts.split(","):
        for malloc in args.malloc.split(",") if part == "peers" else ["tuned"]:
            print(f"{case.name}: {part}, malloc {malloc}", file=sys.stderr)
            try:
                compared = comparison.run(contenders(comparison, part, pyg), malloc, args.rounds)
            except RuntimeError as error:
                found["lost"].append(f"{part}, malloc {malloc}: {str(error).strip().splitlines()[-1]}")
            else:
                found["comparisons"].append({"part": part, **compared})
    return found


def wrong(record: dict[str, Any]) -> list[str]:
    """Contenders whose losses are not mggcn's."""
    return [
        f"{found['case']}, {name}: losses differ by {error:.1e}"
        for found in record["measured"]
        for compared in found["comparisons"]
        for name, error in compared["loss_error"].items()
        if not error <= (TOLERANCE_BF16 if "bf16" in name or "switches" in name or "without" in name else TOLERANCE)
    ]


def report_name(parts: list[str]) -> str:
    """Name the report of what each library does of itself, with or without more, peers-epoch; others by their parts.

    Raises: SystemExit for a part that does not exist.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        sys.exit(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return "-".join(["peers-epoch", *(() if "peers" in parts else parts)])


def main() -> None:
    args = parse()
    name_of_report = report_name(args.parts.split(","))
    peers, data = find_peers(args.peers), find_data(args.data)
    around = surroundings()
    around["versions"] |= peers.told
    figures = json.loads(args.ceilings.read_text()) if args.ceilings else ceilings.measured(args.threads)
    keys = ("scale", "rounds", "warm_up", "threads")
    settings = {key: getattr(args, key) for key in keys}
    record: dict[str, Any] = {"surroundings": around, "settings": settings, "ceilings": figures, "measured": []}
    record["left_out"] = dict(peers.faults)
    for name in args.cases.split(","):
        case = CASES[name]
        if not available(case.graph, data):
            record["left_out"][name] = "the graph is not in the data folder"
            continue
        record["measured"].append(measure(case, store_of(case.graph, args.cache, args.scale, data), peers, args))
    record["plots"] = plots_of(record)
    write_report(name_of_report, "Training epochs: mggcn, DGL and PyG", describe(record), record, args.out)
    if faults := wrong(record):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
