"""Maximum and attention on the CPU: arguments of cpu/maximum.cpp and cpu/attention.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.cpu.args import address, dropout_args, strided
from mggcn.backend.neighbours import Heads
from mggcn.backend.sparse import Sparse
from mggcn.backend.team import Team

_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class MaximumArgs(ctypes.Structure):
    """`Maximum<T>` of cpu/maximum.cpp."""

    _fields_ = (
        ("num_chunks", _L),
        ("chunks", _P),
        ("indptr", _P),
        ("indices", _P),
        ("rows", _P),
        ("ld", _L),
        ("out", _P),
        ("ld_out", _L),
        ("winners", _P),
        ("ld_winners", _L),
        ("ids", _P),
        ("index", _P),
        ("num_rows", _L),
        ("cols", _L),
        ("fresh", _I),
        ("last", _I),
        ("threads", _I),
    )


class AttentionArgs(ctypes.Structure):
    """`Attention<T>` of cpu/attention.h."""

    _fields_ = (
        ("num_chunks", _L),
        ("chunks", _P),
        ("indptr", _P),
        ("indices", _P),
        ("rows", _P),
        ("ld", _L),
        ("own", _P),
        ("ld_own", _L),
        ("out", _P),
        ("ld_out", _L),
        ("beside", _P),
        ("ld_beside", _L),
        ("a", _P),
        ("counts", _P),
        ("ids", _P),
        ("index", _P),
        ("num_rows", _L),
        ("heads", _L),
        ("first", _L),
        ("cols", _L),
        ("slope", _D),
        ("dropout", native.DropoutArgs),
        ("fresh", _I),
        ("last", _I),
        ("threads", _I),
    )


class CpuNeighbours:
    """The kernels for one storage type on a team of threads."""

    def __init__(self, dtype: torch.dtype, team: Team, isa: str) -> None:
        self._kind = {torch.float32: "f32", torch.float64: "f64"}[dtype]
        self._team = team
        self._isa = isa

    def _run(self, name: str, *args: Any) -> None:
        native.kernel(f"mggcn_{name}_", self._kind, self._isa)(*args)

    def maximum(
        self, matrix: Sparse | None, rows: Tensor, out: Tensor, winners: Tensor, *, begins: bool, ends: bool
    ) -> None:
        self._maximum("maximum", matrix, rows, out, winners, begins=begins, ends=ends)

    def maximum_combine(self, message: Tensor, index: Tensor, out: Tensor, winners: Tensor) -> None:
        self._maximum("maximum_combine", None, message, out, winners, index=index)

    def maximum_grad(self, matrix: Sparse, rows: Tensor, ids: Tensor, out: Tensor, *, begins: bool) -> None:
        self._maximum("maximum_grad", matrix, rows, out, out, ids=ids, begins=begins)

    def _maximum(
        self,
        name: str,
        matrix: Sparse | None,
        rows: Tensor,
        out: Tensor,
        winners: Tensor,
        *,
        ids: Tensor | None = None,
        index: Tensor | None = None,
        begins: bool = False,
        ends: bool = False,
    ) -> None:
        args = MaximumArgs(
            *_entries(matrix),
            *strided(rows),
            *strided(out),
            *strided(winners),
            address(ids),
            address(index),
            out.shape[0] if index is None else index.shape[0],
            out.shape[1],
            int(begins),
            int(ends),
            self._team.running,
        )
        self._run(name, ctypes.byref(args))

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
        self._attend("attend", heads, matrix, rows, out, own=own, beside=state, begins=begins, ends=ends)

    def attend_combine(self, heads: Heads, message: Tensor, index: Tensor, out: Tensor, state: Tensor) -> None:
        self._attend("attend_combine", heads, None, message, out, beside=state, index=index)

    def attend_sources(
        self, heads: Heads, matrix: Sparse, rows: Tensor, own: Tensor, out: Tensor, *, begins: bool
    ) -> None:
        self._attend("attend_sources", heads, matrix, rows, out, own=own, begins=begins)

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
        self._attend("attend_destinations", heads, matrix, rows, out, own=own, beside=beside, begins=begins)

    def _attend(
        self,
        name: str,
        heads: Heads,
        matrix: Sparse | None,
        rows: Tensor,
        out: Tensor,
        *,
        own: Tensor | None = None,
        beside: Tensor | None = None,
        index: Tensor | None = None,
        begins: bool = False,
        ends: bool = False,
    ) -> None:
        args = AttentionArgs(
            *_entries(matrix),
            *strided(rows),
            *strided(own),
            *strided(out),
            *strided(beside),
            address(heads.a),
            address(heads.counts(matrix)),
            address(heads.ids),
            address(index),
            out.shape[0] if index is None else index.shape[0],
            heads.heads,
            heads.first,
            heads.cols,
            heads.slope,
            dropout_args(heads.dropout),
            int(begins),
            int(ends),
            self._team.running,
        )
        self._run(name, ctypes.byref(args))

    def head_dots(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        rows, heads = out.shape
        pitch = y.stride(0) if y.dim() == 2 else 0
        sizes = (rows, heads, x.shape[1] // heads, self._team.running)
        self._run("head_dots", *strided(x), address(y), pitch, *strided(out), *sizes)


def _entries(matrix: Sparse | None) -> tuple[int, int | None, int | None, int | None]:
    """Chunks of rows, row pointers and columns; nothing for no entries."""
    if matrix is None:
        return 0, None, None, None
    chunks: Tensor = matrix.schedule.chunks
    return chunks.shape[0] - 1, address(chunks), address(matrix.indptr), address(matrix.indices)
