"""Seconds of rows gathered from a dense operand: one model for the choice of kernels, for plans and for benchmarks.

A row is gathered for every nonzero of a sparse matrix. `footprint` is the bytes of the operand. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

SLICES: Final = (128, 256, 512)
"""Bytes per row of a slice of the operand's columns; slices are gathered one after the other. Whole cache lines."""
SLICE_GAIN: Final = 1.3
"""Slices must promise to be faster by this factor, because rows with common neighbours hit the cache even without them.
"""
SLICE_ROW: Final = 32
"""Least average nonzeros per row, so that the work that each slice repeats for every row stays small."""
AGAIN_BYTES: Final = 5
"""Cost of a nonzero in every further slice: its index, and its share of what a row of SLICE_ROW nonzeros costs."""

Reuse = Sequence[tuple[float, float]]
"""Locality of gathers: (most bytes of other rows since the last use of the same one; share of the gathers), rising."""


class Gather(Protocol):
    """Cost of rows gathered at random on a device."""

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Pairs of bytes of the operand, and bytes per second of rows read at random from it."""
        ...

    def row_s(self, row_bytes: float, footprint: float) -> float:
        """Return the average seconds of a random row of `row_bytes`."""
        ...

    def slice_bytes(self, row_bytes: int, footprint: float) -> int:
        """Return the bytes of the slices in which a product with long rows gathers; 0 if it gathers whole rows."""
        ...


@dataclass(frozen=True, slots=True)
class CacheRates:
    """The rates of a GPU: a row comes from the L2 cache with the probability that a random row lies there, else from
    memory.
    """

    cache_bytes: float
    """Share of the operand that the cache holds."""
    cached: float
    """Bytes per second from the cache."""
    missed: float
    """Bytes per second from memory, of rows of any length."""
    missed_row_s: float
    """Cost of a row from memory beside its bytes: narrow rows use it badly."""

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        return (self.cache_bytes, self.cached), (math.inf, self.missed)

    def row_s(self, row_bytes: float, footprint: float) -> float:
        hit = min(1.0, self.cache_bytes / max(footprint, 1.0))
        return hit * row_bytes / self.cached + (1.0 - hit) * (row_bytes / self.missed + self.missed_row_s)

    def slice_bytes(self, row_bytes: int, footprint: float) -> int:
        costs = {size: self.sliced_row_s(row_bytes, footprint, size) for size in SLICES if size < row_bytes}
        costs[0] = self.row_s(row_bytes, footprint) / SLICE_GAIN
        return min(costs, key=costs.__getitem__)

    def sliced_row_s(self, row_bytes: int, footprint: float, size: int) -> float:
        """Return the seconds of a row that is gathered in slices of `size` bytes."""
        count = -(-row_bytes // size)
        return count * self.row_s(size, footprint * size / row_bytes) + (count - 1) * AGAIN_BYTES / self.missed

    def scaled(self, factor: float) -> CacheRates:
        """Return the rates of kernels that are faster by a factor."""
        return CacheRates(self.cache_bytes, self.cached * factor, self.missed * factor, self.missed_row_s / factor)


def gathered_row_s(
    gather: Gather, row_bytes: int, footprint: int, reuse: Reuse = (), *, sharing: int = 1, long_rows: bool = False
) -> float:
    """Return the average seconds of a gathered row, over all distances between two uses of a row.

    reuse: (): at random over the footprint. sharing: number of operands that share the cache. long_rows: whether the
    rows of the sparse product have at least SLICE_ROW nonzeros on average, so that it may gather in slices.
    """
    size = gather.slice_bytes(row_bytes, footprint * sharing) if long_rows else 0
    if not size:
        return _by_distance(gather, row_bytes, footprint, reuse, sharing)
    share, count = size / row_bytes, -(-row_bytes // size)
    nearer = [(bound * share, part) for bound, part in reuse]
    each = _by_distance(gather, size, footprint * share, nearer, sharing)
    return count * each + (count - 1) * AGAIN_BYTES / gather.points[-1][1]


def _by_distance(gather: Gather, row_bytes: int, footprint: float, reuse: Reuse, sharing: int) -> float:
    return mean_row_s(lambda nbytes: gather.row_s(row_bytes, nbytes * sharing), footprint, reuse)


def mean_row_s(row_s: Callable[[float], float], footprint: float, reuse: Reuse = ()) -> float:
    """Return the average of the seconds of a row over the distances of its uses; row_s: at random from so many bytes.

    Rows at random from a matrix of R bytes have distances of 0 to R bytes equally often. So rows from between a and b take
    (b t(b) - a t(a)) / (b - a) each, if t(R) is what row_s says of R bytes; with equally frequent distances the sum is t(R)
    again.
    """

    def until(nbytes: float) -> float:
        return nbytes * row_s(nbytes) if nbytes else 0.0

    seconds = each = 0.0
    below = 0.0
    for bound, share in reuse or ((footprint, 1.0),):
        above = min(bound, footprint)
        if above > below:
            each = (until(above) - until(below)) / (above - below)
            below = above
        seconds += share * each
    return seconds
