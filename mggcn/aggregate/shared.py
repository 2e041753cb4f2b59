"""Aggregation over a block of a batch that ranks share: each computes its own rows, and receives the others that it reads.

Edges, rows that are exchanged and their numbers change from step to step. T targets, S sources of this rank.
Source: Balin, LaSalle and Catalyurek, "Cooperative Minibatching in Graph Neural Networks", TMLR 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.halo import INDEX_BYTES, Side
from mggcn.aggregate.steps import Await, Copy, Send, Step
from mggcn.backend.base import KernelBackend
from mggcn.blocks.block import Capacity
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The plan of a block of at most this size on each of some ranks.

    back: whether gradients flow back through it. A message has as many bytes as are planned, or fewer.
    """

    size: Capacity
    ranks: int
    back: bool = True
    exact = True
    period = 1
    by_columns = True

    @property
    def index_bytes(self) -> int:
        return INDEX_BYTES * (self.size.sent + self.size.sent_back * self.back)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        # Either of the two may have all edges of a step.
        return (Matrix(self.size.targets, self.size.edges),) * 2

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return (Matrix(self.size.sources, self.size.edges_back),) * 2 if self.back else ()

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        size, width = self.size, op.columns(cols).operand
        sent, received = max(size.sent, size.sent_back), max(size.received, size.received_back)
        return BufferSpec(f"{name}.sent", sent, width, dtype), BufferSpec(f"{name}.halo", received, width, dtype)

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        size, width = self.size, op.columns(cols)
        rows, columns, edges, received, sent = size.targets, size.sources, size.edges, size.received, size.sent
        if backward:
            rows, columns, edges = size.sources, size.targets, size.edges_back
            received, sent = size.received_back, size.sent_back
        # Where owners know nothing of edges, one in P comes from a row of this rank.
        own = edges // self.ranks
        row = BufferSpec("", 1, width.operand, dtype).nbytes
        return (
            Copy(sent, width.operand),
            Send("all_to_all", row * sent, row * received),
            width.multiply(rows, columns, own, ()),
            Await(0),
            width.multiply(rows, received, edges - own, ()),
        )

    def build(self, context: BuildContext) -> RankAggregations:
        shared = SharedBlock(context.comm, context.backend, self.back)
        return RankAggregations(shared, shared)


class SharedBlock(Aggregation):
    """The block on one rank. `load` gives it the edges of a step, and the rows that are exchanged for them."""

    exact = True

    def __init__(self, comm: Communicator, backend: KernelBackend, back: bool) -> None:
        self._comm, self._backend = comm, backend
        self.back: bool = back
        """Whether the transpose is read."""
        self.loaded: tuple[Side, Side | None] | None = None
        """The step at hand: a row for each target, and the transpose with a row for each source."""

    def load(self, side: Side, side_t: Side | None) -> None:
        """Take the edges of a step."""
        self.loaded = side, side_t

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._side(0).aggregate(op, h, target, buffers, self._comm, self._backend)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._side(1).aggregate(op, g, target, buffers, self._comm, self._backend)

    def _side(self, direction: int) -> Side:
        side = None if self.loaded is None else self.loaded[direction]
        if side is None:
            raise PlanError("a block was run before a batch was loaded, or backwards where no transpose was planned")
        return side
