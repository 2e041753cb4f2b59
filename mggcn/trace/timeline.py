"""`--timeline`: three epochs of a run recorded on every rank, kernels and messages, and written as timeline.json.

Wrappers do it (traced_backend.py, traced_comm.py, TracedOp); without --timeline none is made. The wrappers stand
between a rank and its backend and transport for the whole run, which is never captured, so the timeline shows every
launch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.events import Timestamp
from mggcn.comm.base import Communicator
from mggcn.model.program import Program
from mggcn.model.runtime import Runtime
from mggcn.model.values import Kind, Op, PlainKind
from mggcn.trace.recorder import MAX_MARKS, ROWS, Mark, Ranges, Recorder
from mggcn.trace.trace_json import Event, Part, boot_id, complete_event, epoch_event, merge_parts, write_part
from mggcn.trace.traced_backend import TracedBackend
from mggcn.trace.traced_comm import TracedCommunicator
from mggcn.trace.work import Work

WARM_UP = 2
"""Epochs before the first that is recorded: they load modules and touch memory for the first time."""
RECORDED = 3


class Watch(Protocol):
    """Events of the epoch loop for an observer."""

    def epoch(self, number: int) -> AbstractContextManager[None]:
        """The block queues training epoch `number`, from 0."""
        ...

    def doing(self, label: str) -> AbstractContextManager[None]:
        """The block queues work of its own that is no op of the program, such as the optimiser's."""
        ...

    def close(self) -> None:
        """No epoch follows. Collective."""
        ...


class Unwatched:
    """A Watch that does nothing."""

    def epoch(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def doing(self, label: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class TracedKind(PlainKind):
    """A kind of node whose kernels and messages are marked as its own."""

    kind: Kind
    recorder: Recorder

    @property
    def label(self) -> str:
        return self.kind.label

    @property
    def overwrites(self) -> tuple[int, ...]:
        return self.kind.overwrites

    def run(self, rt: Runtime, op: Op) -> None:
        with self.recorder.step(self.label):
            self.kind.run(rt, op)


class Timeline:
    """The Watch that records. Use `backend` and `comm` in place of those given, on every rank or on none.

    It records RECORDED epochs after WARM_UP, or the last ones of a shorter run; of several repeats, the first.
    `ranges` opens a profiler's range for every op of the whole run.
    """

    def __init__(
        self,
        backend: KernelBackend,
        comm: Communicator,
        folder: Path,
        epochs: int,
        *,
        in_flight: bool = False,
        ranges: Ranges | None = None,
    ) -> None:
        self._recorder = Recorder(backend, ranges)
        self.backend: TracedBackend = TracedBackend(backend, self._recorder)
        self.comm: TracedCommunicator = TracedCommunicator(comm, self._recorder, in_flight=in_flight)
        self._folder = folder
        self._epochs = epochs
        self._window = range(0)
        self._seen: list[tuple[int, Timestamp, Timestamp]] = []
        self._written = False
        self._origin = backend.timestamp()
        self._clock_s = 0.0

    def program(self, program: Program) -> Program:
        """Return the program with its ops marked."""
        return dataclasses.replace(
            program, ops=tuple(dataclasses.replace(op, kind=TracedKind(op.kind, self._recorder)) for op in program.ops)
        )

    def number_tiles(self, *tiles: Sequence[Sparse]) -> None:
        """Register the tiles of every owner: one list per direction, in order of the owners."""
        self._recorder.number_tiles(*tiles)

    @contextmanager
    def doing(self, label: str) -> Iterator[None]:
        """Mark the block as one call of the kind `label`."""
        with self._recorder.step(label), self._recorder.kernel(label, Work()):
            yield

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Record the epoch if it is one of those; collective before the first of them and after the last."""
        if not self._window:
            self._window = recorded_epochs(number, self._epochs)
        if self._written or number not in self._window:
            yield
            return
        if number == self._window[0]:
            self._begin()
        if self._fits():
            with self._recorder.recorded(number + 1):
                start = self.backend.timestamp()
                yield
                self._seen.append((number + 1, start, self.backend.timestamp()))
        else:
            yield
        if number == self._window[-1]:
            self._write()

    def close(self) -> None:
        """Write the marks recorded so far of a run that ended early."""
        if self._seen and not self._written:
            self._write()

    def _begin(self) -> None:
        """Take the origin of this rank's times: on an idle device, as close as possible to all other ranks'."""
        self.backend.synchronize()
        self.comm.barrier()
        self._origin = self.backend.timestamp()
        self._clock_s = time.perf_counter()

    def _fits(self) -> bool:
        """Whether another epoch like those so far can be kept whole."""
        done = len(self._seen)
        return not done or len(self._recorder.marks) * (done + 1) // done <= MAX_MARKS

    def _write(self) -> None:
        self.backend.synchronize()
        events = [self._event(mark) for mark in self._recorder.marks]
        events += [epoch_event(self.comm.rank, n, self._at(start), self._at(end)) for n, start, end in self._seen]
        write_part(self._folder, Part(self.comm.rank, boot_id(), self._clock_s, self._recorder.lost, events))
        self._recorder.marks.clear()
        self._written = True
        self.comm.barrier()
        if self.comm.rank == 0:
            merge_parts(self._folder, self.comm.size, ROWS)

    def _event(self, mark: Mark) -> Event:
        parts = {} if mark.message is None or mark.message.parts == 1 else {"parts": mark.message.parts}
        row = ROWS.index(mark.row)
        return complete_event(self.comm.rank, row, self._at(mark.start), self._at(mark.end), mark.args | parts)

    def _at(self, moment: Timestamp) -> float:
        return moment.seconds_since(self._origin)


def recorded_epochs(first: int, epochs: int) -> range:
    """Return which epochs to record of a run that goes on from epoch `first` to `epochs`, counted from 0."""
    start = first + max(0, min(WARM_UP, epochs - first - RECORDED))
    return range(start, min(start + RECORDED, epochs))
