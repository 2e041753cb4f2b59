"""Sizes of what the CPU's kernels keep and use beside matrices and results: a plan adds them up. Needs no torch.

V rows and N columns of a sparse matrix, D columns of its operand.
"""

from __future__ import annotations

from mggcn.backend.cpu_choice import LINE, PANELS, hub_length
from mggcn.backend.cpu_machine import Caches

CHUNKS = 512
"""Row chunks of a sparse matrix: enough for 64 threads to balance, few enough to cost nothing."""
GEMM_ROWS = 512
"""Rows of bfloat16 that a dense product converts at a time: they stay in the cache until they are multiplied."""
COLUMNS = 64
"""The sums of a part of a hub row are padded to a multiple of these columns."""


def max_parts(nnz: int) -> int:
    """Return the most parts that hub rows can have: n entries, more than two parts' h, give ceil(n / h) < 1.5 n / h."""
    return 3 * nnz // hub_length(nnz)


def schedule_bytes(rows: int, nnz: int) -> int:
    """Return the most bytes of a matrix's schedule: ends of the chunks, parts of hub rows, hub rows."""
    hubs = nnz // (hub_length(nnz) + 1)
    return 8 * (max(1, min(rows, CHUNKS)) + 1) + 16 * max_parts(nnz) + 24 * hubs


def spmm_bytes(rows: int, columns: int, nnz: int, width: int, item: int, real: int, caches: Caches) -> int:
    """Return the most bytes that a product works in, whatever way is chosen.

    item, real: bytes of a stored number and of a sum. These are the sums of parts of hub rows, and either a packed panel,
    which the shared cache holds, or for each row where its next block begins.
    """
    widest = max((size for size in PANELS if size < width * item), default=0)
    packed = min(columns * widest, caches.shared_bytes)
    return aligned(max_parts(nnz) * padded_columns(width) * real) + max(aligned(packed), aligned(8 * rows))


def padded_columns(width: int) -> int:
    """Return the columns of the sums of a part of a hub row."""
    return -(-width // COLUMNS) * COLUMNS


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


def gemm_bytes(rows: int, d: int, e: int) -> int:
    """Return the most bytes in which the products of a layer of bfloat16 are converted.

    They are those of `rows` rows, or blocks of them, of widths d and e: forwards, and the gradients of weights and input.
    """
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
