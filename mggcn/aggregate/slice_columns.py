"""Which columns each rank multiplies, and which of them are sent together: pure functions of width, type and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

UNIT_BYTES = 16
"""Columns are distributed in units of this many bytes, so that every row of every slice is aligned for vector loads."""
LEAST_BYTES = 128
"""Least bytes of a row of a half, on every rank: a whole cache line. Narrower rows would lose more to slower gathers than
overlap gains: an estimate (bench/notes/0008-strategies.md)."""


class Part(NamedTuple):
    """A rank's part of a piece: columns and units of the piece on all ranks, units and columns of the rank."""

    cols: int
    every: int
    units: int
    width: int


@dataclass(frozen=True, slots=True)
class ColumnPartition:
    """The columns of a piece that each rank has, in order of the ranks: `columns`, and `units` of `unit` elements each.

    The last unit may end after the last column. A larger width gives no rank fewer units.
    """

    unit: int
    units: tuple[int, ...]
    columns: tuple[slice, ...]
    """Empty for a rank without units."""

    @staticmethod
    def of(cols: int, ranks: int, item_bytes: int) -> ColumnPartition:
        """Distribute `cols` columns of `item_bytes` bytes in one piece."""
        unit = UNIT_BYTES // item_bytes
        number = -(-cols // unit)
        units = tuple((number - rank + ranks - 1) // ranks for rank in range(ranks))
        ends = [min(end * unit, cols) for end in accumulate(units, initial=0)]
        return ColumnPartition(unit, units, tuple(slice(first, end) for first, end in pairwise(ends)))

    def halves(self) -> tuple[ColumnPartition, ...]:
        """Return two pieces, the first columns of each rank and the rest, or this piece alone if a half would be too
        narrow.

        Every rank has equally many units of the first half.
        """
        first = _half(min(self.units))
        if not first:
            return (self,)
        middles = [columns.start + first * self.unit for columns in self.columns]
        pairs = list(zip(self.columns, middles, strict=True))
        return (
            ColumnPartition(
                self.unit, (first,) * len(self.units), tuple(slice(c.start, middle) for c, middle in pairs)
            ),
            ColumnPartition(
                self.unit, tuple(n - first for n in self.units), tuple(slice(middle, c.stop) for c, middle in pairs)
            ),
        )


def parts(cols: int, ranks: int, item_bytes: int, rank: int, *, halved: bool) -> tuple[Part, ...]:
    """Return one rank's part of each piece, or of the only one. Cost: O(1), since a plan does this for each of P ranks."""
    unit = UNIT_BYTES // item_bytes
    number = -(-cols // unit)
    each, more = divmod(number, ranks)
    start, units = rank * each + min(rank, more), each + (rank < more)
    width = min((start + units) * unit, cols) - min(start * unit, cols)
    half = _half(each) if halved else 0
    if not half:
        return (Part(cols, number, units, width),)
    first = Part(half * ranks * unit, half * ranks, half, half * unit)
    return first, Part(cols - first.cols, number - first.every, units - half, width - first.width)


def _half(units: int) -> int:
    """Return how many of `units` the first half takes; 0 if it would be narrower than LEAST_BYTES."""
    return units // 2 if units // 2 * UNIT_BYTES >= LEAST_BYTES else 0
