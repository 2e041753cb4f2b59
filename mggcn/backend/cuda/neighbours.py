"""Maximum and attention on a GPU: launches of cuda/maximum.cu and cuda/attention.cu, a warp per row, or row and head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels
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
        args = (*_entries(matrix), *_rows(rows), *_rows(out), *_rows(winners), cols, int(begins), int(ends), num_rows)
        self._launch("maximum", "maximum", num_rows, *args)

    def maximum_combine(self, message: Tensor, index: Tensor, out: Tensor, winners: Tensor) -> None:
        count = index.shape[0]
        args = (index, *_rows(message), *_rows(out), *_rows(winners), out.shape[1], count)
        self._launch("maximum", "maximum_combine", count, *args)

    def maximum_grad(self, matrix: Sparse, rows: Tensor, ids: Tensor, out: Tensor, *, begins: bool) -> None:
        num_rows, cols = out.shape
        args = (*_entries(matrix), *_rows(rows), ids, *_rows(out), cols, int(begins), num_rows)
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
        num_rows = out.shape[0]
        tensors = (*_entries(matrix), heads.counts(matrix), *_rows(rows), *_rows(own), *_rows(out), *_rows(state))
        args = (*tensors, *_heads(heads), int(begins), int(ends), num_rows)
        self._launch("attention", "attend", num_rows * heads.heads, *args)

    def attend_combine(self, heads: Heads, message: Tensor, index: Tensor, out: Tensor, state: Tensor) -> None:
        count = index.shape[0]
        args = (index, *_rows(message), *_rows(out), *_rows(state), heads.heads, heads.cols, count)
        self._launch("attention", "attend_combine", count * heads.heads, *args)

    def attend_sources(
        self, heads: Heads, matrix: Sparse, rows: Tensor, own: Tensor, out: Tensor, *, begins: bool
    ) -> None:
        num_rows = out.shape[0]
        args = (
            *_entries(matrix),
            heads.counts(matrix),
            *_rows(rows),
            *_rows(own),
            *_rows(out),
            *_heads(heads),
            int(begins),
            num_rows,
        )
        self._launch("attention", "attend_sources", num_rows * heads.heads, *args)

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
        num_rows = out.shape[0]
        second = (None, 0) if beside is None else _rows(beside)
        tensors = (*_entries(matrix), heads.counts(matrix), *_rows(rows), *_rows(own), *_rows(out), *second)
        args = (*tensors, *_heads(heads), int(begins), num_rows)
        self._launch("attention", "attend_destinations", num_rows * heads.heads, *args)

    def head_dots(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        num_rows, heads = out.shape
        pitch = y.stride(0) if y.dim() == 2 else 0
        args = (*_rows(x), y, pitch, *_rows(out), heads, x.shape[1] // heads, num_rows)
        self._launch("attention", "head_dots", num_rows * heads, *args)


def _entries(matrix: Sparse | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if matrix is None else (matrix.indptr, matrix.indices)


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor.stride(0)


def _heads(heads: Heads) -> tuple[Any, ...]:
    """A, ids, clock, layer, threshold, keep_scale, heads, first, cols, slope. Masks of weights are counted
    apart from others.
    """
    drop = heads.dropout
    dropout = (None, 0, 0, 1.0) if drop is None else (drop.clock, 1 << 31 | drop.layer, drop.threshold, drop.keep_scale)
    return heads.a, heads.ids, *dropout, heads.heads, heads.first, heads.cols, heads.slope
