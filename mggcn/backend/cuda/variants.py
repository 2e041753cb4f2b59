"""Choice of the SpMM kernel and its shape for a matrix and a dense operand: a pure function of sizes and device.

A piece is what a lane loads at once: 16 bytes, or one column if the operand is not aligned. A group of lanes reads a row
of the operand; the columns beyond its lanes * pieces belong to the next tile. A warp is 32 / lanes groups, each with a
row of the matrix of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

from mggcn.backend.cuda.sizes import DeviceTraits
from mggcn.backend.gather_rates import SLICE_ROW, SLICES, CacheRates
from mggcn.backend.spmm_choice import SpmmChoice

L2_SHARE = 0.5
"""Part of the L2 cache that holds rows of the operand: an A100's and an H100's two halves may each hold a copy."""
RATES = CacheRates(L2_SHARE * 50 * 2**20, 4.7e12, 2.6e12, 1.8e-11)
"""An H100's, of which only ratios count here. Not measured: bench/notes/0004-spmm-gpu.md."""
LINE_BYTES = 64
"""Rows of operands are padded to multiples of this many bytes."""
TILE_COST = 0.85
"""A second tile reads indices and pointers again: idle lanes cost less up to this share of busy ones."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel of cuda/spmm*.cu and its shape."""

    kernel: Literal["simple", "groups", "balanced"] = "balanced"
    lanes: int = 32
    pieces: int = 1
    """Loads of a lane per row of the operand."""
    unroll: int = 4
    """Rows of the operand that a group loads at once."""
    aligned: bool = True
    """Whether a piece is 16 bytes."""

    def tile(self, itemsize: int) -> int:
        """Return the columns that a group covers."""
        return self.lanes * self.pieces * piece_columns(itemsize, self.aligned)


def piece_columns(itemsize: int, aligned: bool) -> int:
    return 16 // itemsize if aligned else 1


@functools.cache
def choose_slices(rows: int, nnz: int, inner: int, width: int, itemsize: int, traits: DeviceTraits) -> SpmmChoice:
    """Return whole rows, or slices of the columns, for (rows, inner) with nnz nonzeros times (inner, width).

    Slices are panels of columns in the words of `SpmmChoice`; nothing is packed. Width and type are an aligned operand's.
    """
    size = 0
    if nnz >= SLICE_ROW * rows:
        row_bytes = _padded(width * itemsize)
        size = rates_of(traits).slice_bytes(row_bytes, inner * row_bytes)
    return sliced(size, itemsize)


def slicings(
    rows: int, nnz: int, inner: int, width: int, itemsize: int, traits: DeviceTraits
) -> tuple[SpmmChoice, ...]:
    """Return all variants: the model's choice, then the others, the fastest by its expectation first."""
    row_bytes, rates = _padded(width * itemsize), rates_of(traits)
    model = choose_slices(rows, nnz, inner, width, itemsize, traits)

    def expected(choice: SpmmChoice) -> float:
        return rates.sliced_row_s(row_bytes, inner * row_bytes, choice.panel * itemsize or row_bytes)

    others = [sliced(size, itemsize) for size in (0, *SLICES) if size < row_bytes]
    return (model, *sorted((choice for choice in others if choice.text != model.text), key=expected))


def sliced(size: int, itemsize: int) -> SpmmChoice:
    """Return the choice of slices of so many bytes; 0: of whole rows."""
    return SpmmChoice("panels", size // itemsize) if size else SpmmChoice()


def is_slicing(choice: SpmmChoice, itemsize: int) -> bool:
    """Return whether a recorded choice is a GPU slicing that this version supports."""
    return dataclasses.replace(choice, reason="") in [sliced(size, itemsize) for size in (0, *SLICES)]


def rates_of(traits: DeviceTraits) -> CacheRates:
    """Return the relative costs of gathers on a device."""
    return dataclasses.replace(RATES, cache_bytes=L2_SHARE * traits.l2_bytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


@functools.cache
def choose(width: int, itemsize: int, aligned: bool, panel: int = 0, *, weighted: bool = False) -> Variant:
    """Return the variant for an operand of `width` columns of `itemsize` bytes; panel: columns of a slice, 0: all."""
    columns = piece_columns(itemsize, aligned)
    pieces = -(-(panel if panel and aligned else width) // columns)
    lanes, per_lane = _group(pieces, columns * itemsize, 3 if itemsize == 4 or not aligned else 2)
    # 64 registers hold eight 16-byte loads beside eight sums, or half as many loads beside more sums or edge values.
    in_flight = 4 if weighted or (itemsize == 2 and per_lane > 1) else 8
    unroll = min(lanes, 1 << (in_flight // per_lane).bit_length() - 1)
    return Variant("balanced", lanes, per_lane, max(unroll, 2), aligned)


def _group(pieces: int, piece_bytes: int, most: int) -> tuple[int, int]:
    """Lanes and pieces per lane: few idle lanes, whole 128-byte lines, few tiles, then as many rows per warp as can be."""

    def score(shape: tuple[int, int]) -> float:
        lanes, per_lane = shape
        tiles = -(-pieces // (lanes * per_lane))
        busy = pieces / (tiles * lanes * per_lane)
        contiguous = {128: 1.0, 64: 0.95, 32: 0.8}.get(min(lanes * piece_bytes, 128), 0.6)
        return busy * contiguous * TILE_COST ** (tiles - 1)

    shapes = [(lanes, per_lane) for lanes in (4, 8, 16, 32) for per_lane in range(1, most + 1)]
    return max(shapes, key=score)
