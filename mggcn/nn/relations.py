"""Means of neighbours by relation, mixed by learnable coefficients, across ranks: a differentiable torch function.

V rows of this rank, D columns, R relations, B bases. For one relation after another, the rows that have such neighbours are
averaged, a block at a time, and added to each basis with its coefficient: a row is gathered once for each edge, and
nothing has R times V rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mggcn.aggregate.edge_op import Columns, EdgeOp, PartialSums, Target
from mggcn.aggregate.relations import BLOCK_ROWS, add_rows
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.sparse import RelationRows
from mggcn.errors import ConfigError, GraphError
from mggcn.nn.aggregate import GraphPart, check_rows
from mggcn.nn.once import once
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.rank_aggregation import RankAggregation
from mggcn.nn.sampled_block import SampledBlock


def aggregate_relations(x: Tensor, coefficients: Tensor, graph: GraphPart) -> Tensor:
    """Return means of in-neighbours by relation, mixed, (V, B, D): z[v, b] = sum over r of coefficients[r, b] mean_r(x)[v].

    mean_r(x)[v] is the mean of x[u] over the edges u -> v of relation r, by the weights of edges if there are any, and 0
    without such edges. With bases (B, D, E), `torch.einsum("vbd,bde->ve", z, bases)` is R-GCN's sum over relations,
    which the model "rgcn" adds to `x @ root` and a bias; `torch.eye(R)` as coefficients keeps relations apart.

    Collective, with copies of rows treated as in `aggregate`; works under all strategies but slice. `norm` and
    `self_loops` of `run` do not apply. Gradients are exact; those of the coefficients are this rank's part, as of every
    parameter: `PartitionedGraph.sum_gradients` sums them.

    Cost: rows of D columns are sent and read for each edge, backwards of B D, whatever R is. Beside the result a copy of x
    and a block of 16,384 rows, and one copy of z where its rows are not multiples of 64 bytes; backwards a copy of the
    gradient. From the first call on the edges are held by relation, too, in at most 40 bytes each in float32.

    Args:
        x: Rows (V, D) in the graph's type, float32 or float64.
        coefficients: Weights (R, B) in the type of x, equal on all ranks; R is `graph.num_relations`.
        graph: This rank's part, as `run` passes it, of a graph whose edges have types.

    Raises:
        ConfigError: The graph is shared in bf16.
        GraphError: The edges have no types, or the graph is a block of a batch, or x or the coefficients do not fit it.
        PlanError: The strategy is slice.
        CommError: As for `aggregate`.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1, 2], [2, 2, 0]]), edge_types=np.array([0, 1, 1]))
        >>> def mixed(part):
        ...     x = part.take(torch.tensor([[1.0], [2.0], [3.0]]))
        ...     return part.gather(mggcn.nn.aggregate_relations(x, torch.tensor([[1.0], [10.0]]), part))
        >>> mggcn.nn.run(mixed, graph, ranks=2)[0].flatten().tolist()
        [30.0, 0.0, 21.0]

    Source: Schlichtkrull et al. 2018, eq. 2 and 3, with the bases multiplied after the sum.
    """
    if isinstance(graph, SampledBlock):
        raise GraphError(
            "aggregate_relations expects a rank's part of a graph, and blocks of batches have no types of edges; train "
            "R-GCN on batches with mggcn.Trainer(graph, RGCN(...), batch=..., fanout=...), or take aggregate"
        )
    if graph.dtype == torch.bfloat16:
        raise ConfigError(
            "aggregate_relations adds relation after relation to its result, which bf16 would round each time; share the "
            "graph in fp32"
        )
    check_rows(x, graph)
    if not graph.num_relations:
        raise GraphError(
            "aggregate_relations expects a graph whose edges have types, and this one has none; give edge_types to "
            "mggcn.load or prepare, or take aggregate"
        )
    _check_coefficients(coefficients, x, graph)
    z: Tensor = _Relations.apply(x, coefficients, graph)  # type: ignore[no-untyped-call]
    return z


def _check_coefficients(coefficients: Tensor, x: Tensor, graph: PartitionedGraph) -> None:
    shape = tuple(coefficients.shape) if isinstance(coefficients, Tensor) else ()
    if len(shape) != 2 or shape[0] != graph.num_relations or shape[1] < 1:
        came = shape or type(coefficients).__name__
        raise GraphError(
            f"expected coefficients of shape ({graph.num_relations}, B) with B >= 1, a row for each relation; got {came}"
        )
    if coefficients.dtype != x.dtype or coefficients.device != x.device:
        raise GraphError(
            f"expected coefficients in {x.dtype} on {x.device}, as x; got {coefficients.dtype} on {coefficients.device}; "
            "convert them"
        )


class _Relations(torch.autograd.Function):
    """The mixed means, and their gradients from one pass over the transposed edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: Tensor, graph: PartitionedGraph) -> Tensor:
        ranks, (num_bases, cols) = graph.aggregation, (coefficients.shape[1], x.shape[1])
        op = RelationMeans(cols, num_bases)
        h = ranks.filled(x.shape[1], x)
        op = replace(op, room=_room(op, ranks, x, coefficients.detach()))
        z = ranks.run(op, h, num_bases * cols, (), backward=False, by_relation=True)
        ctx.graph, ctx.op = graph, replace(op, room=None)
        ctx.save_for_backward(x, coefficients)
        return z.contiguous().view(-1, num_bases, cols)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x, coefficients), ranks = ctx.saved_tensors, ctx.graph.aggregation
        with torch.no_grad():
            op = replace(ctx.op.adjoint, of_rows=ctx.needs_input_grad[0])
            op = replace(op, room=_room(op, ranks, x, coefficients))
            message = ranks.filled(op.num_bases * op.width, g.flatten(1))
            grad = ranks.run(op, message, op.width, (x.contiguous(),), backward=True, by_relation=True)
        of_x = once(grad.contiguous(), "aggregate_relations", g, x, coefficients) if op.of_rows else None
        return of_x, once(op.room.gradients, "aggregate_relations", g, x, coefficients), None


