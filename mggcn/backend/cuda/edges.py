"""Passes over edges on a GPU: launches of cuda/edge_reduce.cu, edge_gradient.cu and edge_gradient_edges.cu.

Every grid and block is a pure function of shapes, types and the matrix's schedule (cuda/spmm.py), which lists long rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels, strided
from mggcn.backend.cuda.spmm import Schedule
from mggcn.backend.edges import OFS, OPS, PARTIALS, REDUCERS, EdgeGradient, EdgeRows, Operand, Reduction

BLOCK = 128
ROWS_OF_BLOCK = 4
"""kWarpsOfBlock of cuda/teams.cuh: a warp per row."""
LONG_BLOCK = 512
"""kWarpsOfLong warps: a block per long row."""
UNROLL = 8
"""Argument of Schedule.limit: rows of more than four times its shortest, 256 nonzeros, count as long."""
RUN = 16
"""kRun of cuda/edge_gradient_edges.cu: edges of a group of lanes."""


class CudaEdges:
    """The kernels for one storage type on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def reduce(self, edges: EdgeRows, messages: Reduction, out: Tensor, winners: Tensor | None) -> None:
        cols = out.shape[1]
        args = (
            edges.matrix.indptr,
            edges.matrix.indices,
            edges.edge_ids,
            *_operand_args(messages.lhs, cols),
            *_operand_args(messages.rhs, cols),
            *strided(out),
            winners,
            cols,
            OPS.index(messages.op),
            REDUCERS.index(messages.reducer),
            lanes(cols, out.dtype.itemsize),
        )
        self._by_rows("edge_reduce", edges, args)

    def gradient(self, edges: EdgeRows, by: EdgeGradient, g: Tensor, winners: Tensor | None, out: Tensor) -> None:
        matrix, cols = edges.matrix, g.shape[1]
        per_row = lanes(cols, g.dtype.itemsize)
        rows_by_source = (edges.place, edges.starts)
        args = (
            matrix.indptr,
            matrix.indices,
            *(() if by.of == "edge" else rows_by_source),
            edges.edge_ids,
            *_operand_args(by.a, cols),
            *_operand_args(by.b, cols),
            *strided(g),
            winners,
            *strided(out),
            cols,
            PARTIALS.index(by.partial),
            int(out.shape[1] < cols),
            by.scale,
            per_row,
        )
        if by.of == "edge":
            grid = (-(-matrix.nnz // (BLOCK // per_row * RUN)),)
            ends = (matrix.num_rows, matrix.nnz)
            self._kernels.launch("edge_gradient_edges", "edge_gradient_edges", grid, (BLOCK,), *args, *ends)
        else:
            self._by_rows("edge_gradient", edges, args)

    def _by_rows(self, kernel: str, edges: EdgeRows, args: tuple[Any, ...]) -> None:
        """Launch a warp per row, then a block per long one."""
        rows = edges.matrix.num_rows
        plan: Schedule = edges.matrix.schedule
        num_long, hubs = plan.num_long(UNROLL), plan.hubs.shape[0]
        short = (rows, plan.limit(UNROLL))
        self._kernels.launch(kernel, kernel, (-(-rows // ROWS_OF_BLOCK),), (BLOCK,), *args, *short)
        long = (plan.long_rows, plan.hubs, hubs)
        self._kernels.launch(kernel, f"{kernel}_long", (num_long + hubs,), (LONG_BLOCK,), *args, *long)


def lanes(cols: int, itemsize: int) -> int:
    """Return the lanes of a warp that share a row of operands, 16 bytes each: a power of two."""
    pieces = -(-cols * itemsize // 16)
    return next((n for n in (1, 2, 4, 8, 16) if pieces <= n), 32)


def _operand_args(operand: Operand | None, cols: int) -> tuple[Any, ...]:
    if operand is None:
        return (None, 0, 0, 0)
    rows = operand.rows
    return (*strided(rows), OFS.index(operand.of), int(rows.shape[1] < cols))
