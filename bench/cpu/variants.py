"""Epochs of a run that chooses its sparse products' variants by the machine's figures, beside those with the best ones.

Every run is `mggcn train` in a process of its own, on a machine without figures:

figures only  from a store without a table: figures are measured at the start
best          from a store with the table of `mggcn tune --store`, which has timed all variants
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.contest import Case
from bench.graphs import available, find_data, store_of
from bench.peers.epochs import BASE, CASES
from bench.process import MALLOC, mggcn
from bench.report import ROOT, SEED, listed, milliseconds, parse, spread, surroundings, table, verdict, write_report

FIGURES, BEST = "figures only", "best"
FIRST = 3
"""Epochs that do not count."""
PLANNED = 200
"""Epochs that runs are told to make, of which some are run: the default of train.epochs."""
POLL_S = 0.3
EVERY = 1000
"""Epochs' seconds that timing all may take: as many as it takes."""
GOAL = 1.05


@contextmanager
def unknown_machine() -> Iterator[None]:
    """Have commands keep and find figures in a folder that is empty at first."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="mggcn-figures-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def settings_of(case: Case) -> list[str]:
    """The words of a command that name a network."""
    settings = {"model.hidden": ",".join(map(str, case.hidden)), "train.eval_every": 0}
    settings |= {f"run.{key}": value for key, value in BASE.items()}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def trained(case: Case, store: Path, name: str, best: bytes, args: Any) -> list[float]:
    """Train once; return the seconds of its epochs."""
    place = store / "tuned.json"
    place.unlink(missing_ok=True)
    if name == BEST and best:
        place.write_bytes(best)
    with unknown_machine(), tempfile.TemporaryDirectory(prefix="mggcn-variants-") as folder:
        run = Path(folder) / "run"
        words = ["train", str(store), *settings_of(case), "--threads", str(args.threads), "--epochs", str(PLANNED)]
        words += ["--out", str(run), "--quiet"]
        command = [sys.executable, "-m", "mggcn", *words]
        with subprocess.Popen(command, env=os.environ | MALLOC["tuned"], cwd=ROOT, stderr=subprocess.PIPE) as process:
            while process.poll() is None and len(epochs_of(run)) < FIRST + args.epochs:
                time.sleep(POLL_S)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            _, said = process.communicate()
        if process.returncode not in (0, 128 + signal.SIGINT, -signal.SIGINT):  # the last: just as it was ending
            raise RuntimeError(said.decode().strip())
        return epochs_of(run)[: FIRST + args.epochs]


def epochs_of(run: Path) -> list[float]:
    """The seconds of the epochs that a run has made so far."""
    history = run / "history.jsonl"
    lines = history.read_text().splitlines(keepends=True) if history.exists() else []
    return [json.loads(line)["seconds"] for line in lines if line.endswith("\n")]


def measure(case: Case, store: Path, args: Any) -> dict[str, Any]:
    """Find the best variants, then train every contender in shuffled rounds, on a copy of the store."""
    with tempfile.TemporaryDirectory(prefix="mggcn-variants-", dir=args.cache) as folder:
        copy = Path(folder) / store.name
        shutil.copytree(store, copy, ignore=shutil.ignore_patterns("tuned.json"))
        with unknown_machine():
            words = ["--threads", str(args.threads), "--epochs", str(EVERY), *settings_of(case)]
            mggcn("tune", "--store", str(copy), *words, malloc="tuned")
        best = (copy / "tuned.json").read_bytes() if (copy / "tuned.json").exists() else b""
        runs: dict[str, list[list[float]]] = {FIGURES: [], BEST: []}
        shuffled = random.Random(SEED)
        for _ in range(args.rounds):
            for name in shuffled.sample(list(runs), len(runs)):
                runs[name].append(trained(case, copy, name, best, args))
    return {"case": case.name, "runs": runs}


def from_the_fourth(runs: list[list[float]]) -> list[float]:
    return [seconds for run in runs for seconds in run[FIRST:]]


def ratio_of(found: dict[str, Any], name: str) -> float:
    """Seconds of an epoch over those with the best variants."""
    medians = {name: statistics.median(from_the_fourth(runs)) for name, runs in found["runs"].items()}
    return medians[name] / medians[BEST]


def describe(results: list[dict[str, Any]], args: Any) -> str:
    text = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds of {args.epochs} epochs, malloc tuned.\n\n"
    )
    text += verdict("over the best, the worst network", max(ratio_of(f, FIGURES) for f in results), GOAL, at_most=True)
    head = ["case", "run", "ms/epoch from the 4th on", "min .. max", "over the best"]
    rows = []
    for found in results:
        for name, runs in found["runs"].items():
            times = milliseconds(spread(from_the_fourth(runs)))
            rows.append([found["case"], name, *times, f"{ratio_of(found, name):.2f}"])
    return f"{text}\n{table(head, rows)}"


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "cases": {"default": "", "help": "networks, separated by commas (default: all eight)"},
        "epochs": {"type": int, "default": 40, "help": "that count of each run, behind the first three"},
        "rounds": {"type": int, "default": 3, "help": "runs of each contender"},
    }
    return parse(__doc__, "scale", "threads", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    for case in (CASES[name] for name in listed(args.cases, list(CASES))):
        if available(case.graph, find_data(args.data)):
            print(case.name, file=sys.stderr)
            record["measured"].append(measure(case, store_of(case.graph, args), args))
    write_report("variants", "Variants by the machine's figures", describe(record["measured"], args), record, args.out)


if __name__ == "__main__":
    main()
