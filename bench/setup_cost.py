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
from peers_cases import CASES, Case, available, find_data, store_of
from peers_epoch import classes_of
from peers_options import add_options
from peers_switches import base_settings, run_settings, switches

EPOCHS, PAYS_BACK = 3, 20
"""Set-up may cost so many epochs, or must have paid for itself after so many."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="networks on graphs, by name")
    parser.add_argument("--setups", type=int, default=3, help="times that each is set up; medians count")
    parser.add_argument("--rounds", type=int, default=7, help="timed epochs of each")
    add_options(parser, "scale", "threads", "data", "cache", "out")
    return parser.parse_args()


def set_up(job: dict[str, Any], args: argparse.Namespace) -> tuple[Worker, dict[str, float]]:
    """Start a process of mggcn; return it and the seconds of its plan and its rank."""
    worker = Worker("worker_mggcn.py", "tuned", args.threads, job)
    return worker, {"plan": worker.ready["plan_seconds"], "rank": worker.ready["make_rank_seconds"]}


def measure(case: Case, store: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Set up without the order, with it made now, and with it kept, several times in turn; then compare the epochs."""
    here = switches()
    settings = {"none": run_settings(here, {"ways"}), "made": base_settings(here), "locality": base_settings(here)}
    job = {"store": str(store), "hidden": case.hidden, "classes": classes_of(store)}
    found: dict[str, Any] = {"case": case.name, "setups": {name: [] for name in settings}}
    workers: dict[str, Worker] = {}
    try:
        for number in range(args.setups):
            shutil.rmtree(store / "partitions", ignore_errors=True)
            for name, chosen in settings.items():
                worker, seconds = set_up(job | {"settings": chosen}, args)
                found["setups"][name].append(seconds)
                if number == args.setups - 1 and name != "made":
                    workers[name] = worker
                else:
                    worker.kill()
        epochs = alternate(workers, 1, args.rounds)
    finally:
        for worker in workers.values():
            worker.kill()
    for name, setups in found["setups"].items():
        found[name] = {part: spread([one[part] for one in setups])["median"] for part in ("plan", "rank")}
    found["epochs"] = {name: [run["seconds"] for run in runs[1:]] for name, runs in epochs.items()}
    return found | tuning(store, case, args.threads)


def tuning(store: Path, case: Case, threads: int) -> dict[str, Any]:
    """Seconds of `mggcn tune --store` for this network, None if this version tunes no stores, text if it fails."""
    command = [sys.executable, "-m", "mggcn", "tune"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    if "--store" not in told:
        return {"tune": None}
    hidden, order = ",".join(map(str, case.hidden)), base_settings(switches())["run"]["order"]
    command += ["--store", str(store), "--threads", str(threads)]
    command += ["--set", f"model.hidden={hidden}", "--set", f"run.order={order}"]
    began = time.perf_counter()
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
                    shutil.copytree(source, store, ignore=shutil.ignore_patterns("partitions", "tuned.json"))
                record["measured"].append(measure(case, store, args))
    rows = [row_of(found) for found in record["measured"]]
    body = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.setups} set-ups, {args.rounds} rounds, malloc tuned.\n\n"
        "Plan: opening the store, shares and sizes, the order where it is made; rank: reading, tiles, A X. Order s: what "
        "its making adds. Tune s: mggcn tune --store, with the start of its process, which a run does not need. Goal: "
        f"order and tuning take at most {EPOCHS} epochs, or are paid back by the order within {PAYS_BACK}; both are kept "
        f"beside the store.\n\n{table(HEAD, rows)}"
    )
    write_report("setup-cost", "What set-up costs", body, record, args.out)


if __name__ == "__main__":
    main()
