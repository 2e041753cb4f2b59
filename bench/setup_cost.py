"""What set-up costs, in epochs: planning, the order by locality when made and when kept, building the rank, tuning.

Two epochs are compared in turn, with and without the order, so that it shows when the order has paid for itself. Tuning is
measured as a run does it: what `mggcn train --tune` reports, beside the seconds of the same epochs without it. The store is
a copy; what it keeps is removed first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import MALLOC, Worker, alternate, spread, surroundings, table, write_report
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
    parser.add_argument("--epochs", type=int, default=40, help="epochs of the runs with and without tuning")
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
        epochs = alternate(workers, 1, args.rounds, lost := {})
        if lost:
            raise RuntimeError(str(lost))
    finally:
        for worker in workers.values():
            worker.kill()
    for name, setups in found["setups"].items():
        found[name] = {part: spread([one[part] for one in setups])["median"] for part in ("plan", "rank")}
    found["epochs"] = {name: [run["seconds"] for run in runs[1:]] for name, runs in epochs.items()}
    return found | {"tuning": tuning(store, case, args)}


def tuning(store: Path, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """What a run with --tune says about its cost, the seconds of its epochs and of those of a run without, in this order.

    Beside it the seconds of the whole command `mggcn tune --store`. The table is removed before each.
    """
    run = base_settings(switches())["run"]
    settings = [f"model.hidden={','.join(map(str, case.hidden))}", "train.eval_every=0"]
    settings += [f"run.{key}={value}" for key, value in run.items()]
    common = [word for setting in settings for word in ("--set", setting)] + ["--threads", str(args.threads)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mggcn-tuning-") as folder:
        for name, switch in (("plain", []), ("tuned", ["--tune"])):
            out = Path(folder) / name
            command = [
                "train",
                str(store),
                *common,
                *switch,
                "--epochs",
                str(args.epochs),
                "--out",
                str(out),
                "--quiet",
            ]
            timed_command(store, command)
            found[name] = [json.loads(line)["seconds"] for line in (out / "history.jsonl").read_text().splitlines()]
        nothing = {"seconds": 0.0, "beaten": 0, "unfinished": 0}
        found["said"] = json.loads((out / "result.json").read_text()).get("tuning", nothing)
    found["command_s"] = timed_command(store, ["tune", "--store", str(store), *common])
    return found


def timed_command(store: Path, arguments: list[str]) -> float:
    """Seconds of a command on a store that was never tuned, its malloc tuned as that of the processes that are compared.

    Raises: RuntimeError with what it printed if it fails.
    """
    (store / "tuned.json").unlink(missing_ok=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "mggcn", *arguments]
    done = subprocess.run(command, env=os.environ | MALLOC["tuned"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return time.perf_counter() - began


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Seconds that set-up takes more than without the order when it is made, in epochs, and when they are paid back."""
    epoch = {name: spread(values)["median"] for name, values in found["epochs"].items()}
    whole = {name: found[name]["plan"] + found[name]["rank"] for name in ("made", "none", "locality")}
    extra, saved = whole["made"] - whole["none"], epoch["none"] - epoch["locality"]
    tuned = found["tuning"]["said"]["seconds"]
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
    tuning = found["tuning"]
    pairs = [f"{found[name]['plan']:.2f} + {found[name]['rank']:.2f}" for name in ("none", "made", "locality")]
    return [
        found["case"],
        *pairs,
        f"{figures['extra']:.2f}",
        f"{tuning['said']['seconds']:.2f}",
        " + ".join(f"{tuning['said'][name]:.0f}" for name in ("beaten", "unfinished")),
        *(f"{sum(tuning[name]):.1f}" for name in ("plain", "tuned")),
        f"{tuning['command_s']:.1f}",
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
    "tuning s",
    "products it changed + left open",
    "all epochs, s",
    "with tuning",
    "mggcn tune s",
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
        "its making adds. Tuning s: what the calls of a run with --tune took above the fastest ways, as the run reports "
        f"it; beside it the seconds of its first {args.epochs} epochs without and with --tune, one process after the "
        "other, and of the whole command mggcn tune --store, which a run does not need. Goal: "
        f"order and tuning take at most {EPOCHS} epochs, or are paid back by the order within {PAYS_BACK}; both are kept "
        f"beside the store.\n\n{table(HEAD, rows)}"
    )
    write_report("setup-cost", "What set-up costs", body, record, args.out)


if __name__ == "__main__":
    main()
