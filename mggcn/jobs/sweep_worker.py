"""A process of a sweep: `python -m mggcn.jobs.sweep_worker FOLDER STORE --sharing J [--cores 0,1]` trains what it is told.

Each line of its input is a trial's number and settings as JSON, each line of its output the trial's result. When its input
ends in a trial, it saves, as at SIGTERM.
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
from mggcn.config_files import from_toml
from mggcn.errors import MggcnError
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.jobs import train as training
from mggcn.jobs.folder import read_run
from mggcn.jobs.sweep import Trial
from mggcn.jobs.sweep_folder import trial_folder
from mggcn.jobs.sweep_space import Settings, with_trial
from mggcn.planning.shared import Shared
from mggcn.train.tensorboard import log_trial


def train_trial(
    sweep: Path, settings: Settings, number: int, graph: Graph, store: Path, shared: Shared, sharing: int
) -> dict[str, Any]:
    """Train a trial in its folder of the sweep, or go on with it, and return its result.

    sharing: trials that share the free memory.
    Raises: as prepare_run and run_training.
    """
    folder = trial_folder(sweep, number)
    result = _train(sweep, settings, folder, graph, store, shared, sharing)
    if read_run(folder)[0].run.log == "tensorboard":
        log_trial(folder, settings, Trial(number, settings, result).scores)
    return result


def _train(
    sweep: Path, settings: Settings, folder: Path, graph: Graph, store: Path, shared: Shared, sharing: int
) -> dict[str, Any]:
    """Train in a folder, or go on there."""
    if (folder / "checkpoints" / "latest").exists():
        return training.resume_training(folder, read_run(folder)[0], graph, quiet=True)
    shutil.rmtree(folder, ignore_errors=True)
    config = with_trial(from_toml(sweep / "config.toml", saved=True), settings)
    planned = training.prepare_run(config, graph, store, folder, shared=shared, at_once=sharing)
    return training.run_training(planned, graph, quiet=True)


def main() -> int:
    """Train one trial after the other; a failure is a result, and the next trial follows."""
    output.settle()
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.jobs.sweep_worker")
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
        order = json.loads(line)
        answer: dict[str, Any] = {"number": order["number"]}
        busy.set()
        started = time.perf_counter()
        try:
            answer["result"] = train_trial(
                a.folder, order["settings"], order["number"], graph, a.store, shared, a.sharing
            )
        except Interrupted as error:
            return error.exit_code
        except MggcnError as error:
            answer["error"] = str(error)
        except Exception as error:
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
