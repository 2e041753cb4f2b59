"""Passes over edges on the CPU: arguments of cpu/edge_reduce.cpp and cpu/edge_gradient.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.cpu.args import NAMES, address, strided
from mggcn.backend.edges import OFS, OPS, PARTIALS, REDUCERS, EdgeGradient, EdgeRows, Operand, Reduction
from mggcn.backend.team import Team
from mggcn.errors import BackendError

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class EdgeRowsArgs(ctypes.Structure):
    """`EdgeRows` of cpu/edges.h."""

    _fields_ = (
        ("num_chunks", _L),
        ("chunks", _P),
        ("indptr", _P),
        ("ends", _P),
        ("place", _P),
        ("starts", _P),
        ("edge_ids", _P),
    )


class OperandArgs(ctypes.Structure):
    """`Operand<T>` of cpu/edges.h."""

    _fields_ = (("rows", _P), ("ld", _L), ("of", _I), ("narrow", _I))


class ReduceArgs(ctypes.Structure):
    """`Reduce<T>` of cpu/edge_reduce.cpp."""

    _fields_ = (
        ("rows", EdgeRowsArgs),
        ("lhs", OperandArgs),
        ("rhs", OperandArgs),
        ("out", _P),
        ("ld_out", _L),
        ("cols", _L),
        ("winners", _P),
        ("op", _I),
        ("reducer", _I),
        ("threads", _I),
    )


class GradientArgs(ctypes.Structure):
    """`Gradient<T>` of cpu/edge_gradient.cpp."""

    _fields_ = (
        ("rows", EdgeRowsArgs),
        ("a", OperandArgs),
        ("b", OperandArgs),
        ("g", _P),
        ("ld_g", _L),
        ("winners", _P),
        ("out", _P),
        ("ld_out", _L),
        ("cols", _L),
        ("scale", ctypes.c_double),
        ("partial", _I),
        ("per_edge", _I),
        ("narrow", _I),
        ("threads", _I),
    )


class CpuEdges:
    """The kernels for one storage type on a team of threads. Raises: BackendError for bfloat16."""

    def __init__(self, dtype: torch.dtype, team: Team, isa: str) -> None:
        if dtype == torch.bfloat16:
            raise BackendError(
                "messages along edges need float32 or float64 on a CPU, got bfloat16; convert the features, or use a GPU"
            )
        self._kind = NAMES[dtype]
        self._team = team
        self._isa = isa

    def reduce(self, edges: EdgeRows, messages: Reduction, out: Tensor, winners: Tensor | None) -> None:
        cols = out.shape[1]
        args = ReduceArgs(
            _rows_args(edges),
            _operand_args(messages.lhs, cols),
            _operand_args(messages.rhs, cols),
            *strided(out),
            cols,
            address(winners),
            OPS.index(messages.op),
            REDUCERS.index(messages.reducer),
            self._team.running,
        )
        native.kernel("mggcn_edge_reduce_", self._kind, self._isa)(ctypes.byref(args))

    def gradient(self, edges: EdgeRows, by: EdgeGradient, g: Tensor, winners: Tensor | None, out: Tensor) -> None:
        cols = g.shape[1]
        args = GradientArgs(
            _rows_args(edges),
            _operand_args(by.a, cols),
            _operand_args(by.b, cols),
            *strided(g),
            address(winners),
            *strided(out),
            cols,
            by.scale,
            PARTIALS.index(by.partial),
            int(by.of == "edge"),
            int(out.shape[1] < cols),
            self._team.running,
        )
        native.kernel("mggcn_edge_gradient_", self._kind, self._isa)(ctypes.byref(args))


def _rows_args(edges: EdgeRows) -> EdgeRowsArgs:
    matrix = edges.matrix
    chunks: Any = matrix.schedule.chunks
    return EdgeRowsArgs(
        chunks.shape[0] - 1,
        address(chunks),
        address(matrix.indptr),
        address(matrix.indices),
        address(edges.place),
        address(edges.starts),
        address(edges.edge_ids),
    )


def _operand_args(operand: Operand | None, cols: int) -> OperandArgs:
    if operand is None:
        return OperandArgs(None, 0, 0, 0)
    rows = operand.rows
    return OperandArgs(*strided(rows), OFS.index(operand.of), int(rows.shape[1] < cols))
