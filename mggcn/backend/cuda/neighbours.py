"""Maximum and attention on a GPU: launches of cuda/maximum*.cu, cuda/attention*.cu and cuda/neighbour_rows.cu.

Rows are walked by a warp each, those of more than Schedule.limit entries by a block each, the first of the same grid. Every
grid, block and option is a pure function of shapes, types, alignments and the matrix's schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mggcn.backend.cuda.edges import BLOCK, UNROLL, lanes
from mggcn.backend.cuda.edges import ROWS_OF_BLOCK as WARPS
from mggcn.backend.cuda.kernels import Kernels, strided
from mggcn.backend.cuda.spmm import Schedule, is_aligned
from mggcn.backend.neighbours import Heads
from mggcn.backend.sparse import Sparse

ROWS_OF_BLOCK = 8
"""kWarpsOfBoth of cuda/teams.cuh: a warp per row, all of them for a long one."""
PIECES = 2
"""Most pieces of 16 bytes that a lane has of a row at a time."""
MOST = 2**31 - 1


SHARED = 4
"""Least lanes of a head under dropout, whose masks they share: most edges in flight (kEdges of cuda/attention.cuh)."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a warp's lanes share a row of heads; see cuda/attention.cuh."""

    pieces: int
    head: int
    """Lanes of a head, a power of two."""
    group: int
    """Lanes of an edge: of the heads that are computed side by side."""


