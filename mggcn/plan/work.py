"""What a rank does in a program, as the cost model sees it, and the seconds of what it does alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from mggcn.errors import PlanError
from mggcn.plan.description import DeviceRates, RateTable
from mggcn.plan.steps import Await, Send

Kind = Literal["sparse", "dense", "elementwise", "messages", "sums", "overhead"]
KINDS: Final[Mapping[Kind, str]] = {
    "sparse": "sparse products",
    "dense": "dense products",
    "elementwise": "passes and row copies",
    "messages": "waiting for others",
    "sums": "sums of gradients",
    "overhead": "calls, optimiser",
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does alone: it takes as long as moving its bytes or computing, whichever is longer, plus its calls."""

    kind: Kind
    rows: int = 0
    """Rows gathered at random."""
    row_bytes: int = 0
    footprint: int = 0
    """Bytes of the matrix that they are gathered from."""
    streamed: int = 0
    """Bytes read and written in order."""
    span: int = 0
    """Bytes of the matrices that are streamed, where a pass is cut into blocks; 0: `streamed`."""
    flop: int = 0
    precision: str = "fp32"
    calls: int = 1
    reuse: tuple[tuple[int, float], ...] = ()
    """How local the gathers are: (bytes of the rows used since the same one was, at most; share of the gathers), rising;
    (): at random over the footprint."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A buffer of `nbytes` is summed over all ranks, and all wait for it."""

    nbytes: int


Item = Work | Send | Await | Sum


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends to sum a buffer over the ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


def work_seconds(work: Work, device: DeviceRates, sharing: int) -> tuple[float, float]:
    """Return the seconds of a rank's work, and of its calls, where `sharing` ranks have the device.

    Each rank gets its part of the rates; together, their operands take as many times the cache.
    Raises: PlanError if the machine's file has no rate of dense products in this precision.
    """
    moving = 0.0
    if work.rows:
        moving += work.rows * sharing * (work.row_bytes * _gathered_byte_s(work, device.gather, sharing) + device.row_s)
    if work.streamed:
        moving += work.streamed * sharing / device.copy.at((work.span or work.streamed) * sharing)
    computing = work.flop * sharing / _gemm(device, work.precision) if work.flop else 0.0
    return max(moving, computing), work.calls * device.call_s * max(1.0, sharing / device.cores)


def _gathered_byte_s(work: Work, gather: RateTable, sharing: int) -> float:
    """Return the seconds of a gathered byte, the average over the distances between two uses of a row.

    Rows at random from a matrix of R bytes have distances of 0 to R bytes equally often. So the bytes that come from
    between a and b take (b t(b) - a t(a)) / (b - a) each, if t(R) is what the table says; with equally frequent distances
    the sum is t(R) again.
    """

    def until(footprint: int) -> float:
        return footprint / gather.at(footprint * sharing) if footprint else 0.0

    seconds = each = 0.0
    below = 0
    for bound, share in work.reuse or ((work.footprint, 1.0),):
        above = min(bound, work.footprint)
        if above > below:
            each = (until(above) - until(below)) / (above - below)
            below = above
        seconds += share * each
    return seconds


def _gemm(device: DeviceRates, precision: str) -> float:
    if precision not in device.gemm:
        raise PlanError(
            f"the machine's file has rates of dense products in {', '.join(device.gemm)}, none in {precision}; "
            "choose another --precision, measure this machine again with mggcn tune, or add the rate to the file"
        )
    return device.gemm[precision]
