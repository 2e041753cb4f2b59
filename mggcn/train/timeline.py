"""`--timeline`: three epochs of a run under torch's profiler, all ranks in one file, timeline.json, which Perfetto opens.

A process of the file is a rank. What the host does has names (`record_function`): epochs, the ops of the program, whose
args are their kind and their bytes and FLOP as planned, the calls of messages and the waits for them
(comm/counting.py). The profiler adds torch's own ops, gloo's work on its threads and, on GPUs, every kernel and copy, with
the call that launched it. Without --timeline nothing is named or recorded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile, record_function

from mggcn.comm.base import Communicator
from mggcn.comm.gather import gather_texts
from mggcn.config import RunConfig
from mggcn.cost.work import Staged, Work
from mggcn.errors import BackendError, RunError
from mggcn.files import LARGEST_HISTORY, read_object, reason, write_text
from mggcn.memory.arena import ITEM_BYTES
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.planning.op_work import items_by_op
from mggcn.planning.run import RankPlan, RunPlan
from mggcn.train.heartbeat import boot_id

FILE: Final = "timeline.json"
WARM_UP: Final = 2
"""Epochs before the first that is recorded: they load modules and touch memory for the first time."""
RECORDED: Final = 3
_EPOCH: Final = re.compile(r"rank (\d+), epoch (\d+)")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


class Watch(Protocol):
    """Events of the epoch loop for an observer."""

    def epoch(self, number: int) -> AbstractContextManager[None]:
        """Mark a block that queues training step `number`, from 0: over the whole graph an epoch."""
        ...

    def doing(self, label: str) -> AbstractContextManager[Any]:
        """Mark a block that queues work that is not an op of the program, such as the optimiser's."""
        ...

    def close(self) -> None:
        """End the observation: no epoch follows. Collective."""
        ...


