"""Maximum and attention on a GPU: launches of cuda/maximum.cu and cuda/attention.cu, a warp per row, or row and head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels, strided
from mggcn.backend.neighbours import Heads
from mggcn.backend.sparse import Sparse

BLOCK = 128
WARPS = 4
"""kWarpsOfBlock of cuda/vertex_numbers.cuh."""


class CudaNeighbours:
    """The kernels for one storage type on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def _launch(self, file: str, kernel: str, warps: int, *args: Any) -> None:
        self._kernels.launch(file, kernel, (-(-warps // WARPS),), (BLOCK,), *args)

    def maximum(
        self, matrix: Sparse | None, rows: Tensor, out: Tensor, winners: Tensor, *, begins: bool, ends: bool
    ) -> None:
        num_rows, cols = out.shape
        args = (*_entries(matrix), *strided(rows), *strided(out), *strided(winners), cols)
        self._launch("maximum", "maximum", num_rows, *args, int(begins), int(ends), num_rows)

    def maximum_combine(self, message: Tensor, index: Tensor, out: Tensor, winners: Tensor) -> None:
        count = index.shape[0]
        args = (index, *strided(message), *strided(out), *strided(winners), out.shape[1], count)
        self._launch("maximum", "maximum_combine", count, *args)

    def maximum_grad(self, matrix: Sparse, rows: Tensor, ids: Tensor, out: Tensor, *, begins: bool) -> None:
        num_rows, cols = out.shape
        args = (*_entries(matrix), *strided(rows), ids, *strided(out), cols, int(begins), num_rows)
        self._launch("maximum", "maximum_grad", num_rows, *args)

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
        self._attend("attend", heads, matrix, rows, own, out, *strided(state), flags=(begins, ends))

    def attend_combine(self, heads: Heads, message: Tensor, index: Tensor, out: Tensor, state: Tensor) -> None:
        count = index.shape[0]
        args = (index, *strided(message), *strided(out), *strided(state), heads.heads, heads.cols, count)
        self._launch("attention", "attend_combine", count * heads.heads, *args)

    def attend_sources(
        self, heads: Heads, matrix: Sparse, rows: Tensor, own: Tensor, out: Tensor, *, begins: bool
    ) -> None:
        self._attend("attend_sources", heads, matrix, rows, own, out, flags=(begins,))

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
        self._attend("attend_destinations", heads, matrix, rows, own, out, *second, flags=(begins,))

    def _attend(
        self,
        kernel: str,
        heads: Heads,
        matrix: Sparse | None,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        *beside: Tensor | int | None,
        flags: tuple[bool, ...],
    ) -> None:
        tensors = (*_entries(matrix), heads.counts(matrix), *strided(rows), *strided(own), *strided(out), *beside)
        args = (*tensors, *_heads(heads), *map(int, flags), out.shape[0])
        self._launch("attention", kernel, out.shape[0] * heads.heads, *args)

    def head_dots(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        num_rows, heads = out.shape
        pitch = y.stride(0) if y.dim() == 2 else 0
        args = (*strided(x), y, pitch, *strided(out), heads, x.shape[1] // heads, num_rows)
        self._launch("attention", "head_dots", num_rows * heads, *args)


def _entries(matrix: Sparse | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if matrix is None else (matrix.indptr, matrix.indices)


def _heads(heads: Heads) -> tuple[Any, ...]:
    """A, ids, clock, layer, threshold, keep_scale, heads, first, cols, slope. Masks of weights are counted
    apart from others.
    """
    drop = heads.dropout
    dropout = (None, 0, 0, 1.0) if drop is None else (drop.clock, 1 << 31 | drop.layer, drop.threshold, drop.keep_scale)
    return heads.a, heads.ids, *dropout, heads.heads, heads.first, heads.cols, heads.slope
