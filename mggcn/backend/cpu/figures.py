"""What the choices of CPU kernels know of a machine: figures measured on it, and what follows from them. Needs no torch.

Every choice is a pure function of them and of sizes: the same figures give the same variants and bits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

DenseShape = Literal["rows", "sums"]
"""Dense products of long operands: h W and g W^T, a result for each row; h^T g, sums over the rows."""
ITEMS: Final = {2: "bf16", 4: "fp32", 8: "fp64"}
"""Name of a type in the figures by bytes of a number."""
LINE: Final = 64
"""Bytes of a cache line, to which rows are padded."""
TYPICAL_ROW: Final = 256
"""Bytes of the rows by which footprints are called near or far."""


@dataclass(frozen=True, slots=True)
class DenseRate:
    """FLOP per second of a rank's threads in dense products of one type and shape by one instruction set."""

    dtype: str
    kernel: str
    shape: DenseShape
    flop_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Measured rates of the threads of one rank, all at work at once on operands that they share."""

    footprints: tuple[int, ...]
    """Bytes of the operands from which rows were gathered at random, rising."""
    widths: tuple[int, ...]
    """Bytes of these rows, rising."""
    plain_s: tuple[tuple[float, ...], ...]
    """Seconds of an entry of a float32 product of which no row is fetched ahead, by width, then footprint."""
    ahead_s: tuple[tuple[float, ...], ...]
    """As plain_s, with rows fetched ahead."""
    bf16: tuple[float, ...]
    """How many times as long as in float32 an entry takes in bfloat16, with a row of as many bytes, by footprint."""
    row_s: float
    """Begin and end of a row of the result, once for each WHOLE_LINES lines of it."""
    block_s: float
    """What a line of an entry takes longer in blocks of the operand's rows."""
    pack_s: tuple[float, float]
    """A line copied to a panel: of one line, of more."""
    copy: tuple[tuple[int, float], ...]
    """Bytes per second, read plus written, of a pass over matrices, by the bytes of both."""
    dense: tuple[DenseRate, ...]
    measured: bool = True

    def entry_s(self, row_bytes: float, footprint: float, item: int = 4, *, ahead: bool = False) -> float:
        """Return the seconds of an entry whose row is at a random place in `footprint` bytes.

        Linear in the bytes of the row, and in the logarithm of the footprint; constant beyond the measured footprints.
        """
        row_bytes = max(row_bytes, self.widths[0])
        k = min(max(bisect.bisect_left(self.widths, row_bytes), 1), len(self.widths) - 1)
        (w0, w1), table = self.widths[k - 1 : k + 1], self.ahead_s if ahead else self.plain_s
        s0, s1 = (self._at(table[j], footprint) for j in (k - 1, k))
        seconds = s0 + (row_bytes - w0) / (w1 - w0) * (s1 - s0)
        return seconds * self._at(self.bf16, footprint) if item == 2 else seconds

    def _at(self, values: Sequence[float], footprint: float) -> float:
        """Interpolate values by footprint."""
        k = bisect.bisect_left(self.footprints, footprint)
        if k in (0, len(self.footprints)):
            return values[min(k, len(values) - 1)]
        below, above = self.footprints[k - 1 : k + 1]
        share = math.log(footprint / below) / math.log(above / below)
        return values[k - 1] + share * (values[k] - values[k - 1])

    @property
    def near_bytes(self) -> int:
        """The largest footprint from which an entry takes no more than the geometric mean of the nearest and the farthest.

        Plans reserve room for packed panels up to here, and no larger one is taken.
        """
        seconds = [self.entry_s(TYPICAL_ROW, size) for size in self.footprints]
        limit = math.sqrt(seconds[0] * seconds[-1])
        for k in range(1, len(seconds)):
            if seconds[k] > limit:
                below, above = self.footprints[k - 1 : k + 1]
                share = (limit - seconds[k - 1]) / (seconds[k] - seconds[k - 1])
                return int(below * (above / below) ** share)
        return self.footprints[-1]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The instruction sets whose dense products were measured."""
        return tuple(dict.fromkeys(rate.kernel for rate in self.dense))

    @property
    def copy_rate(self) -> float:
        """Bytes per second, read plus written, of passes over matrices that no cache holds."""
        return self.copy[-1][1]

    def dense_rate(self, item: int, shape: DenseShape, kernels: Sequence[str]) -> DenseRate | None:
        """Return the fastest of `kernels` for numbers of `item` bytes; None if none of them was measured."""
        known = [r for r in self.dense if (r.dtype, r.shape) == (ITEMS[item], shape) and r.kernel in kernels]
        return max(known, key=lambda rate: rate.flop_s, default=None)

    def slowest_shape(self, item: int) -> float:
        """Return FLOP per second of the fastest kernel for the shape that is slowest; 0 if none was measured."""
        best = (self.dense_rate(item, shape, self.kernels) for shape in get_args(DenseShape))
        return min((rate.flop_s for rate in best if rate is not None), default=0.0)

    def shared(self, ranks: int) -> Figures:
        """Return the figures of one of several ranks that compute at the same time, from those of all their threads.

        Each has a part of every rate, and its operand lies in the caches beside those of the others.
        """
        if ranks == 1:
            return self

        def times(table: Sequence[float]) -> tuple[float, ...]:
            return tuple(ranks * seconds for seconds in table)

        return replace(
            self,
            footprints=tuple(size // ranks for size in self.footprints),
            plain_s=tuple(map(times, self.plain_s)),
            ahead_s=tuple(map(times, self.ahead_s)),
            row_s=ranks * self.row_s,
            block_s=ranks * self.block_s,
            pack_s=(ranks * self.pack_s[0], ranks * self.pack_s[1]),
            copy=tuple((size // ranks, rate / ranks) for size, rate in self.copy),
            dense=tuple(replace(rate, flop_s=rate.flop_s / ranks) for rate in self.dense),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MeasuredGather:
    """Predicted gathers of a CPU (a `Gather`), of rows of numbers of `item` bytes.

    Each product fetches ahead where that is faster.
    """

    figures: Figures
    item: int = 4

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        return tuple((size, TYPICAL_ROW / self.row_s(TYPICAL_ROW, size)) for size in self.figures.footprints)

    def row_s(self, row_bytes: float, footprint: float) -> float:
        return min(self.figures.entry_s(row_bytes, footprint, self.item, ahead=ahead) for ahead in (False, True))

    def slice_bytes(self, row_bytes: int, footprint: float) -> int:
        return 0


def figures_from_dict(content: Mapping[str, Any]) -> Figures:
    """Return what `to_dict` wrote. Raises: ValueError, KeyError or TypeError if it is damaged."""
    plain = dict(content)
    dense = tuple(DenseRate(**rate) for rate in plain.pop("dense"))
    figures = Figures(dense=dense, **{name: _tuples(value) for name, value in plain.items()})
    _check(figures)
    return figures


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _check(figures: Figures) -> None:
    """Refuse figures of which choices would be nonsense: of the wrong shape, falling, or not positive."""
    sizes, widths = figures.footprints, figures.widths
    tables = (*figures.plain_s, *figures.ahead_s, figures.bf16)
    numbers = [x for row in tables for x in row] + [
        figures.row_s,
        figures.block_s,
        *figures.pack_s,
        *(r for _, r in figures.copy),
    ]
    numbers += [rate.flop_s for rate in figures.dense]
    if min(len(sizes), len(widths)) < 2 or list(sizes) != sorted(set(sizes)) or list(widths) != sorted(set(widths)):
        raise ValueError(f"footprints and widths must rise and be two at least, got {sizes} and {widths}")
    if {len(row) for row in tables} != {len(sizes)} or {len(figures.plain_s), len(figures.ahead_s)} != {len(widths)}:
        raise ValueError("there must be a figure for every width and footprint")
    if not figures.copy or len(figures.pack_s) != 2 or not all(0 < x < math.inf for x in (*numbers, *sizes, *widths)):
        raise ValueError("figures must be positive and finite")
    if not all(rate.shape in get_args(DenseShape) for rate in figures.dense):
        raise ValueError(f"dense products must be of {', '.join(get_args(DenseShape))}")


_ROWS: Final = ((1.3e-9, 1.6e-9, 4e-9, 8e-9), (4.3e-9, 5.1e-9, 1.3e-8, 2.1e-8), (1.5e-8, 1.9e-8, 4.1e-8, 6.4e-8))
ASSUMED: Final = Figures(
    footprints=(2**18, 2**22, 2**25, 2**28),
    widths=(64, 256, 1024),
    plain_s=_ROWS,
    ahead_s=_ROWS,
    bf16=(1.2, 1.2, 1.0, 1.0),
    row_s=1e-8,
    block_s=3e-10,
    pack_s=(1.6e-8, 8e-9),
    copy=((2**28, 1.2e10),),
    dense=(),
    measured=False,
)
"""A small server, for where nothing can be measured: without compiled kernels, or beside programs that take the cores."""
