"""Sizes of the memory that the CPU's kernels use besides matrices and results: a plan adds them up. Needs no torch.

V rows and N columns of a sparse matrix, D columns of its operand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mggcn.backend.cpu.figures import LINE, Figures
from mggcn.backend.cpu.variants import PANELS, GemmVariant, MatrixTraits, hub_length
from mggcn.backend.spmm_choice import SpmmChoice

CHUNKS = 512
"""Row chunks of a sparse matrix: enough for 64 threads to balance, few enough to cost nothing."""
GEMM_ROWS = 512
"""Rows that are converted or copied for torch at a time: they stay in the cache until they are multiplied."""
COLUMNS = 64
"""The sums of a part of a hub row are padded to a multiple of these columns."""
GEMM_BLOCK = 64
"""Rows that a thread multiplies and finishes at a time: kRowBlock of cpu/gemm.cpp."""
SUM_INNER, TILE_ROWS, NARROWEST = 128, (4, 8), 16
"""Rows that a thread packs at a time for a sum, rows of a tile by instruction set, bytes of a row of the narrowest panel
(cpu/gemm.cpp)."""
AMX_SIDE, AMX_DEEP = 32, 512
"""Rows and columns of the sums that AMX tiles hold, and rows that a thread packs at a time (cpu/gemm_amx.cpp)."""
SEGMENT_ROWS, MAX_SEGMENTS, SEGMENTS_BYTES = 1024, 64, 2**22
"""Rows that one thread sums at least; most parts of such a sum; bytes that their results may take together."""

LOSS_BYTES = 8 * 64
"""The losses of all chunks (cpu/common.h)."""


def max_parts(nnz: int) -> int:
    """Return the most parts that hub rows can have: n entries, more than two parts' h, give ceil(n / h) < 1.5 n / h."""
    return 3 * nnz // hub_length(nnz)


def schedule_bytes(rows: int, nnz: int) -> int:
    """Return the most bytes of a matrix's schedule: ends of the chunks, parts of hub rows, hub rows."""
    hubs = nnz // (hub_length(nnz) + 1)
    return 8 * (max(1, min(rows, CHUNKS)) + 1) + 16 * max_parts(nnz) + 24 * hubs


def spmm_bytes(rows: int, columns: int, nnz: int, width: int, item: int, real: int, figures: Figures) -> int:
    """Return the most work space, in bytes, of a product, whichever variant is chosen.

    item, real: bytes of a stored number and of a sum. These are the sums of parts of hub rows, and either a packed panel,
    of as many bytes as are gathered from fast, or for each row where its next block begins.
    """
    widest = max((size for size in PANELS if size < width * item), default=0)
    packed = min(columns * widest, figures.near_bytes)
    return aligned(max_parts(nnz) * padded_columns(width) * real) + max(aligned(packed), aligned(8 * rows))


def variant_bytes(matrix: MatrixTraits, width: int, item: int, choice: SpmmChoice) -> int:
    """Return the most work space, in bytes, of one variant of a product of numbers of `item` bytes."""
    sums = aligned(max_parts(matrix.nnz) * padded_columns(width) * real_bytes(item))
    return sums + aligned(matrix.columns * choice.panel * item) + (aligned(8 * matrix.rows) if choice.blocks > 1 else 0)


def real_bytes(item: int) -> int:
    """Return the bytes of a sum of stored numbers of `item` bytes."""
    return max(item, 4)


