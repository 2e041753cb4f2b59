"""timeline.json in the form that the report uses: intervals of time by rank and row, and their epochs.

On a CPU a rank computes in an op whenever it is not in the call of a message or in a wait for one. On a GPU its kernels
and copies count instead; the host's block that launched one says whose it is.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mggcn.errors import RunError
from mggcn.files import LARGEST_HISTORY, read_object, reason

COMPUTE, COMMUNICATION = "compute", "communication"
_EPOCH = re.compile(r"rank \d+, epoch (\d+)")
_MESSAGE = re.compile(r"(wait: )?message (\d+): (\w+)(?: from (\d+))?, (\d+) bytes")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOVES = ("aten::copy_", "aten::add_")
"""What ranks that are threads of one CPU do when they move a message."""
_APART = "The ranks ran on several machines; their clocks were aligned at one barrier."


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """An interval on a row of the timeline: one call of an op, or one message or part of it."""

    rank: int
    row: str
    op: str
    epoch: int
    start_s: float
    end_s: float
    step: str = ""
    stage: int | None = None
    nbytes: int = 0
    flop: int = 0
    measured: str = "on stream"

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The recorded timeline of a run."""

    stretches: tuple[Stretch, ...]
    epochs: Mapping[tuple[int, int], tuple[float, float]]
    """(rank, epoch) -> start and end, in seconds of the trace."""
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.epochs}))

    @property
    def common_epochs(self) -> tuple[int, ...]:
        """Epochs that every rank recorded."""
        seen = [{epoch for rank, epoch in self.epochs if rank == wanted} for wanted in self.ranks]
        return tuple(sorted(set.intersection(*seen))) if seen else ()

    def of(self, rank: int, row: str) -> list[Stretch]:
        """Return the intervals of one row in the epochs that all ranks recorded."""
        common = set(self.common_epochs)
        return [s for s in self.stretches if s.rank == rank and s.row == row and s.epoch in common]


