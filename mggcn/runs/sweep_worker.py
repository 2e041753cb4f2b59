"""A process of a sweep: `python -m mggcn.runs.sweep_worker FOLDER STORE --sharing J [--cores 0,1]` trains what it is told.

Each line of its input is a trial's number, settings and pruner as JSON, each line of its output the trial's result. When
its input ends in a trial, it saves, as at SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mggcn import native, output
from mggcn.comm.failure import Interrupted
from mggcn.config import Config
from mggcn.config.files import from_toml
from mggcn.errors import MggcnError, RunError
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.planning.shared import Shared
from mggcn.runs import train as training
from mggcn.runs.folder import read_run
from mggcn.runs.sweep import PRUNED, Trial
from mggcn.runs.sweep_folder import trial_folder
from mggcn.runs.sweep_space import with_trial
from mggcn.runs.sweep_study import Settings, is_behind, steps_of, study_of
from mggcn.train.log import read_history
from mggcn.train.tensorboard import log_trial


class Pruning:
    """Stops a trial that is behind earlier ones, as SIGTERM does: `mggcn train --resume` can continue it."""

    def __init__(self, sweep: Path, config: Config, before: list[dict[str, Any]]) -> None:
        """Begin behind the epochs of the trial that are saved."""
        self._study = study_of(sweep)
        self._epochs = config.train.epochs
        self._steps = steps_of(before, self._epochs)
        self.reason: str = ""

    def __call__(self, row: dict[str, Any]) -> None:
        """Take an epoch, and stop the trial if it is the first scored one of a step and behind."""
        new = steps_of([row], self._epochs).keys() - self._steps
        self._steps = steps_of([row], self._epochs) | self._steps
        if new and not self.reason and is_behind(self._study, self._steps):
            self.reason = (
                f"{PRUNED}val {row['val']:.4g} after {row['epoch']} epochs, behind the median of earlier trials"
            )
            os.kill(os.getpid(), signal.SIGTERM)


def train_trial(
    sweep: Path,
    settings: Settings,
    number: int,
    graph: Graph,
    store: Path,
    shared: Shared,
    sharing: int,
    pruner: str = "none",
) -> dict[str, Any]:
    """Train a trial in its folder of the sweep, or continue it, and return its result.

    sharing: trials that share the free memory.
    Raises: as prepare_run and run_training; RunError if it was pruned.
    """
    folder, pruning = trial_folder(sweep, number), None
    begun = (folder / "checkpoints" / "latest").exists()
    if begun:
        config = read_run(folder)[0]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        config = with_trial(from_toml(sweep / "config.toml", saved=True), settings)
        planned = training.prepare_run(config, graph, store, folder, shared=shared, at_once=sharing)
    if pruner != "none":
        pruning = Pruning(sweep, config, read_history(folder) if begun else [])
    try:
        if begun:
            result = training.resume_training(folder, config, graph, quiet=True, on_epoch=pruning)
        else:
            result = training.run_training(planned, graph, quiet=True, on_epoch=pruning)
    except Interrupted:
        if pruning is None or not pruning.reason:
            raise
        raise RunError(pruning.reason) from None
    if config.run.log == "tensorboard":
        log_trial(folder, settings, Trial(number, settings, result).scores)
    return result


def main() -> int:
    """Train one trial after the other; a failure is a result, and the next trial follows."""
    output.settle()
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.runs.sweep_worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--sharing", type=int, required=True)
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")])
    a = parser.parse_args()
    if a.cores:
        os.sched_setaffinity(0, a.cores)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(orders, busy), daemon=True).start()
    graph, shared = open_store(a.store), Shared()
    while line := orders.get():
        answer: dict[str, Any] = {"error": ""}
        busy.set()
        started = time.perf_counter()
        try:
            answer["result"] = train_trial(
                a.folder, graph=graph, store=a.store, shared=shared, sharing=a.sharing, **json.loads(line)
            )
        except Interrupted as error:
            return error.exit_code
        except MggcnError as error:
            answer["error"] = str(error)
        except Exception as error:  # a trial may fail in any way: it is a row of the table, and the next one begins
            answer["error"] = f"{type(error).__name__}: {error}"
        busy.clear()
        answer["seconds"] = time.perf_counter() - started
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _listen(orders: queue.SimpleQueue[str], busy: threading.Event) -> None:
    """Pass the orders on. Their end in a trial means that the sweep was stopped, or its process is gone."""
    for line in sys.stdin:
        orders.put(line)
    orders.put("")
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