def padded_columns(width: int) -> int:
    """Return the columns of the sums of a part of a hub row."""
    return -(-width // COLUMNS) * COLUMNS


def segments(rows: int, inner: int, cols: int, real: int) -> int:
    """Return the number of partial sums of a reduction over `inner` rows; each has its own (rows, cols) accumulator.

    A function of the shape alone, since the number of parts changes the order of the sum.
    """
    result = max(1, rows * _lined(cols, real) * real)
    return max(1, min(-(-inner // SEGMENT_ROWS), MAX_SEGMENTS, SEGMENTS_BYTES // result))


@dataclass(frozen=True, slots=True)
class GemmSizes:
    """The work space of cpu/gemm.cpp: bytes that all threads share, and bytes of each thread, in whole cache lines."""

    packed: int
    own: int
    segments: int = 1

    def total(self, threads: int) -> int:
        """Bytes of all threads together."""
        return self.packed + threads * self.own


def gemm_sizes(
    rows: int, inner: int, cols: int, item: int, real: int, *, transposed: bool, tiles: bool = False
) -> GemmSizes:
    """Return the work space of a product (rows, inner) @ (inner, cols); transposed: the left operand is stored so.

    For every instruction set: those that multiply bfloat16 in pairs use half of what others widen to. tiles: AMX's.
    """
    if tiles:
        return _amx_sizes(rows, inner, cols, real, transposed=transposed)
    whole = _lined(cols, real)
    if transposed:
        count = segments(rows, inner, cols, real)
        # Panels of the left operand have TILE_ROWS columns, those of the right one a line at most; a line lies between.
        left = max(-(-rows // tile) * (SUM_INNER * tile * real + LINE) for tile in TILE_ROWS)
        right = SUM_INNER * whole * real + -(-whole * real // NARROWEST) * LINE
        return GemmSizes(aligned(count * rows * whole * real), left + right, count)
    widened = inner if item != real else 0
    return GemmSizes(aligned(inner * whole * real), aligned(GEMM_BLOCK * (whole + widened) * real))


def _amx_sizes(rows: int, inner: int, cols: int, real: int, *, transposed: bool) -> GemmSizes:
    """As `gemm_sizes`, of cpu/gemm_amx.cpp: everything in whole tiles."""
    whole_rows, whole_inner, whole_cols = (-(-n // AMX_SIDE) * AMX_SIDE for n in (rows, inner, cols))
    if transposed:
        count = segments(rows, inner, cols, real)
        block = 2 * AMX_SIDE * AMX_SIDE
        own = max(block + 2 * AMX_DEEP * (whole_rows + whole_cols), whole_cols * real)
        return GemmSizes(aligned(count * whole_rows * whole_cols * real), aligned(own), count)
    # Before rows are multiplied, a block of the right operand is copied to their place.
    own = max(GEMM_BLOCK * (whole_cols * real + 2 * whole_inner), 2 * AMX_SIDE * AMX_SIDE)
    return GemmSizes(aligned(2 * whole_inner * whole_cols), aligned(own))


def _lined(cols: int, real: int) -> int:
    """Columns up to the end of a cache line."""
    return -(-cols * real // LINE) * LINE // real


@dataclass(frozen=True, slots=True)
class WindowSum:
    """A product a^T b (rows, cols) over `total` rows of all windows; item, real: bytes of a stored number and of a sum."""

    rows: int
    cols: int
    total: int
    item: int
    real: int


def window_bytes(products: Iterable[WindowSum], losses: int = 1, *, tiles: bool = False) -> int:
    """Return the most memory, in bytes, that sums keep between windows: of products, and of losses with 64 chunks each.

    products: those of one pass over the windows; tiles: as of `gemm_bytes`.
    """
    kept = losses * aligned(LOSS_BYTES)
    for of in products:
        most = max(
            gemm_sizes(of.rows, of.total, of.cols, of.item, of.real, transposed=True, tiles=by_tiles).packed
            for by_tiles in {False, tiles and of.item == 2}
        )
        kept += aligned(most + carry_bytes(of.rows, of.cols, of.item))
    return kept


def carry_bytes(rows: int, cols: int, item: int) -> int:
    """Return the bytes of two rows of both operands of a product a^T b: of a pair that windows take apart.

    Of bfloat16 alone, whose products may be by pairs.
    """
    return 2 * (rows + cols) * item if item == 2 else 0


def converted_shapes(rows: int, inner: int, cols: int, *, summed: bool) -> tuple[tuple[int, int], ...]:
    """Return the float32 matrices that a product (rows, inner) @ (inner, cols) of bfloat16 is converted to, in blocks.

    A few rows of the left operand at a time, the right one and as many rows of the result; or, if the operands are longer
    than the result, a few rows of both and the whole result, which needs none if it is float32 itself (`summed`).
    """
    if inner <= rows:
        block = min(GEMM_ROWS, rows)
        return (block, inner), (inner, cols), (block, cols)
    block = min(GEMM_ROWS, inner)
    return (block, rows), (block, cols), *(() if summed else ((rows, cols),))


def copied_shape(rows: int, inner: int) -> tuple[int, int]:
    """Return the matrix to which blocks of a padded left operand (rows, inner) are copied for torch."""
    return min(GEMM_ROWS, rows), inner


def gemm_bytes(
    rows: int, d: int, e: int, item: int, real: int, threads: int, variant: GemmVariant, *, tiles: bool = False
) -> int:
    """Return the most work space, in bytes, of the products of a layer; tiles: AMX's kernels may run, too.

    They are those of `rows` rows, or blocks of them, of widths d and e: forwards, and the gradients of weights and input.
    item, real: bytes of a stored number and of a sum.
    """
    if variant == "torch":
        return _converted_bytes(rows, d, e) if item != real else max(_copied_bytes(rows, n, item) for n in (d, e))
    shapes = (rows, d, e, False), (rows, e, d, False), (d, rows, e, True)
    return max(
        gemm_sizes(m, k, n, item, real, transposed=transposed, tiles=by_tiles).total(threads)
        for m, k, n, transposed in shapes
        for by_tiles in {False, tiles and item == 2}
    )


def _copied_bytes(rows: int, inner: int, item: int) -> int:
    """Return the bytes of a copy of a left operand; 0 if its rows are whole cache lines, as those of padded buffers
    are.
    """
    return aligned(item * math.prod(copied_shape(rows, inner))) if inner * item % LINE else 0


def _converted_bytes(rows: int, d: int, e: int) -> int:
    """The most bytes in which the products of a layer of bfloat16 are converted for torch."""
    counts = {rows, min(rows, GEMM_ROWS), rows % GEMM_ROWS}
    shapes = [
        converted_shapes(*sizes, summed=summed)
        for n in counts
        for *sizes, summed in ((n, d, e, False), (n, e, d, False), (d, n, e, True))
    ]
    return max(sum(aligned(4 * a * b) for a, b in matrices) for matrices in shapes)


def aligned(nbytes: int) -> int:
    """Return the bytes up to the next cache line."""
    return -(-nbytes // LINE) * LINE
