"""Aggregation over a block whose edges and source rows are all on this rank: one sparse product, no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target, single_tile
from mggcn.aggregate.steps import Step
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import Capacity
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The plan of a block of at most this size, whose edges change from step to step.

    back: whether gradients flow back through it, over its transpose.
    """

    size: Capacity
    back: bool = True
    exact = True
    index_bytes = 0
    period = 1
    by_columns = True

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix(self.size.targets, self.size.edges),)

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return (Matrix(self.size.sources, self.size.edges),) if self.back else ()

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        return ()

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        rows, columns = self.size.targets, self.size.sources
        if backward:
            rows, columns = columns, rows
        return (op.columns(cols).multiply(rows, columns, self.size.edges, ()),)

    def build(self, context: BuildContext) -> RankAggregations:
        local = LocalBlock(context.backend, self.back)
        return RankAggregations(local, local)


class LocalBlock(Aggregation):
    """The block on one rank. `load` gives it the edges of a step."""

    exact = True

    def __init__(self, backend: KernelBackend, back: bool) -> None:
        self._backend = backend
        self.back: bool = back
        """Whether the transpose is read."""
        self.loaded: tuple[Sparse, Sparse | None] | None = None
        """The edges of the step at hand: a row for each target, and the transpose with a row for each source."""

    @property
    def edges(self) -> LocalBlock:
        return self

    def load(self, matrix: Sparse, matrix_t: Sparse | None) -> None:
        """Take the edges of a step."""
        self.loaded = matrix, matrix_t

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        single_tile(op, self._backend, self._matrix(0), h, target)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        single_tile(op, self._backend, self._matrix(1), g, target)

    def _matrix(self, direction: int) -> Sparse:
        matrix = None if self.loaded is None else self.loaded[direction]
        if matrix is None:
            raise PlanError("a block was run before a batch was loaded, or backwards where no transpose was planned")
        return matrix

    def state(self) -> Mapping[str, Tensor]:
        return {}
