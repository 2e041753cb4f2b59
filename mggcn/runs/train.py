"""Training: planned and refused here, run on the ranks of this process, on processes, or under torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn import native
from mggcn.assemble.ladder import space_of, with_whole_scratch
from mggcn.assemble.plan import (
    check_available,
    dense_products,
    in_float32,
    memory_limit,
    plan_graph,
    room_of,
    this_machine,
    threads_per_rank,
)
from mggcn.backend.cpu.machine import processor_name
from mggcn.comm.failure import Interrupted
from mggcn.comm.launch import run_ranks
from mggcn.comm.rank import num_gpus_used
from mggcn.config import Config
from mggcn.errors import printable
from mggcn.graph.csr import Graph
from mggcn.graph.splits import check_split
from mggcn.graph.store import graph_sha256, open_store, store_folder
from mggcn.host import python
from mggcn.memory.device import launching, not_captured
from mggcn.memory.units import free_bytes
from mggcn.partition.base import Partition
from mggcn.planning.advice import require_fit, require_pinned
from mggcn.planning.block_evaluation import EVALUATED_FANOUT
from mggcn.planning.opening import opening_lines
from mggcn.planning.run import RunPlan
from mggcn.planning.shared import Shared
from mggcn.runs.auto import resolve_auto
from mggcn.runs.folder import (
    discarded_if_refused,
    known_plan,
    make_run_folder,
    measured_products,
    read_run,
    write_plan,
)
from mggcn.runs.local import in_processes, on_local_ranks, signalled_stop
from mggcn.runs.nccl_record import nccl_record
from mggcn.runs.product_table import RUN_FILE, STORE_FILE, outdated
from mggcn.runs.result import read_result
from mggcn.runs.weights import check_start, keep_start, start_of, weights_of
from mggcn.train.heartbeat import Heartbeat
from mggcn.train.log import HistoryFollower, RunLog, write_json
from mggcn.train.tensorboard import TensorBoard
from mggcn.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.assemble.rank import Rank
    from mggcn.comm.base import Communicator
    from mggcn.planning.select import Choice
    from mggcn.train.engine import Stop
    from mggcn.train.loop import OnEpoch


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with its folder: planned by this process, or read from it."""

    folder: Path
    plan: RunPlan
    partition: Partition
    reason: str = ""
    """Why `auto` chose its strategy and order; "" if they were set, or the plan was read."""

    @property
    def config(self) -> Config:
        """All settings, with every `auto` replaced by what was chosen."""
        return self.plan.config