class Unwatched:
    """A Watch that does nothing."""

    def epoch(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def doing(self, label: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return


class Timeline:
    """The Watch that records, on every rank or on none. It records RECORDED epochs after WARM_UP, or the last ones of a
    shorter run; of several repeats, the first. steps: of an epoch; of several, it records steps instead.
    """

    def __init__(self, plan: RunPlan, comm: Communicator, folder: Path, steps: int = 1) -> None:
        self._plan, self._comm, self._folder = plan, comm, folder
        self._last = plan.config.train.epochs * steps
        self._window = range(0)
        self._boots: list[str] = []
        self._profiler: profile | None = None
        self._written = False

    def doing(self, label: str) -> AbstractContextManager[Any]:
        """Implement Watch.doing."""
        return record_function(label)

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Record the epoch if it is one of those; collective before the first of them and after the last."""
        if not self._window:
            self._window = recorded_epochs(number, self._last)
        if self._written or number not in self._window:
            yield
            return
        if not self._boots:
            self._begin()
        with record_function(f"rank {self._comm.rank}, epoch {number + 1}"):
            yield
        if number == self._window[-1]:
            self._write()

    def close(self) -> None:
        """Write the epochs recorded so far of a run that ended early."""
        if self._boots and not self._written:
            self._write()

    def _begin(self) -> None:
        """Start the profiler, once for all ranks that are threads. The ranks then go on at one time, as far as possible."""
        run = self._plan.config.run
        self._boots = gather_texts(self._comm, boot_id())
        if self._comm.rank == 0 or run.transport != "threads":
            self._profiler = make_profiler(run)
            self._profiler.__enter__()
        self._comm.barrier()

    def _write(self) -> None:
        self._written = True
        self._comm.barrier()
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(str(self._part(self._comm.rank)))
            self._profiler = None
        self._comm.barrier()
        if self._comm.rank == 0:
            self._join()

    def _part(self, rank: int) -> Path:
        return self._folder / f"timeline-{rank}.json"

    def _join(self) -> None:
        """Join what the profilers have written into one file on one axis of time, and remove it. Raises: RunError.

        On one machine the ranks share its clock. Ranks of several machines are aligned at their first recorded epoch, which
        begins after a barrier: as exact as that lets them go at one time.
        """
        run = self._plan.config.run
        paths = [self._part(rank) for rank in range(1 if run.transport == "threads" else self._comm.size)]
        parts = [_read(path) for path in paths]
        shared = len(set(self._boots)) == 1
        first = min(start for start, _ in parts)
        events: list[Event] = []
        for (start, found), rank in zip(parts, range(self._comm.size), strict=False):
            events += _joined(self._plan, found, rank, first if shared else start)
        other = {"clock": "of the machine" if shared else "aligned at a barrier", "in flight": run.transport == "gloo"}
        path = self._folder / FILE
        try:
            write_text(path, _render([*_names(events), *events], other))
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror}; free space and run again") from error
        for part_path in paths:
            part_path.unlink()


def make_profiler(run: RunConfig) -> profile:
    """Return torch's profiler for all threads of the process. Raises: BackendError.

    torch.profiler.profile would import torch's compiler first, which takes seconds.
    """
    # At its usual level Kineto reports every start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        options = _ExperimentalConfig(profile_all_threads=True)
    except TypeError as error:
        raise BackendError("run.timeline needs torch 2.7 or later; update torch") from error
    device = "cuda" if run.device == "cuda" and torch.cuda.is_available() else None
    return profile(use_kineto=True, use_device=device, experimental_config=options)


def recorded_epochs(first: int, epochs: int) -> range:
    """Return the epochs to record of a run from epoch `first` to `epochs`, counted from 0."""
    start = first + max(0, min(WARM_UP, epochs - first - RECORDED))
    return range(start, min(start + RECORDED, epochs))


def _read(path: Path) -> tuple[int, list[Event]]:
    """Return when the first epoch of a profiler's file began, in nanoseconds of the machine's clock, and its events."""
    try:
        content = read_object(path, LARGEST_HISTORY)
        # Times are microseconds since a base that is not the same for all versions; a float64 does not hold their sum.
        base = int(content["baseTimeNanoseconds"])
        found = [e for e in content["traceEvents"] if e["ph"] == "X" and e["cat"] != "Trace"]
        events = [e | {"ts": base + round(1000 * e["ts"])} for e in found]
        return min(e["ts"] for e in events if _EPOCH.fullmatch(e["name"])), events
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}, which a rank wrote for {FILE}, cannot be read: {reason(error)}") from error


def _joined(plan: RunPlan, events: list[Event], rank: int, origin: int) -> Iterator[Event]:
    """Yield a profiler's events as processes of their ranks, from `origin` on, and the ops with what is planned of them.

    rank: the only one, or the first of those that are threads.
    """
    # A rank's own thread is the one that names epochs; a kernel belongs to the thread that launched it.
    ranks = {e["tid"]: int(found[1]) for e in events if (found := _EPOCH.fullmatch(e["name"]))}
    launched = {e["args"]["correlation"]: e["tid"] for e in events if e["cat"] in _LAUNCHES}
    costs: Mapping[str, Event] = {}
    end = 0.0
    for event in sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        tid = launched.get(event["args"]["correlation"]) if event["cat"] in _DEVICE else event["tid"]
        event |= {"pid": ranks.get(tid, rank), "ts": (event["ts"] - origin) / 1000}
        if found := _EPOCH.fullmatch(event["name"]):
            costs = _costs(plan, plan.ranks[event["pid"]], int(found[2]) - 1)
            end = event["ts"] + event["dur"]
        if event["cat"] in ("cpu_op", "user_annotation"):
            # The profiler's own numbers of these events would be half of the file.
            event["args"] = costs.get(event["name"], {}) if tid in ranks and event["ts"] < end else {}
        # A block's shadow on a stream does not say which thread's it is.
        if event["ts"] >= 0 and (len(ranks) == 1 or event["cat"] != "gpu_user_annotation"):
            yield event


def _costs(plan: RunPlan, rank: RankPlan, epoch: int) -> dict[str, Event]:
    """Return kind, bytes and FLOP of every op of a training epoch, from 0, by its label. Padding of rows counts."""
    costs: dict[str, Event] = {}
    itemsize = ITEM_BYTES[rank.sizes.operand]
    along_edges = {op.label: op.kind.op.name for op in rank.train.ops if isinstance(op.kind, Aggregate)}
    for label, items in items_by_op(plan, rank, rank.train, epoch % rank.aggregation.period):
        plain = (one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,)))
        works = [work for work in plain if isinstance(work, Work)]
        kinds = {work.kind for work in works}
        name = "spmm" if "sparse" in kinds else "gemm" if "dense" in kinds else label.rstrip("0123456789").rstrip()
        if along_edges.get(label, "sum") != "sum":
            name = along_edges[label]
        gathered = sum(work.rows * work.row_bytes for work in works)
        products = sum(2 * work.rows * work.row_bytes // itemsize for work in works if work.kind == "sparse")
        costs[label] = {
            "op": name,
            "bytes": gathered + sum(work.streamed for work in works),
            "flop": products + sum(work.flop for work in works),
        }
    return costs


def _names(events: list[Event]) -> Iterator[Event]:
    """Yield what names the processes and their rows: a rank's own thread, and the streams of a GPU."""
    for rank in sorted({e["pid"] for e in events}):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    rows = {(e["pid"], e["tid"]): f"stream {e['tid']}" for e in events if e["cat"] in _DEVICE}
    rows |= {(e["pid"], e["tid"]): "host" for e in events if _EPOCH.fullmatch(e["name"])}
    for (rank, row), name in rows.items():
        yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}


def _render(events: list[Event], other: Mapping[str, Any]) -> str:
    """One event a line, so that grep and diff are of use."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{lines}\n]}}\n'
