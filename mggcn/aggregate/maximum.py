"""The maximum of neighbours as an edge operation: GraphSAGE's pooling (Hamilton et al. 2017, eq. 3). V rows, D columns.

The gradient of a column goes to one neighbour: among those that have the maximum, the one with the lowest number in the
whole graph, so that neither the number of ranks nor the order of tiles changes it. A row is therefore sent with its
vertex's number, an integer in the bits of one more column, and the winners are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mggcn.aggregate.edge_op import Arithmetic, Columns, EdgeOp, Target
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Maximum(EdgeOp):
    """out[v] = the maximum of h[u] over the edges u -> v, column by column; weights of edges are not read.

    operand: [h | number], D + 1 columns; local: numbers int64 (V,), then winners (V, D), which are kept.
    """

    name = "maximum"
    columnwise = False
    additive = False

    @property
    def adjoint(self) -> MaximumGrad:
        return MaximumGrad()

    def columns(self, cols: int) -> Columns:
        return Columns(cols + 1, 2 * cols, 2 * cols)

    def arithmetic(self, cols: int) -> Arithmetic:
        return Arithmetic("maximum", 0, cols, beside=True)

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return (BufferSpec(f"{name}.winners", rows, cols, dtype, "kept"),)

    def begin(self, backend: KernelBackend, target: Target) -> Largest:
        return Largest(backend, target)


class PairedRows(ABC):
    """Accumulations that keep a second tensor beside the result: a message has the rows of both, side by side."""

    def __init__(self, backend: KernelBackend, target: Target, beside: Tensor) -> None:
        self._backend, self._target = backend, target
        self._out, self._beside = target.out, beside
        self._begun = self._ended = False

    @abstractmethod
    def _add(self, matrix: Sparse | None, rows: Tensor, last: bool) -> None:
        """Add a tile, or without a matrix only end the rows."""

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        if matrix.nnz or last or not self._begun:
            self._add(matrix, rows, last)
        self._begun, self._ended = True, last

    def gather(self, index: Tensor, message: Tensor) -> None:
        cols = self._out.shape[1]
        self._backend.gather_rows(self._out, index, message[:, :cols])
        self._backend.gather_rows(self._beside, index, message[:, cols:])

    def scatter(self, message: Tensor, index: Tensor) -> None:
        cols = self._out.shape[1]
        self._backend.scatter_rows(message[:, :cols], index, self._out)
        self._backend.scatter_rows(message[:, cols:], index, self._beside)

    def end(self) -> None:
        if not self._ended:
            self._add(None, self._out, True)
        if self._target.epilogue is not None:
            self._backend.finish(self._out, self._out, self._target.epilogue)


class Largest(PairedRows):
    """Keeps the largest values so far and the numbers of the vertices that they come from (`Maximum`)."""

    def __init__(self, backend: KernelBackend, target: Target) -> None:
        super().__init__(backend, target, target.local[1])

    def _add(self, matrix: Sparse | None, rows: Tensor, last: bool) -> None:
        kernels = self._backend.neighbours
        kernels.maximum(matrix, rows, self._out, self._beside, begins=not self._begun, ends=last)

    def combine(self, message: Tensor, index: Tensor) -> None:
        self._backend.neighbours.maximum_combine(message, index, self._out, self._beside)


@dataclass(frozen=True, slots=True)
class MaximumGrad(EdgeOp):
    """out[u] = the sum of g[v] over the edges u -> v whose maximum is u's; operand [g | winners]; local: numbers (V,)."""

    name = "gradient of the maximum"
    columnwise = False
    additive = False

    @property
    def adjoint(self) -> EdgeOp:
        raise PlanError(
            "the gradient of the maximum of neighbours has no derivative; use it in the backward pass alone"
        )

    def columns(self, cols: int) -> Columns:
        # Copies of a vertex have parts of g, and the same winners.
        return Columns(2 * cols, cols, cols)

    def arithmetic(self, cols: int) -> Arithmetic:
        # Winners alone, where the row has won none of them: most edges lie in long rows.
        return Arithmetic("maximum_grad", 0, cols, read=0.5, beside=True)

    def begin(self, backend: KernelBackend, target: Target) -> Won:
        return Won(backend, target)


class GradientRows:
    """Base of accumulations of gradients, which are summed over copies of a vertex before they are sent."""

    def __init__(self, backend: KernelBackend, target: Target) -> None:
        self._backend, self._target = backend, target
        self._begun = False

    def gather(self, index: Tensor, message: Tensor) -> None:
        raise PlanError("gradients of copies are summed before they are sent along edges, not after")

    def combine(self, message: Tensor, index: Tensor) -> None:
        raise PlanError("gradients of copies are summed before they are sent along edges, not after")

    def scatter(self, message: Tensor, index: Tensor) -> None:
        raise PlanError("gradients of copies are summed before they are sent along edges, not after")

    def end(self) -> None:
        if self._target.epilogue is not None:
            self._backend.finish(self._target.out, self._target.out, self._target.epilogue)


class Won(GradientRows):
    """Adds up the gradients that reach the winners, tile after tile (`MaximumGrad`)."""

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        if matrix.nnz or not self._begun:
            kernels, out, ids = self._backend.neighbours, self._target.out, self._target.local[0]
            kernels.maximum_grad(matrix, rows, ids, out, begins=not self._begun)
        self._begun = True
