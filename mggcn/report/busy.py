"""The time of an epoch: busy intervals, communication hidden under computation, sums by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.report.timeline import COMMUNICATION, COMPUTE, Stretch, Timeline

Intervals = npt.NDArray[np.float64]

ALONE, IDLE = "communication alone", "idle or waiting"


def union(stretches: Iterable[Stretch]) -> Intervals:
    """Return the busy intervals (n, 2) of stretches: disjoint, in order, none empty."""
    merged: list[list[float]] = []
    for start, end in sorted((s.start_s, s.end_s) for s in stretches if s.end_s > s.start_s):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def length(intervals: Intervals) -> float:
    """Return the total length of disjoint intervals."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def covered(intervals: Intervals, cover: Intervals) -> float:
    """Return how much of disjoint intervals lies in other disjoint ones."""
    if not len(intervals) or not len(cover):
        return 0.0
    # The length of `cover` up to a time is piecewise linear: it grows inside its intervals alone.
    grown = np.cumsum(cover[:, 1] - cover[:, 0])
    so_far = np.stack([np.concatenate([[0.0], grown[:-1]]), grown], axis=1)
    at = np.interp(intervals, cover.ravel(), so_far.ravel())
    return float((at[:, 1] - at[:, 0]).sum())


def overlap(timeline: Timeline) -> dict[int, float | None]:
    """Return for each rank which share of its communication is hidden under its own computation; None: it moved nothing.

    Communication is the busy time of the row "communication", computation that of the row "compute" of the same rank.
    """
    shares: dict[int, float | None] = {}
    for rank in timeline.ranks:
        moving = union(timeline.of(rank, COMMUNICATION))
        total = length(moving)
        shares[rank] = covered(moving, union(timeline.of(rank, COMPUTE))) / total if total else None
    return shares


def breakdown(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return for each rank the seconds of an average epoch by kind of op.

    Kinds are those of the row "compute", then communication outside of computation, then the rest of the epoch,
    in which the rank waited for others or for its host.
    """
    epochs = timeline.common_epochs
    shares = {}
    for rank in timeline.ranks:
        compute, moving = timeline.of(rank, COMPUTE), timeline.of(rank, COMMUNICATION)
        seconds: dict[str, float] = {}
        for s in compute:
            seconds[s.op] = seconds.get(s.op, 0.0) + s.seconds
        busy, moved = union(compute), union(moving)
        seconds[ALONE] = length(moved) - covered(moved, busy)
        total = sum(end - start for start, end in (timeline.epochs[rank, epoch] for epoch in epochs))
        seconds[IDLE] = max(0.0, total - sum(seconds.values()))
        shares[rank] = {op: value / len(epochs) for op, value in seconds.items()}
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sums over all calls of one kind on one rank in an average epoch."""

    op: str
    calls: float
    seconds: float
    nbytes: float
    flop: float
    timed: bool
    """Whether data moved during all these seconds, so that a rate has a meaning."""


def totals(timeline: Timeline, rank: int) -> list[Total]:
    """Return the sums by kind for one rank, kernels first, the longest first. Parts of one message count as one call."""
    epochs = len(timeline.common_epochs)
    rows: list[Total] = []
    for row in (COMPUTE, COMMUNICATION):
        groups: dict[str, list[Stretch]] = {}
        for stretch in timeline.of(rank, row):
            groups.setdefault(stretch.op, []).append(stretch)
        rows += sorted((_total(op, found, epochs) for op, found in groups.items()), key=lambda t: -t.seconds)
    return rows


def _total(op: str, found: list[Stretch], epochs: int) -> Total:
    return Total(
        op=op,
        # Only the first part of an op or a message has its bytes.
        calls=sum(s.nbytes > 0 for s in found) / epochs,
        seconds=sum(s.seconds for s in found) / epochs,
        nbytes=sum(s.nbytes for s in found) / epochs,
        flop=sum(s.flop for s in found) / epochs,
        timed=all(s.measured == "on stream" for s in found),
    )
