"""Which SpMM kernel, and in which shape, multiplies a matrix by a dense operand: a pure function of sizes and device.

A piece is what a lane loads at once: 16 bytes, or one column if the operand is not aligned. A group of lanes reads a row
of the operand; what its lanes * pieces do not cover is the next tile. A warp is 32 / lanes groups, each with a row of the
matrix of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from mggcn.backend.cuda_shape import DeviceTraits

L2_SHARE = 0.5
"""Part of the L2 cache that a slice of the operand may fill: an A100's and an H100's two halves may each hold a copy."""
L2_COST = 0.5
"""Seconds of a byte from the L2 cache, relative to one from memory: about 5.5 and 3 TB/s on an H100. Not measured here."""
SLICE_GAIN = 1.3
"""Slices must promise to be faster by this factor: rows with neighbours in common hit the cache without them, too."""
SLICE_ROW = 32
"""Nonzeros that a row must have on average: what a slice does for each row anew is small beside them."""
TILE_COST = 0.85
"""A second tile reads indices and pointers again: idle lanes cost less up to this share of busy ones."""
ROW_BYTES = 32
"""What a row costs beside its nonzeros in each tile: pointers, order, a partly filled sector."""


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
def choose(
    rows: int,
    nnz: int,
    inner: int,
    width: int,
    itemsize: int,
    aligned: bool,
    traits: DeviceTraits,
    *,
    weighted: bool = False,
) -> Variant:
    """Return the variant for (rows, inner) with nnz nonzeros times (inner, width) of `itemsize` bytes per element."""
    columns = piece_columns(itemsize, aligned)
    pieces = -(-width // columns)
    slice_bytes = _slice_bytes(rows, nnz, inner, width * itemsize, traits)
    if aligned and slice_bytes:
        pieces = slice_bytes // 16
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


def _slice_bytes(rows: int, nnz: int, inner: int, row_bytes: int, traits: DeviceTraits) -> int:
    """Bytes of a column slice of which `inner` rows stay in the L2 cache; 0 if slices do not promise enough.

    Costs are bytes from memory. Without slices a row of the operand is read once per nonzero, from the cache as often as
    a random one lies there; with them always from the cache, once from memory, and indices and rows once per slice.
    """
    share = traits.l2_bytes * L2_SHARE
    size = inner * row_bytes
    fitting = [b for b in (512, 256, 128, 64) if b < row_bytes and inner * b <= share]
    if not fitting or size <= share or nnz < SLICE_ROW * rows:
        return 0
    slices = -(-row_bytes // fitting[0])
    gathered = nnz * row_bytes
    whole = gathered * max(L2_COST, 1 - share / size) + 4 * nnz + ROW_BYTES * rows
    sliced = gathered * L2_COST + size + slices * (4 * nnz + ROW_BYTES * rows)
    return fitting[0] if whole > SLICE_GAIN * sliced else 0