def lanes_of(heads: int, cols: int, itemsize: int, *, drops: bool) -> Lanes:
    """Return the lanes for so many heads of so many columns. A lane's first piece lies beside its neighbour's, 32 bytes."""
    vectors, least = -(-cols * itemsize // 16), SHARED if drops else 1
    pieces = PIECES if itemsize == 4 and max(2, least) < vectors <= 32 * PIECES else 1
    head = max(least, min(32, _power(-(-vectors // pieces))))
    return Lanes(pieces, head, min(32, _power(heads) * head))


class CudaNeighbours:
    """The kernels for one storage type on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def _by_rows(
        self, file: str, kernel: str, matrix: Sparse | None, rows: int, args: tuple[Any, ...], options: tuple[str, ...]
    ) -> None:
        """Launch a block per hub and long row, then a warp per other one, the longest of a window first."""
        long: tuple[Any, ...] = (None, None, 0, 0, None)
        blocks, longest = 0, MOST
        if matrix is not None:
            plan: Schedule = matrix.schedule
            num_long, hubs = plan.num_long(UNROLL), plan.hubs.shape[0]
            long, blocks, longest = (
                (plan.long_rows, plan.hubs, num_long, hubs, plan.order),
                num_long + hubs,
                plan.limit(UNROLL),
            )
        grid = (blocks + -(-rows // ROWS_OF_BLOCK),) if rows else (0,)
        self._kernels.launch(file, kernel, grid, (32 * ROWS_OF_BLOCK,), *args, *long, rows, longest, options=options)

    def _by_warps(self, kernel: str, warps: int, *args: Any) -> None:
        self._kernels.launch("neighbour_rows", kernel, (-(-warps // WARPS),), (BLOCK,), *args)

    def maximum(
        self, matrix: Sparse | None, rows: Tensor, out: Tensor, winners: Tensor, *, begins: bool, ends: bool
    ) -> None:
        num_rows, cols = out.shape
        # Pieces may end among the columns behind the last, if those are the row's.
        whole = is_aligned(rows) and -(-cols * rows.itemsize // 16) * 16 <= rows.stride(0) * rows.itemsize
        args = (*_entries(matrix), *strided(rows), *strided(out), *strided(winners), cols, int(begins), int(ends))
        self._by_columns("maximum", "maximum", matrix, num_rows, cols, args, rows.itemsize, whole=whole)

    def maximum_combine(self, message: Tensor, index: Tensor, out: Tensor, winners: Tensor) -> None:
        count = index.shape[0]
        args = (index, *strided(message), *strided(out), *strided(winners), out.shape[1], count)
        self._by_warps("maximum_combine", count, *args)

    def maximum_grad(self, matrix: Sparse, rows: Tensor, ids: Tensor, out: Tensor, *, begins: bool) -> None:
        num_rows, cols = out.shape
        whole = is_aligned(rows) and cols * rows.itemsize % 16 == 0
        args = (*_entries(matrix), *strided(rows), ids, *strided(out), cols, int(begins))
        self._by_columns("maximum_grad", "maximum_grad", matrix, num_rows, cols, args, rows.itemsize, whole=whole)

    def _by_columns(
        self,
        file: str,
        kernel: str,
        matrix: Sparse | None,
        rows: int,
        cols: int,
        args: tuple[Any, ...],
        itemsize: int,
        *,
        whole: bool,
    ) -> None:
        """Launch a kernel whose lanes have columns of a row side by side. whole: pieces of 16 bytes may be loaded."""
        options = _options(PIECES if cols * itemsize > 32 * 16 else 1, {"TIGHT": not whole})
        self._by_rows(file, kernel, matrix, rows, (*args, lanes(cols, itemsize)), options)

    def attend(
        self,
        heads: Heads,
        matrix: Sparse | None,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        state: Tensor,
        *,
        begins: bool,
        ends: bool,
    ) -> None:
        self._attend("attention", "attend", heads, matrix, rows, own, out, *strided(state), flags=(begins, ends))

    def attend_combine(self, heads: Heads, message: Tensor, index: Tensor, out: Tensor, state: Tensor) -> None:
        count = index.shape[0]
        args = (index, *strided(message), *strided(out), *strided(state), heads.heads, heads.cols, count)
        self._by_warps("attend_combine", count * heads.heads, *args)

    def attend_sources(
        self, heads: Heads, matrix: Sparse, rows: Tensor, own: Tensor, out: Tensor, *, begins: bool
    ) -> None:
        # y of GATv2 lies behind g and d.
        whole = heads.a is None or (heads.cols + 1) * heads.heads * rows.itemsize % 16 == 0
        self._attend("attention_grad", "attend_sources", heads, matrix, rows, own, out, flags=(begins,), whole=whole)

    def attend_destinations(
        self,
        heads: Heads,
        matrix: Sparse,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        beside: Tensor | None,
        *,
        begins: bool,
    ) -> None:
        second = (None, 0) if beside is None else strided(beside)
        self._attend("attention_grad", "attend_destinations", heads, matrix, rows, own, out, *second, flags=(begins,))

    def _attend(
        self,
        file: str,
        kernel: str,
        heads: Heads,
        matrix: Sparse | None,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        *beside: Tensor | int | None,
        flags: tuple[bool, ...],
        whole: bool = True,
    ) -> None:
        """whole: pieces of 16 bytes of a row's further fields may be loaded, if those of its first may."""
        drops = heads.dropout is not None
        found = lanes_of(heads.heads, heads.cols, rows.itemsize, drops=drops)
        tight = not (whole and is_aligned(rows) and heads.cols * rows.itemsize % 16 == 0)
        wide = heads.cols * rows.itemsize > found.pieces * found.head * 16
        named = {"DYNAMIC": heads.a is not None, "DROPS": drops, "TIGHT": tight, "WIDE": wide}
        tensors = (*_entries(matrix), heads.counts(matrix), *strided(rows), *strided(own), *strided(out), *beside)
        args = (*tensors, *_heads(heads), *map(int, flags), found.head, found.group)
        self._by_rows(file, kernel, matrix, out.shape[0], args, _options(found.pieces, named))

    def head_dots(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        num_rows, heads = out.shape
        pitch = y.stride(0) if y.dim() == 2 else 0
        args = (*strided(x), y, pitch, *strided(out), heads, x.shape[1] // heads, num_rows)
        self._by_warps("head_dots", num_rows * heads, *args)


def _options(pieces: int, named: dict[str, bool]) -> tuple[str, ...]:
    return (f"-DMGGCN_PIECES={pieces}", *(f"-DMGGCN_{name}" for name, on in named.items() if on))


def _power(count: int) -> int:
    """Return the least power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _entries(matrix: Sparse | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if matrix is None else (matrix.indptr, matrix.indices)


def _heads(heads: Heads) -> tuple[Any, ...]:
    """A, ids, clock, layer, threshold, keep_scale, heads, first, cols, slope. Masks of weights are counted
    apart from others.
    """
    drop = heads.dropout
    dropout = (None, 0, 0, 1.0) if drop is None else (drop.clock, 1 << 31 | drop.layer, drop.threshold, drop.keep_scale)
    return heads.a, heads.ids, *dropout, heads.heads, heads.first, heads.cols, heads.slope
