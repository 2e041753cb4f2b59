"""What set-up costs, in epochs: planning, the order by locality when it is made and when it is kept, and building the rank.

Two epochs are compared in turn, with and without the order, so that it shows when the order has paid for itself. The store
is a copy; what it keeps is removed first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Worker, alternate, spread, surroundings, table, write_report
from peers_cases import CACHE, CASES, Case, available, find_data, store_of
from peers_epoch import classes_of
from peers_switches import base_settings, run_settings, switches

EPOCHS, PAYS_BACK = 3, 20
"""Set-up may cost so many epochs, or must have paid for itself after so many."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="networks on graphs, by name")
    parser.add_argument("--scale", type=float, default=1.0, help="of generated graphs")
    parser.add_argument("--rounds", type=int, default=7, help="timed epochs of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, help="folder of the real graphs (default: $MGGCN_DATA)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder that keeps the graphs")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def seconds_of(worker: Worker) -> dict[str, float]:
    ready = worker.ready
    return {"plan": ready["plan_seconds"], "rank": ready["make_rank_seconds"]}


def measure(case: Case, store: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Set up three times: without the order, with it made now, with it kept; then compare the epochs."""
    here = switches()
    ordered, plain = base_settings(here), run_settings(here, {"ways"})
    shutil.rmtree(store / "partitions", ignore_errors=True)
    job = {"store": str(store), "hidden": case.hidden, "classes": classes_of(store)}
    workers: dict[str, Worker] = {}
    try:
        workers["made"] = Worker("worker_mggcn.py", "tuned", args.threads, job | {"settings": ordered})
        made = seconds_of(workers.pop("made"))
        workers["none"] = Worker("worker_mggcn.py", "tuned", args.threads, job | {"settings": plain})
        workers["locality"] = Worker("worker_mggcn.py", "tuned", args.threads, job | {"settings": ordered})
        epochs = alternate(workers, 1, args.rounds)
    finally:
        for worker in workers.values():
            worker.kill()
    found: dict[str, Any] = {"case": case.name, "made": made}
    found |= {name: seconds_of(worker) for name, worker in workers.items()}
    found["epochs"] = {name: [run["seconds"] for run in runs[1:]] for name, runs in epochs.items()}
    return found | tuning(store, case)


def tuning(store: Path, case: Case) -> dict[str, Any]:
    """Seconds of `mggcn tune` for this store, if this version tunes stores."""
    command = [sys.executable, "-m", "mggcn", "tune"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    if "--store" not in told:
        return {"tune": None}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        widths = ["--width", str(max(case.hidden))] if "--width" in told else []
        command += ["--store", str(store), *widths, "--out", str(Path(folder) / "tuned.toml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"tune": time.perf_counter() - began} if done.returncode == 0 else {"tune": done.stderr.strip()}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Seconds that set-up takes more than without the order when it is made, in epochs, and when they are paid back."""
    epoch = {name: spread(values)["median"] for name, values in found["epochs"].items()}
    whole = {name: found[name]["plan"] + found[name]["rank"] for name in ("made", "none", "locality")}
    extra, saved = whole["made"] - whole["none"], epoch["none"] - epoch["locality"]
    tuned = found["tune"] if isinstance(found["tune"], float) else 0.0
    return {
        "extra": extra,
        "in_epochs": (extra + tuned) / epoch["locality"],
        "whole_in_epochs": whole["made"] / epoch["locality"],
        "pays_back": (extra + tuned) / saved if saved > 0 else float("inf"),
    }


def row_of(found: dict[str, Any]) -> list[str]:
    figures = summary(found)
    epoch = {name: spread(values)["median"] for name, values in found["epochs"].items()}
    met = figures["in_epochs"] <= EPOCHS or figures["pays_back"] <= PAYS_BACK
    tuned = found["tune"]
    pairs = [f"{found[name]['plan']:.2f} + {found[name]['rank']:.2f}" for name in ("none", "made", "locality")]
    return [
        found["case"],
        *pairs,
        f"{figures['extra']:.2f}",
        "-" if tuned is None else f"{tuned:.1f}" if isinstance(tuned, float) else tuned.splitlines()[-1],
        *(f"{1000 * epoch[name]:.0f}" for name in ("none", "locality")),
        f"{figures['in_epochs']:.1f}",
        "never" if figures["pays_back"] == float("inf") else f"{figures['pays_back']:.1f}",
        f"{figures['whole_in_epochs']:.1f}",
        "met" if met else "MISSED",
    ]


HEAD = (
    "case",
    "no order: plan + rank s",
    "order made",
    "order kept",
    "order s",
    "tune s",
    "ms/epoch, no order",
    "ordered",
    "order and tuning in epochs",
    "pay back after",
    "whole set-up in epochs",
    "goal",
)


def main() -> None:
    args = parse()
    data = find_data(args.data)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    with tempfile.TemporaryDirectory(prefix="mggcn-setup-", dir=args.cache if args.cache.is_dir() else None) as folder:
        for name in args.cases.split(","):
            case = CASES[name]
            if available(case.graph, data):
                print(name, file=sys.stderr)
                source = store_of(case.graph, args.cache, args.scale, data)
                store = Path(folder) / source.name
                if not store.exists():
                    shutil.copytree(source, store, ignore=shutil.ignore_patterns("partitions"))
                record["measured"].append(measure(case, store, args))
    rows = [row_of(found) for found in record["measured"]]
    body = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds, malloc tuned. Plan: opening the store, "
        "shares and sizes, the order where it is made; rank: reading, tiles, A X. Order s: what its making adds. Goal: at "
        f"most {EPOCHS} epochs, or paid back within {PAYS_BACK}; the order is kept beside the store.\n\n{table(HEAD, rows)}"
    )
    write_report("setup-cost", "What set-up costs", body, record, args.out)


if __name__ == "__main__":
    main()
