"""Train a grid of settings, or draws at random or by TPE, on one store; print a table and the best run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from mggcn.cli.answer import add_json
from mggcn.cli.colour import painted
from mggcn.cli.settings import add_settings, given_settings, read_settings
from mggcn.cli.train import store_path
from mggcn.comm.failure import Interrupted
from mggcn.comm.rank import require_one_process
from mggcn.errors import ConfigError, printable, shown
from mggcn.graph.store import open_store
from mggcn.memory.units import duration
from mggcn.runs.sweep import Sweep, Trial, make_sweep, read_sweep, run_sweep
from mggcn.runs.sweep_folder import trial_folder
from mggcn.runs.sweep_space import PRUNERS, SEARCHES, as_text, read_space, refuse_both


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("grid", nargs="?", type=Path, help="TOML file with a table [grid]; not with --resume")
    parser.add_argument("store", nargs="?", help="store or data set, as of mggcn train; not with --resume")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the sweep; default: runs/sweep-<graph>-<time>"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="train what a sweep has left, and failed trials again"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="draw N settings instead of the whole grid")
    parser.add_argument("--search", choices=SEARCHES, help="how settings are drawn; default: at random with --trials")
    parser.add_argument("--pruner", choices=PRUNERS, help="median: stop trials whose validation is behind the others'")
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        metavar="N",
        help="trials trained at the same time; default: one for each core, or --threads of them, or GPU",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    add_json(parser)
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train every trial, print each as it ends, then the table. Exit code 1 if all failed, 2 if one is damaged."""
    require_one_process("mggcn sweep")
    a = arguments
    if a.at_once < 0:
        raise ConfigError(f"--at-once must be 0 or more, got {a.at_once}")
    if a.resume is not None:
        own = a.grid is not None or a.out is not None or a.trials is not None or a.search or a.pruner or a.at_once
        if (
            own
            or a.config is not None
            or a.set
            or any(v is not None for k, v in vars(a).items() if k.startswith("setting_"))
        ):
            raise ConfigError(
                f"--resume {a.resume} continues that sweep as it began; remove GRID, STORE, settings, --out, "
                "--trials, --search, --pruner and --at-once"
            )
        sweep = read_sweep(a.resume)[0]
    else:
        sweep = _new(a)
    folder, total = sweep.folder, sweep.planned
    ended = sum(trial.result is not None or trial.pruned for trial in sweep.trials)
    if not a.quiet:
        by = f", compared by {sweep.metric}" if sweep.metric else ""
        print(f"sweep folder {printable(folder)}, {total - ended} of {total} trials to train{by}", flush=True)

    began, before = time.monotonic(), ended

    def tell(trial: Trial) -> None:
        nonlocal ended
        ended += 1
        if not a.quiet:
            left = (time.monotonic() - began) / (ended - before) * (total - ended)
            print(_line(trial, ended, total) + f", {duration(left)} left" * (ended < total), flush=True)

    try:
        sweep = run_sweep(folder, tell)
    except Interrupted:
        if not a.quiet:
            print(f"saved; continue with: mggcn sweep --resume {printable(folder)}", flush=True)
        raise
    if not a.quiet:
        print(summary(sweep))
    a.answer = answer(sweep)
    if any(trial.damaged for trial in sweep.trials):
        return 2
    return 0 if any(trial.result for trial in sweep.trials) else 1


def _new(a: argparse.Namespace) -> Sweep:
    """Write the folder of the sweep that the arguments describe."""
    if a.grid is None or a.store is None:
        raise ConfigError("mggcn sweep needs GRID, a TOML file, and STORE; or --resume DIR to continue a sweep")
    space, base = read_space(a.grid)
    given = {name: getattr(a, name) for name in ("trials", "search", "pruner") if getattr(a, name) is not None}
    space = dataclasses.replace(space, **given)
    config = space.base(lambda point: read_settings(a, {a.grid: base}, point))
    refuse_both(space.candidates, given_settings(a))
    store = store_path(a.store, a.root)
    sweep = make_sweep(space, config, open_store(store), store, a.out, a.at_once)
    if space.shortage and not a.quiet:
        print(space.shortage, flush=True)
    return sweep


def _line(trial: Trial, ended: int, total: int) -> str:
    metric = (trial.result or {}).get("metric")
    scores = ", ".join(f"{name} {metric} {score:.4f}" for name, score in trial.scores.items() if score is not None)
    scores += " (SAMPLED)" * bool(trial.sampled)
    ending = trial.error if trial.pruned else f"failed: {trial.error}" if trial.error else scores
    return f"[{ended}/{total}] {printable(as_text(trial.settings))}: {ending} ({trial.seconds or 0:.1f} s)"


def answer(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep for JSON: every trial, best scores first, and which is the best."""
    found = [
        {
            "trial": trial.number,
            "settings": trial.settings,
            "scores": trial.scores,
            "evaluated_fanout": trial.sampled or None,
            "epochs": (trial.result or {}).get("epochs"),
            "seconds": trial.seconds,
            "error": trial.error or None,
            "folder": trial_folder(sweep.folder, trial.number),
        }
        for trial in sweep.ranked
    ]
    best = None if sweep.best is None else sweep.best.number
    return {"folder": sweep.folder, "metric": sweep.metric, "best": best, "trials": found}


def summary(sweep: Sweep) -> str:
    """Return the table, and where the best run is."""
    text = shown(f"{sweep!r}\n")
    if sweep.best is None:
        return text + "no trial has a validation score to choose by"
    best = painted(f"best: {printable(sweep.best_folder)}", "bold", sys.stdout)
    return f"{text}{best}; score it with mggcn predict, look at it with mggcn report"
