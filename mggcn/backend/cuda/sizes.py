"""Sizes of GPUs and of the sparse kernels' own memory, as a plan needs them; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = 256
"""Consecutive rows that are ordered by length among themselves (kWindow in cuda/spmm.cu and teams.cuh)."""
LONG_ROW = 64
"""A row of at most as many nonzeros is never given to a block of its own."""
SEGMENT = 1024
"""Least nonzeros of a part of a hub row; a hub has more than twice as many."""
MAX_PARTS = 8192
"""Parts that a matrix of hubs alone is cut into: eight waves of the blocks that an H100 holds, more cost only memory."""
ALIGNMENT = 512
"""A GPU's allocator rounds sizes up to multiples of this many bytes."""
MAX_NNZ = 2**31 - 1
"""Most nonzeros of one matrix."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Sizes of a GPU on which the choice of kernels depends."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int


H100 = DeviceTraits("H100", (9, 0), 132, 50 * 2**20)
A100 = DeviceTraits("A100", (8, 0), 108, 40 * 2**20)
V100 = DeviceTraits("V100", (7, 0), 80, 6 * 2**20)


def segment_length(nnz: int) -> int:
    """Return the nonzeros of a part of a hub row; a row becomes a hub if it has more than twice as many."""
    return max(SEGMENT, -(-nnz // MAX_PARTS))


def max_parts(nnz: int, segment: int | None = None) -> int:
    """Return the most parts that hubs can have: a hub of n > 2 segment nonzeros has ceil(n / segment) < 1.5 n / segment."""
    return 3 * nnz // (2 * (segment or segment_length(nnz)))


def schedule_bytes(rows: int, nnz: int = MAX_NNZ) -> int:
    """Return the most bytes of a matrix's schedule: order of rows, long rows, parts of hubs, hubs."""
    hubs = nnz // (2 * segment_length(nnz) + 1)
    sizes = (_up(rows, WINDOW), 4 * min(rows, nnz // (LONG_ROW + 1)), 16 * max_parts(nnz), 16 * min(rows, hubs))
    return sum(_up(size, ALIGNMENT) for size in sizes)


def even_schedule_bytes(rows: int) -> int:
    """Return the bytes of a schedule without long rows: the order of rows in their windows."""
    return _up(_up(rows, WINDOW), ALIGNMENT)


def workspace_bytes(nnz: int, cols: int, item: int) -> int:
    """Return the most bytes of the sums of all parts of hubs, of `item` bytes each: rows of `cols`, padded to 64 bytes."""
    return max_parts(nnz) * _up(cols * item, 64)


def cusparse_bytes(rows: int, nnz: int, weighted: bool, item: int) -> int:
    """Return the bytes that cuSPARSE needs beside a matrix: 32-bit row pointers, and ones if it has no values.

    Its work space is not among them: the library says its size on first use, for each matrix and width.
    """
    return _up(4 * (rows + 1), ALIGNMENT) + (0 if weighted else _up(nnz * item, ALIGNMENT))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