def plan_that_fits(
    config: Config, graph: Graph, *, shared: Shared | None = None, at_once: int = 1, out: Path | None = None
) -> tuple[RunPlan, Partition, Choice | None]:
    """Replace every `auto`, plan the run, and refuse it if it does not fit; return what `auto` chose too, if it did.

    shared: by runs on this graph, one after the other. at_once: runs that share the free memory. out: the run folder, in
    which rows may be on disk.
    Raises: PlanError before anything is allocated; ConfigError, GraphError.
    """
    config = with_whole_scratch(config)
    space = space_of(config, out)
    space = dataclasses.replace(space, free=space.free // at_once)
    config, choice = resolve_auto(config, graph, space=space)
    limit = config.run.memory_limit or memory_limit(config) // at_once
    plan, partition = plan_graph(config, graph, shared=shared, limit=limit, space=space)
    require_fit(plan, limit, room_of(config) if at_once == 1 else None)
    run = config.run
    here = run.ranks if run.transport == "threads" else num_gpus_used(run.ranks, run.transport)
    require_pinned(plan, here, free_bytes() // at_once)
    return plan, partition, choice


def prepare_run(
    config: Config,
    graph: Graph,
    store: Path | None,
    out: Path | None,
    start: Mapping[str, Tensor] | None = None,
    *,
    planned: tuple[RunPlan, Partition, Choice | None] | None = None,
    made: list[Path] | None = None,
    **sharing: Any,
) -> PlannedRun:
    """Plan a run, refuse it if it does not fit, and write its folder.

    start: weights to begin with instead of random ones. planned: what `plan_that_fits` has returned, if it was called
    before; sharing: its shared and at_once. made: gets the folder as soon as it is there.
    Raises: PlanError before anything is allocated or written; ConfigError, GraphError, RunError.
    """
    check_available(config)
    plan, partition, choice = planned or plan_that_fits(config, graph, out=out, **sharing)
    check_split(graph, plan.config.data.splits, plan.config.data.split)
    if start is not None:
        check_start(plan, start)
    folder = make_run_folder(plan.config, graph.name, out, made)
    with discarded_if_refused(folder):
        write_plan(folder, plan, partition, store, graph, choice)
        if start is not None:
            keep_start(folder, start)
    return PlannedRun(folder, plan, partition, "" if choice is None else choice.reason)


def announce(plan: RunPlan, store: Path | None, reason: str, done: int = 0, limit: int = 0) -> None:
    """Print what will be trained, on which graph, and at what cost. limit: bytes that a rank may use, 0: as a new run's;
    done: epochs that a resumed run does not repeat.
    """
    config = plan.config
    machines = this_machine(config), this_machine(in_float32(config))
    if not limit:  # of what was free when it was planned this process has taken some since
        limit = memory_limit(config) if plan.ladder is None else plan.ladder.limit
    lines = opening_lines(plan, machines[0], limit, store=store, reason=reason, done=done, in_float32=machines[1])
    print(*map(printable, lines), sep="\n", flush=True)


def train_rank(
    comm: Communicator,
    run: PlannedRun,
    graph: Graph,
    *,
    quiet: bool,
    stop: Stop,
    started: float | None = None,
    on_epoch: OnEpoch | None = None,
) -> Rank:
    """Set up, train and record on one rank. Raises: Interrupted after a signal, once everything is saved.

    stop: the flag of `signalled_stop`, which belongs to the main thread; ranks that are threads share it.
    """
    from mggcn.train.class_scores import class_scores, link_scores

    started = time.perf_counter() if started is None else started
    config, plan, folder = run.config, run.plan, run.folder
    with Heartbeat(folder, comm.rank, config.train.epochs, config.train.repeat) as heartbeat:
        log = RunLog(folder if comm.rank == 0 else None, quiet, config.train.epochs, config.train.repeat)
        rank = _set_up(comm, run, graph, stop, log)
        comm.barrier()
        stop.saves = True
        setup_seconds = time.perf_counter() - started
        with logged(config, folder, on_epoch, comm.rank) as follow:
            try:
                complete = rank.trainer.fit(log, folder, follow, heartbeat)
            finally:
                rank.feed.halt()  # a process does not end before its threads
        rank.watch.close()
        peak = largest_peak(rank, comm)
        taken = nccl_record(plan, comm, rank.trainer.runtime.backend)
        if not complete:
            raise Interrupted(stop.signal or signal.SIGTERM)
        result = result_of(config, graph, plan, rank, setup_seconds, peak) | taken
        if graph.task == "links":
            result["links"] = link_scores(rank.trainer, weights_of(folder, config, rows=False))
        elif graph.task != "numbers":
            result["per_class"] = class_scores(rank.trainer, comm, weights_of(folder, config, rows=False))
        if graph.class_names:
            result["class_names"] = list(graph.class_names)
        if comm.rank == 0:
            write_json(folder / "result.json", result)
        return rank


def _set_up(comm: Communicator, run: PlannedRun, graph: Graph, stop: Stop, log: RunLog) -> Rank:
    """Return a rank that is ready to train: it has the weights of the start, and what is known of its products."""
    from mggcn.assemble.rank import make_rank

    config, folder, store = run.config, run.folder, store_folder(graph)
    choices = measured_products(folder, config)
    tables = [folder / RUN_FILE, *([] if store is None else [store / STORE_FILE])]
    if comm.rank == 0 and (text := next(filter(None, map(outdated, tables)), "")):
        log.say(text)
    rank = make_rank(config, graph, run.plan, run.partition, comm, stop, folder=folder, choices=choices)
    if (start := start_of(folder)) is not None:
        rank.trainer.warm_start(start)
    return rank


@contextlib.contextmanager
def logged(config: Config, folder: Path, on_epoch: OnEpoch | None, rank: int) -> Iterator[OnEpoch | None]:
    """Yield what rank 0 calls with the row of each epoch: the log that run.log asks for, then `on_epoch`."""
    if config.run.log == "none" or rank != 0:
        yield on_epoch if rank == 0 else None
        return
    with contextlib.closing(TensorBoard(config, folder, on_epoch)) as log:
        yield log


def largest_peak(rank: Rank, comm: Communicator) -> int:
    """Return the largest peak memory of any rank's process. Collective."""
    import torch

    backend = rank.trainer.runtime.backend
    peaks = backend.allocate(8 * comm.size).view(torch.float64)
    peaks[comm.rank] = backend.peak_bytes()
    comm.all_reduce(peaks).wait()
    return int(peaks.max())


def result_of(
    config: Config, graph: Graph, plan: RunPlan, rank: Rank, setup_seconds: float, measured_peak: int
) -> dict[str, Any]:
    """Return the content of result.json."""
    trainer = rank.trainer
    return {
        **trainer.summary(),
        **({"evaluated_fanout": EVALUATED_FANOUT} if config.train.evaluate == "sampled" else {}),
        "seconds_per_epoch": trainer.epoch_seconds.median(),
        "setup_seconds": setup_seconds,
        "planned_peak_bytes": plan.process_bytes,
        "measured_peak_bytes": measured_peak,
        "arena_bytes": rank.plan.arena_bytes,
        "bytes_sent_per_epoch": plan.steps * rank.plan.bytes_sent(rank.plan.train),
        "bytes_sent": rank.comm.bytes_sent,
        **_on_disk(rank),
        **captures(config, trainer.states),
        "versions": versions_of(config, trainer.runtime.backend.name),
        "graph_sha256": graph_sha256(graph),
    }


def _on_disk(rank: Rank) -> dict[str, Any]:
    """Return what rank 0 has on disk, for result.json; {} if its rows are in memory."""
    disk = rank.plan.disk
    return {} if disk is None else {"disk_file_bytes": disk.file_bytes, **rank.trainer.moved}


def versions_of(config: Config, device: str) -> dict[str, Any]:
    """Return the versions, kernels, threads and device of a run, for result.json."""
    import scipy
    import torch

    return {
        "mggcn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "machine": f"{platform.machine()} {processor_name()}",
        "kernels": native.sets_in_use(),
        "threads": threads_per_rank(config),
        "device": device,
    }


def captures(config: Config, states: Mapping[str, str]) -> dict[str, Any]:
    """Return how epochs and evaluations were launched on a GPU, and why not as CUDA graphs; {} for other devices."""
    if not launching(config):
        return {}
    eager = f"eager: {not_captured(config) or 'fewer than three were run'}"
    return {"captured": {what: eager if state == "eager" else state for what, state in states.items()}}


def run_training(run: PlannedRun, graph: Graph, *, quiet: bool, on_epoch: OnEpoch | None = None) -> dict[str, Any]:
    """Train the run that `prepare_run` wrote, on as many ranks as it says, and return its result.

    `graph` serves a single rank or ranks as threads; ranks as processes open the store that job.json names and read the
    plan. on_epoch: called in this process with each row of the history.
    Raises: the first error of any rank; Interrupted after SIGINT or SIGTERM, once a checkpoint is written.
    """
    if in_processes(run.config):
        return train_processes(run.folder, run.config, quiet=quiet, on_epoch=on_epoch)
    train_here(run, graph, quiet=quiet, on_epoch=on_epoch)
    return read_result(run.folder)


def resume_training(
    folder: Path, config: Config, graph: Graph, *, quiet: bool, on_epoch: OnEpoch | None = None
) -> dict[str, Any]:
    """Continue the run of a folder. Raises: as `run_training`; RunError if the graph or settings differ."""
    if in_processes(config):
        return train_processes(folder, config, quiet=quiet, on_epoch=on_epoch)
    started = time.perf_counter()
    run = PlannedRun(folder, *known_plan(folder, config, graph))
    train_here(run, graph, quiet=quiet, started=started, on_epoch=on_epoch)
    return read_result(folder)


def follower_of(folder: Path, on_epoch: OnEpoch) -> Callable[[], None]:
    """Return a function that calls `on_epoch` with the rows that rank 0 has written since the function's last call."""
    from mggcn.train.checkpoint import read_progress

    found = read_progress(folder / "checkpoints")
    return HistoryFollower(folder, found[0].history_lines if found else 0, on_epoch).poll


def train_processes(folder: Path, config: Config, *, quiet: bool, on_epoch: OnEpoch | None = None) -> dict[str, Any]:
    """Train the run of a folder on ranks that are processes; `on_epoch` is called here. Raises: as `run_training`."""
    poll = None if on_epoch is None else follower_of(folder, on_epoch)
    arguments = json.dumps({"quiet": quiet, "started": time.perf_counter()})
    command = [*python("mggcn.runs.worker"), "train", str(folder), "--arguments", arguments]
    run_ranks(command, config.run.ranks, folder, timeout_s=config.run.timeout_s, poll=poll)
    return read_result(folder)


def train_here(run: PlannedRun, graph: Graph, *, quiet: bool, **options: Any) -> list[Rank]:
    """Train on one rank of this process, or on several that are threads of it; return them. options: of `train_rank`."""
    with signalled_stop(saves=False) as stop:
        body = functools.partial(train_rank, run=run, graph=graph, quiet=quiet, stop=stop, **options)
        return on_local_ranks(run.config, body)


def train_worker(
    comm: Communicator,
    folder: Path,
    quiet: bool,
    started: float,
    planned: PlannedRun | None = None,
    graph: Graph | None = None,
) -> None:
    """Train as one rank process.

    started: time.perf_counter of the machine when the command began, which set-up counts from. planned: by this process,
    which need not read the plan and share out the graph again. graph: of this machine, None: of the store that job.json
    names.
    """
    config, _, job = read_run(folder)
    graph = graph or open_store(job["store"])
    with signalled_stop(saves=False) as stop, dense_products(config):
        run = planned or PlannedRun(folder, *known_plan(folder, config, graph))
        train_rank(comm, run, graph, quiet=quiet, stop=stop, started=started)
