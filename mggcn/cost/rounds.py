"""A round of a program: all ranks wait, each wakes and works once, and all wait again; for all ranks at once, in arrays.

A staged broadcast is made of rounds where its messages take longer than what the ranks compute meanwhile, as on many
devices. They give the same numbers, to the bit, as one event after the other: sums follow the order of the events.
P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Device:
    """What time it is, and the work that the device, which all ranks share, has given to each computing rank so far."""

    now: float
    given: float


@dataclass(frozen=True, slots=True)
class Round:
    """When every rank's work ended (P,), and the device after the round."""

    ended: Seconds
    device: Device


def run_round(
    work: Seconds, wakes: Seconds, device: Device, speeds: Seconds, message: tuple[float, float]
) -> Round | None:
    """Run a round, or return None if it is none: if a rank is done before another has begun, or goes on too early.

    work, wakes (P,): each rank's seconds of work, had it its part of the device, and when it wakes. speeds (P + 1,): by
    the number of computing ranks, the work that each gets done in a second. message: when the next message arrives, and
    for how long it keeps each rank from going on.
    Cost: two sorts of P numbers.
    """
    order = np.argsort(wakes, kind="stable")
    times, works = wakes[order], work[order] > 0
    given, targets, computing = _begin(times, work[order], device, speeds)
    # When the first of the computing ranks would end, if nobody woke before.
    left = np.maximum(0.0, np.minimum.accumulate(targets)[:-1] - given[:-1])
    if (times[1:] > times[:-1] + left / speeds[computing[1:]]).any():
        return None
    ranks, targets = order[works], targets[works]
    ending = np.lexsort((ranks, targets))
    ranks, targets = ranks[ending], targets[ending]
    before = np.concatenate((given[-1:], targets[:-1]))
    passed = np.maximum(0.0, targets - before) / speeds[np.arange(ranks.size, 0, -1)]
    ends = np.add.accumulate(np.concatenate((times[-1:], passed)))
    ended = wakes.copy()
    ended[ranks] = ends[1:]
    arrives, takes = message
    if np.maximum(arrives, ended + takes).min() <= ends[-1]:
        return None
    return Round(ended, Device(float(ends[-1]), float(targets[-1] if ranks.size else given[-1])))


def _begin(
    times: Seconds, work: Seconds, device: Device, speeds: Seconds
) -> tuple[Seconds, Seconds, npt.NDArray[np.int64]]:
    """Let ranks begin in order of time, nobody ending meanwhile.

    Return (P,) each: what the device has given then; what it will have given when the rank's work ends, infinite without
    work; and how many ranks compute before it begins.
    """
    works = work > 0
    computing: npt.NDArray[np.int64] = np.cumsum(works) - works
    passed = np.diff(times, prepend=device.now) * speeds[computing]
    gained = np.where(computing > 0, passed, 0.0)
    given = np.add.accumulate(np.concatenate(([device.given], gained)))[1:]
    return given, np.where(works, given + work, np.inf), computing