@dataclass(frozen=True, slots=True)
class MeansRoom:
    """The coefficients (R, B), their gradients, to which the backward pass adds, and work space of a `RelationMeans`.

    near (n, D), far (n, B D): room for a block of n rows. panel: columns that a sparse product may have.
    """

    coefficients: Tensor
    gradients: Tensor
    near: Tensor
    far: Tensor
    panel: int


def _room(op: RelationMeans, ranks: RankAggregation, x: Tensor, coefficients: Tensor) -> MeansRoom:
    rows = min(ranks.rows, BLOCK_ROWS)
    near, far = (ranks.padded(cols, x, rows) for cols in (op.width, op.num_bases * op.width))
    gradients = torch.zeros_like(coefficients, memory_format=torch.contiguous_format)
    return MeansRoom(coefficients.contiguous(), gradients, near, far, ranks.panel)


@dataclass(frozen=True, slots=True)
class RelationMeans(EdgeOp):
    """Computes out[v, b] = sum_r a_rb (A_r h)[v], from rows of D columns to rows of B D; backward: its gradient.

    A_r averages over neighbours of relation r, a_rb are the coefficients. The backward pass sends rows of the gradient g,
    and Z_r = A_r^T g, of B D columns, gives dh += sum_b a_rb Z_rb and da_rb += <h, Z_rb>; h is `local`. of_rows: whether
    to compute dh; otherwise the result stays zero.
    """

    width: int
    num_bases: int
    backward: bool = False
    of_rows: bool = True
    room: MeansRoom | None = field(default=None, compare=False, repr=False)

    name = "means by relation"
    columnwise = False
    # Partial results do add up, but are of another width than what copies exchange backwards.
    additive = False

    @property
    def adjoint(self) -> RelationMeans:
        return replace(self, backward=not self.backward)

    def columns(self, cols: int) -> Columns:
        mixed = self.num_bases * self.width
        return Columns(mixed, cols, mixed) if self.backward else Columns(self.width, cols, cols)

    def begin(self, backend: KernelBackend, target: Target) -> MixedMeans:
        assert self.room is not None  # ops that run have theirs
        return MixedMeans(self, self.room, backend, target)


class MixedMeans(PartialSums):
    """Adds up rows of mixed means, or of their gradient (`RelationMeans`); every tile adds its relations in their order,
    but those that share launches when their group is full. Mixing launches kernels for each relation of a group, too.
    """

    def __init__(self, op: RelationMeans, room: MeansRoom, backend: KernelBackend, target: Target) -> None:
        super().__init__(backend, target)
        self._op, self._room = op, room
        self._h = target.local[0] if op.backward else None
        target.out.zero_()

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        for part in matrix.relations:
            if self._h is None:
                self._forward(part, rows)
            else:
                self._backward(part, rows, self._h)

    def _forward(self, part: RelationRows, h: Tensor) -> None:
        count, room = part.rows.shape[0], self._room
        near, far = room.near[:count], room.far[:count]
        self._multiply(part.matrix, h, near)
        by_basis = far.view(count, self._op.num_bases, self._op.width)
        for relation, first, last in part.spans:
            of = room.coefficients[relation][:, None]
            torch.mul(near[first:last, None], of, out=by_basis[first:last])
        add_rows(self._backend, far, part, self._out)

    def _backward(self, part: RelationRows, g: Tensor, h: Tensor) -> None:
        count, room = part.rows.shape[0], self._room
        near, far = room.near[:count], room.far[:count]
        self._multiply(part.matrix, g, far)
        by_basis = far.view(count, self._op.num_bases, self._op.width)
        self._backend.gather_rows(h, part.rows, near)
        for relation, first, last in part.spans:
            some, mine = by_basis[first:last], near[first:last]
            room.gradients[relation] += torch.bmm(some, mine[:, :, None]).sum(0)[:, 0]
            if self._op.of_rows:
                mixed = room.coefficients[relation].expand(last - first, 1, -1)
                mine.copy_(torch.bmm(mixed, some)[:, 0])
        if self._op.of_rows:
            add_rows(self._backend, near, part, self._out)

    def _multiply(self, matrix: Sparse, rows: Tensor, out: Tensor) -> None:
        """Out = matrix @ rows, as many columns at a time as the kernels have work space for."""
        for first in range(0, out.shape[1], self._room.panel):
            columns = slice(first, first + self._room.panel)
            self._backend.spmm(matrix, rows[:, columns], out[:, columns], accumulate=False, epilogue=None)
