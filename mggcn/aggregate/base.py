"""The contract of an aggregation strategy: how neighbours' rows reach a rank, forwards and backwards.

V rows of this rank, D width. A strategy moves rows; an EdgeOp computes with them. Each strategy is one
module of this room: a Strategy, which `assemble` names, plans a rank; its AggregationPlan builds the rank's Aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.steps import Step
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import Block, HaloRows
from mggcn.config import RunConfig
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.order import Owners
from mggcn.partition.rows.shard import ShardOptions

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


def padded_rows(block: Tensor) -> Tensor:
    """Return the rows together with their padding, so that they can be sent as one contiguous range."""
    return block.as_strided((block.shape[0], block.stride(0)), block.stride())


def aggregate_name(layer: int, backward: bool) -> str:
    """Return the name of a layer's aggregation, which is the prefix of its buffers' names."""
    return f"{'aggregate-grad' if backward else 'aggregate'}{layer}"


class Matrix(NamedTuple):
    """Sizes of one sparse matrix of a rank; a tuple, because a plan holds P of them for each of P ranks."""

    rows: int
    nnz: int


class AggregationPlan(Protocol):
    """The buffers and messages of a strategy on one rank, known before it runs; needs no torch.

    name: the aggregation's name, which is the prefix of its buffers' names; cols: width of the result; dtype: type of
    the rows that are sent; op: the edge operation.
    """

    @property
    def exact(self) -> bool:
        """Whether it gives the gradient of the whole graph in every epoch."""
        ...

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The rank's sparse matrices for A^T."""
        ...

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        """The rank's sparse matrices for A; empty if those for A^T serve both directions."""
        ...

    @property
    def index_bytes(self) -> int:
        """Bytes of the lists of rows that it sends and receives."""
        ...

    @property
    def by_columns(self) -> bool:
        """Whether some columns at a time, from multiples of 64 bytes on, have the bits of all at once, for a columnwise op:
        messages and products are then as for these columns alone.
        """
        ...

    @property
    def period(self) -> int:
        """Number of epochs after which the steps repeat: 1 unless different epochs send different rows."""
        ...

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        """Return the scratch of one aggregation, in either direction. Raises: PlanError if it cannot run `op`."""
        ...

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        """Return the buffers that an aggregation keeps from epoch to epoch, outside the arena."""
        ...

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        """Return the steps of one aggregation, in order, in the epochs e with e mod period = phase."""
        ...

    def build(self, context: BuildContext) -> RankAggregations:
        """Build the rank's aggregations. Collective; needs torch. Raises: GraphError, BackendError, PlanError."""
        ...


class BatchEdges(Protocol):
    """A block whose edges, all of them on this rank, change from step to step."""

    @property
    def back(self) -> bool:
        """Whether the transpose is read."""
        ...

    @property
    def loaded(self) -> tuple[Sparse, Sparse | None] | None:
        """The edges of the step at hand: a row for each target, and the transpose with a row for each source."""
        ...

    def load(self, matrix: Sparse, matrix_t: Sparse | None) -> None:
        """Take the edges of a step."""
        ...


class Aggregation(Protocol):
    """Aggregates over neighbours across ranks. All ranks make the same calls in the same order, with equal widths and
    ops.

    The defaults of the other methods suit a strategy over the whole graph that keeps nothing from epoch to epoch.
    """

    @property
    def exact(self) -> bool:
        """Whether forward is the op over the edges of the whole graph, and backward its adjoint, in every epoch."""
        ...

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        """Compute target.out (V, D) = epilogue(op over the in-edges of this rank's rows); for the sum, epilogue(A^T h).
        Collective.

        h: (V, op.columns(D).operand). buffers: as the plan declares them for this op and this width or a larger one.
        Out may be columns of any wider tensor that start at a multiple of 64 bytes.
        """
        ...

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        """Compute target.out (V, D) = epilogue(op over the out-edges of this rank's rows); for the sum, epilogue(A g).
        Collective.

        op: the adjoint of the forward op. g may be overwritten. Where several ranks hold copies of a row, the
        activations of all copies are equal, and their gradients are parts of a sum.
        """
        ...

    @property
    def edges(self) -> BatchEdges | None:
        """What takes the edges of a batch that are all on this rank; None: there are no such ones."""
        return None

    def take(self, rows: HaloRows | None, *, whole: bool) -> None:
        """Take the rows of other ranks that a batch has in the block; None: the feed gave none. whole: whether the batch is
        a step, and no part of one. Raises: PlanError if it cannot.
        """
        return

    def found(self, epoch: int) -> tuple[int, int] | None:
        """Return how many rows an epoch has found in a cache, and how many it looked up, and forget them; None without a
        cache.
        """
        return None

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: called on every rank before the epoch's first op. Epochs count from 0; epoch 0 resets all
        state.
        """
        return

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that survive an epoch, on the host, once every message has arrived. Collective.

        They are checkpointed per rank.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `state` returned."""
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """The inputs from which a rank's aggregations are built.

    states: the buffers that the plan's `state` declares, by op and name. local_index: the partition's assignment for this
    rank, if the caller has it. required: bool (N,), the rows of A^T (columns of A) that the aggregation computes; the
    others are zero; None: all.
    """

    graph: Graph
    partition: Partition
    rank: int
    options: ShardOptions
    backend: KernelBackend
    comm: Communicator
    states: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    local_index: Owners | None = None
    required: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class RankAggregations:
    """A rank's aggregations over one block: of training epochs, and the exact one of evaluation, often the same object."""

    training: Aggregation
    exact: Aggregation


@dataclass(frozen=True, slots=True)
class BlockAggregations:
    """A rank's aggregations by block: of training epochs, and the exact ones of evaluation and set-up."""

    training: Mapping[Block, Aggregation] = field(default_factory=dict)
    exact: Mapping[Block, Aggregation] = field(default_factory=dict)


class Strategy(Protocol):
    """A strategy: how neighbours' rows reach a rank. Needs no torch."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Literal["rows", "cut"]:
        """The kind of partition that it works on."""
        ...

    def plan(
        self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool
    ) -> AggregationPlan:
        """Plan one rank; training: False asks for the exact plan of evaluation and set-up."""
        ...
