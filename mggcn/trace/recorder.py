"""Marks of one rank: when which kernel and which message began and ended, in which step of the program.

Two rows: what the rank computes, and what it moves. A mark is two timestamps of the device, taken in the stream and read
only when the device is idle: recording never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.events import CommStream, Timestamp
from mggcn.trace.work import Work

COMPUTE, COMMUNICATION = ROWS = ("compute", "communication")
MAX_MARKS = 60_000
"""Marks of one rank: about 12 MB of JSON."""

Ranges = Callable[[str], AbstractContextManager[Any]]
"""Opens a named range for a profiler, such as torch.cuda.nvtx.range."""


@dataclass(kw_only=True, slots=True)
class Message:
    """One collective operation as this rank sees it; `received`: bytes that reach it, as CountingCommunicator counts them.

    called: when the call was made, if it is measured from there to the end of the wait; parts: marks that it has.
    """

    op: str
    nbytes: int
    received: int
    root: int | None = None
    where: dict[str, Any] = field(default_factory=dict)
    called: Timestamp | None = None
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """One interval of one row; `args` as they are written into the trace."""

    row: str
    start: Timestamp
    end: Timestamp
    args: dict[str, Any]
    message: Message | None = None


class Recorder:
    """Collects the marks of one rank while `recording` is set."""

    def __init__(self, backend: KernelBackend, ranges: Ranges | None = None) -> None:
        self.recording: bool = False
        self.marks: list[Mark] = []
        self.lost: int = 0
        """Marks left out because there were MAX_MARKS."""
        self._backend = backend
        self._ranges: Ranges = ranges or (lambda _: nullcontext())
        self._where: dict[str, Any] = {}
        self._epoch = 0
        self._message: Message | None = None
        self._arrival: Timestamp | None = None
        self._owners: dict[int, int] = {}
        self._tiles: list[Sparse] = []

    def number_tiles(self, *tiles: Sequence[Sparse]) -> None:
        """Number the tiles of each list by the rank that owns their columns, which is the stage that multiplies them."""
        for of_owner in tiles:
            self._tiles.extend(of_owner)
            self._owners.update((id(tile), owner) for owner, tile in enumerate(of_owner))

    def stage_of(self, matrix: Sparse) -> int | None:
        """Return the stage of a product with this matrix, None if it is no tile."""
        return self._owners.get(id(matrix))

    @contextmanager
    def recorded(self, epoch: int) -> Iterator[None]:
        """Record the block as the epoch with this number, from 1."""
        self.recording, self._epoch = True, epoch
        try:
            yield
        finally:
            self.recording = False

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Attribute the events of the block to the step `label`; a number at its end is the layer."""
        number = label.rpartition(" ")[2]
        self._where = {"step": label} | ({"layer": int(number)} if number.isdecimal() else {})
        try:
            with self._ranges(label):
                yield
        finally:
            self._where = {}

    @contextmanager
    def kernel(self, op: str, work: Work, stage: int | None = None) -> Iterator[None]:
        """Mark the block as one call of the kind `op` in the row of computations."""
        if not self.recording:
            yield
            return
        start = self._backend.timestamp()
        yield
        args = {"op": op, **self._place(stage), "bytes": work.nbytes, "flop": work.flop}
        self._add(Mark(COMPUTE, start, self._backend.timestamp(), args))

    def post(self, message: Message, *, in_flight: bool) -> None:
        """Note the step of the program that sends a message, and the time of the call if messages are measured from
        there.
        """
        message.where = self._place(message.root)
        message.called = self._backend.timestamp() if in_flight else None

    @contextmanager
    def moving(self, message: Message) -> Iterator[None]:
        """Attribute what a transport moves in the block to this message."""
        before, self._message = self._message, message
        try:
            yield
        finally:
            self._message = before

    @contextmanager
    def moved(self, comm_stream: CommStream) -> Iterator[None]:
        """Mark the block as an interval in which the transport moved the current message, or a part of it."""
        message = self._message
        if not self.recording or message is None:
            yield
            return
        start = comm_stream.timestamp()
        yield
        self._add_part(message, start, comm_stream.timestamp(), "on stream")

    def arrived(self, message: Message) -> None:
        """Mark a message of the host that is measured from its call, or the arrival before, until now."""
        start, before, now = message.called, self._arrival, self._backend.timestamp()
        if not self.recording or start is None:
            return
        if before is not None and before.seconds_since(start) > 0:
            start = before
        self._add_part(message, start, now, "in flight")
        message.called, self._arrival = None, now

    def _add_part(self, message: Message, start: Timestamp, end: Timestamp, measured: str) -> None:
        # The bytes stand in the first part alone: a sum over events is a sum over messages.
        first, message.parts = message.parts == 0, message.parts + 1
        args = {"op": message.op, **message.where, "measured": measured}
        args |= {"bytes": message.nbytes * first, "received": message.received * first}
        self._add(Mark(COMMUNICATION, start, end, args, message))

    def _place(self, stage: int | None) -> dict[str, Any]:
        return {"epoch": self._epoch, **self._where} | ({} if stage is None else {"stage": stage})

    def _add(self, mark: Mark) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(mark)
        else:
            self.lost += 1