def read_timeline(path: Path) -> Timeline:
    """Read a timeline.json. Raises: RunError naming what is missing or damaged."""
    try:
        content = read_object(path, LARGEST_HISTORY)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    try:
        other = content["otherData"]
        events: dict[int, list[_Block]] = {}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                events.setdefault(int(event["pid"]), []).append(_block(event))
        ranks = [_Rank(rank, blocks, in_flight=bool(other["in flight"])) for rank, blocks in sorted(events.items())]
        timeline = Timeline(
            stretches=tuple(stretch for rank in ranks for stretch in rank.stretches()),
            epochs={key: span for rank in ranks for key, span in rank.epochs().items()},
            notes=(_APART,) * (other["clock"] == "aligned at a barrier"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{path} is not a timeline that mggcn wrote: {type(error).__name__} {error}") from error
    if not timeline.common_epochs:
        raise RunError(f"{path} holds no epoch that all its ranks recorded; train again with --timeline")
    return timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """An event of the profiler."""

    start_s: float
    end_s: float
    name: str
    kind: str
    row: int
    args: Mapping[str, Any]

    @property
    def epoch(self) -> int:
        """The epoch that it is, 0: none."""
        found = _EPOCH.fullmatch(self.name)
        return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """The call of a message, or the wait for it. root: the sender of a broadcast, None of others."""

    start_s: float
    end_s: float
    waits: bool
    number: int
    op: str
    root: int | None
    nbytes: int


AnyBlock = TypeVar("AnyBlock", _Block, _Message)


def _block(event: Mapping[str, Any]) -> _Block:
    start = float(event["ts"])
    return _Block(
        start_s=start / 1e6,
        end_s=(start + float(event["dur"])) / 1e6,
        name=str(event["name"]),
        kind=str(event["cat"]),
        row=int(event["tid"]),
        args=event.get("args", {}),  # an overhead of the profiler has none
    )


def _message(block: _Block) -> Iterator[_Message]:
    if found := _MESSAGE.fullmatch(block.name):
        waits, number, op, root, nbytes = found.groups()
        yield _Message(
            start_s=block.start_s,
            end_s=block.end_s,
            waits=bool(waits),
            number=int(number),
            op=op,
            root=None if root is None else int(root),
            nbytes=int(nbytes),
        )


def _at(blocks: Sequence[AnyBlock], moment_s: float) -> AnyBlock | None:
    """Return the block, of those that follow each other, that a moment lies in."""
    number = bisect_right(blocks, moment_s, key=lambda block: block.start_s) - 1
    return blocks[number] if number >= 0 and moment_s < blocks[number].end_s else None


class _Rank:
    """One rank's recording: the blocks of its own thread, which say what it does, and the work of its GPU."""

    def __init__(self, number: int, events: Iterable[_Block], *, in_flight: bool) -> None:
        blocks = sorted(events, key=lambda block: block.start_s)
        self._number, self._in_flight = number, in_flight
        self._epochs = [block for block in blocks if block.epoch]
        rows = {block.row for block in self._epochs}
        own = [block for block in blocks if block.row in rows and block.kind not in _DEVICE]
        self._ops = [block for block in own if "op" in block.args]
        self._messages = [message for block in own for message in _message(block)]
        self._moves = [(block, block) for block in own if block.name in _MOVES]
        launches = {block.args["correlation"]: block for block in own if "correlation" in block.args}
        device = [block for block in blocks if block.kind in _DEVICE]
        self._device = [(launches[b.args["correlation"]], b) for b in device if b.args["correlation"] in launches]

    def epochs(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return start and end of every epoch: of its block, or of the GPU's work that was launched in it."""
        spans = {}
        for epoch in self._epochs:
            work = [done for launch, done in self._device if _at([epoch], launch.start_s)] or [epoch]
            spans[self._number, epoch.epoch] = min(b.start_s for b in work), max(b.end_s for b in work)
        return spans

    def stretches(self) -> Iterator[Stretch]:
        """Yield what the rank computes and moves in its epochs."""
        seen: set[float] = set()
        for start_s, end_s, moment_s in self._kernels() if self._device else self._segments():
            op = _at(self._ops, moment_s)
            if op is not None and (epoch := _at(self._epochs, moment_s)):
                # The first part alone has the bytes of all: a sum over parts is a sum over ops.
                planned = {} if op.start_s in seen else op.args
                seen.add(op.start_s)
                yield Stretch(
                    rank=self._number,
                    row=COMPUTE,
                    op=str(op.args["op"]),
                    epoch=epoch.epoch,
                    start_s=start_s,
                    end_s=end_s,
                    step=op.name,
                    stage=self._stage(op, moment_s),
                    nbytes=int(planned.get("bytes", 0)),
                    flop=int(planned.get("flop", 0)),
                )
        numbers: set[int] = set()
        for start_s, end_s, message in self._flights() if self._in_flight else self._moved():
            if epoch := _at(self._epochs, message.start_s):
                step = _at(self._ops, message.start_s)
                yield Stretch(
                    rank=self._number,
                    row=COMMUNICATION,
                    op=message.op,
                    epoch=epoch.epoch,
                    start_s=start_s,
                    end_s=end_s,
                    step=step.name if step else "",
                    stage=message.root,
                    nbytes=0 if message.number in numbers else message.nbytes,
                    measured="in flight" if self._in_flight else "on stream",
                )
                numbers.add(message.number)

    def _segments(self) -> Iterator[tuple[float, float, float]]:
        """Yield the parts of the ops outside of calls of messages and waits for them."""
        for op in self._ops:
            start_s = op.start_s
            for message in self._between(op.start_s, op.end_s):
                if message.start_s > start_s:
                    yield start_s, message.start_s, start_s
                start_s = message.end_s
            if op.end_s > start_s:
                yield start_s, op.end_s, start_s

    def _kernels(self) -> Iterator[tuple[float, float, float]]:
        """Yield the work of the GPU that moves no message, with the moment of its launch."""
        for launch, done in self._device:
            if _at(self._messages, launch.start_s) is None:
                yield done.start_s, done.end_s, launch.start_s

    def _moved(self) -> Iterator[tuple[float, float, _Message]]:
        """Yield what the transport did in calls and waits: copies and sums of the host, or work of the GPU."""
        for launch, done in self._device or self._moves:
            if message := _at(self._messages, launch.start_s):
                yield done.start_s, done.end_s, message

    def _flights(self) -> Iterator[tuple[float, float, _Message]]:
        """Yield the time from each call, or the arrival before, to the end of the wait."""
        calls = {message.number: message for message in self._messages if not message.waits}
        before_s = 0.0
        for wait in sorted((m for m in self._messages if m.waits and m.number in calls), key=lambda m: m.end_s):
            yield max(calls[wait.number].start_s, before_s), wait.end_s, calls[wait.number]
            before_s = wait.end_s

    def _stage(self, op: _Block, moment_s: float) -> int | None:
        """Return the sender of the broadcast that arrived last in an op; before the first one the rank's own number."""
        arrived = [m.root for m in self._between(op.start_s, moment_s) if m.waits and m.root is not None]
        staged = arrived or any(m.root is not None for m in self._between(op.start_s, op.end_s))
        return arrived[-1] if arrived else self._number if staged else None

    def _between(self, start_s: float, end_s: float) -> Sequence[_Message]:
        """Return the calls and waits that begin in an interval."""
        first, last = (bisect_left(self._messages, moment_s, key=lambda m: m.start_s) for moment_s in (start_s, end_s))
        return self._messages[first:last]
