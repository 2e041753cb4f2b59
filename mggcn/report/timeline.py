"""timeline.json in the form that the report uses: intervals of time by rank and row, and their epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.errors import RunError
from mggcn.files import LARGEST_HISTORY, read_object, reason

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """One call of a kernel, or one message or a part of it."""

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
        events = content["traceEvents"]
        rows = {
            (e["pid"], e["tid"]): str(e["args"]["name"])
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        stretches = tuple(_stretch(e, rows[e["pid"], e["tid"]]) for e in events if e["ph"] == "X")
        epochs = dict(_epoch(e) for e in events if e["ph"] == "i")
        timeline = Timeline(stretches=stretches, epochs=epochs, notes=tuple(_notes(content.get("otherData", {}))))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{path} is not a timeline that mggcn wrote: {type(error).__name__} {error}") from error
    if not timeline.common_epochs:
        raise RunError(f"{path} holds no epoch that all its ranks recorded; train again with --timeline")
    return timeline


def _stretch(event: Mapping[str, Any], row: str) -> Stretch:
    args = event["args"]
    return Stretch(
        rank=int(event["pid"]),
        row=row,
        op=str(args["op"]),
        epoch=int(args["epoch"]),
        start_s=float(event["ts"]) / 1e6,
        end_s=(float(event["ts"]) + float(event["dur"])) / 1e6,
        step=str(args.get("step", "")),
        stage=None if args.get("stage") is None else int(args["stage"]),
        nbytes=int(args.get("bytes", 0)),
        flop=int(args.get("flop", 0)),
        measured=str(args.get("measured", "on stream")),
    )


def _epoch(event: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[float, float]]:
    start_s = float(event["ts"]) / 1e6
    return (int(event["pid"]), int(event["args"]["epoch"])), (start_s, start_s + float(event["args"]["seconds"]))


def _notes(other: Mapping[str, Any]) -> list[str]:
    notes = []
    if lost := sum(int(count) for count in other.get("lost", {}).values()):
        notes.append(f"{lost:,} calls are missing: an epoch has more than a timeline keeps.")
    if other.get("clock") == "aligned at a barrier":
        notes.append("The ranks ran on several machines; their clocks were aligned at one barrier.")
    return notes
