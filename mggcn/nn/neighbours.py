"""Maximum of neighbours and attention over them across ranks, as differentiable torch functions.

V rows of this rank, D columns, H heads of C columns, D = H C. The edge operations are those of mggcn/aggregate; the
steps around them are plain torch. No pass stores a number for each edge.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mggcn.aggregate.attention import Attention, AttentionDestinations, AttentionSources, AttentionSpec, Bound
from mggcn.aggregate.maximum import Maximum
from mggcn.config.model import MAX_HEADS
from mggcn.errors import ConfigError, GraphError
from mggcn.nn.aggregate import GraphPart, aggregate, check_rows
from mggcn.nn.once import once

Reducer = Literal["sum", "max", "min"]
REDUCERS: tuple[Reducer, ...] = get_args(Reducer)


def reduce(x: Tensor, graph: GraphPart, reducer: Reducer = "max") -> Tensor:
    """Return the sum, maximum or minimum of x (V, D) over the in-neighbours of each row, column by column.

    A row without in-edges gets 0. Weights of edges and `norm` of `run` are those of the sum alone, which is
    `aggregate`. Among equal values the vertex with the lowest number takes the gradient, for every number of ranks.
    Collective, with copies of rows treated as in `aggregate`; works under all strategies but slice. Cost: as
    `aggregate` with one column more forwards and twice the columns backwards; two more tensors (V, D).

    Args:
        x: Rows (V, D) in the graph's type, float32 or float64.
        graph: This rank's part, as `run` passes it, or a block of `batches`.
        reducer: "sum", "max" or "min".

    Raises:
        ConfigError: The reducer is unknown, or the graph is shared in bf16.
        GraphError: x does not fit the graph.
        PlanError: The strategy is slice.
        CommError: As for `aggregate`.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1, 2], [2, 2, 0]]))
        >>> def largest(part):
        ...     return part.gather(mggcn.nn.reduce(part.take(torch.arange(3.0)[:, None]), part, "max"))
        >>> mggcn.nn.run(largest, graph, ranks=2)[0].flatten().tolist()
        [2.0, 0.0, 1.0]
    """
    if reducer not in REDUCERS:
        raise ConfigError(f"reducer must be one of {', '.join(REDUCERS)}, got {reducer!r}")
    if reducer == "sum":
        return aggregate(x, graph)
    _check_type("reduce", graph)
    check_rows(x, graph)
    z: Tensor = _Maximum.apply(x if reducer == "max" else -x, graph)  # type: ignore[no-untyped-call]
    return z if reducer == "max" else -z


class _Maximum(torch.autograd.Function):
    """The maximum and its gradient, which goes to the winners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: GraphPart) -> Tensor:
        cols, ranks = x.shape[1], graph.aggregation
        h, winners = ranks.filled(cols + 1, x), ranks.padded(cols, x)
        _write_numbers(h[:, cols:], graph.ids)
        z = ranks.run(Maximum(), h, cols, (graph.ids, winners), backward=False)
        ctx.graph = graph
        ctx.save_for_backward(winners)
        return z.contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (winners,), graph, cols = ctx.saved_tensors, ctx.graph, g.shape[1]
        with torch.no_grad():
            message = graph.aggregation.filled(2 * cols, g)
            message[:, cols:].copy_(winners)
            grad = graph.aggregation.run(Maximum().adjoint, message, cols, (graph.ids,), backward=True).contiguous()
        return once(grad, "reduce", g), None


def attend(x: Tensor, source: Tensor, destination: Tensor, graph: GraphPart, *, dropout: float = 0.0) -> Tensor:
    """Return GAT's attention: z[v] sums weights times x[u] over the edges u -> v, (V, D).

    The weights are the softmax over these edges of LeakyReLU(source[u] + destination[v]), of slope 0.2, by head: the H
    columns of the scores stand for H equal parts of the columns of x. Weights of edges are not read; edges that repeat in
    a PyG or DGL graph count each, and dropout takes them together; self-loops are those of `run`. A row without in-edges
    gets 0. Collective as `aggregate`, and on copies of a row as there; all strategies, of which slice deals out heads.

    Cost: three passes over the edges with rows of D + H to D + 4 H columns, and their messages.

    Args:
        x: Rows (V, D) in the graph's type, float32 or float64.
        source: Scores (V, H) of the rows as sources, such as `(x.view(V, H, C) * a).sum(2)`.
        destination: Scores (V, H) of the rows as destinations; (T, H) on a block.
        graph: This rank's part, as `run` passes it, or a block of `batches`.
        dropout: Probability of dropping a weight, by edge and head: the same for every number of ranks, another for each
            epoch of `PartitionedGraph.start_epoch` and each call in it.

    Raises:
        ConfigError: The graph is shared in bf16, or dropout does not lie in [0, 1).
        GraphError: Tensors do not fit the graph or each other; edges repeat, and their weights were added up.
        CommError: As of `aggregate`.

    Source: Velickovic et al. 2018, eq. 1 to 4.
    """
    _check_type("attend", graph)
    check_rows(x, graph)
    heads = _heads(source, x, graph.num_rows, "source")
    if _heads(destination, x, graph.aggregation.rows, "destination") != heads:
        raise GraphError(
            f"source has {heads} heads, but destination has {destination.shape[1]}; give both the same number"
        )
    spec = _spec(graph, heads, x.shape[1], False, dropout)
    z: Tensor = _Attend.apply(torch.cat([x, source], 1), destination, None, spec, graph)  # type: ignore[no-untyped-call]
    return z


def attend_dynamic(
    source: Tensor, destination: Tensor, weight: Tensor, graph: GraphPart, *, dropout: float = 0.0
) -> Tensor:
    """Return GATv2's attention, (V, D): `attend` of the rows `source`, scored by a . LeakyReLU(source + destination).

    Cost: as `attend`, with rows of D to 2 D + 3 H columns.

    Args:
        source: Rows (V, D) in the graph's type, float32 or float64.
        destination: Rows (V, D); (T, D) on a block.
        weight: a (H, C), of which head h reads its columns: D = H C.
        graph: This rank's part, as `run` passes it, or a block of `batches`.
        dropout: As for `attend`.

    Raises:
        ConfigError: As of `attend`.
        GraphError: As of `attend`.
        CommError: As of `aggregate`.

    Source: Brody et al. 2022, eq. 7.
    """
    _check_type("attend_dynamic", graph)
    check_rows(source, graph)
    check_rows(destination, graph, graph.aggregation.rows)
    if weight.dim() != 2 or weight.numel() != source.shape[1] or destination.shape[1] != source.shape[1]:
        raise GraphError(
            f"expected source and destination of shape (V, H * C) and weight of shape (H, C), got {tuple(source.shape)}, "
            f"{tuple(destination.shape)} and {tuple(weight.shape)}"
        )
    spec = _spec(graph, weight.shape[0], source.shape[1], True, dropout)
    z: Tensor = _Attend.apply(source, destination, weight, spec, graph)  # type: ignore[no-untyped-call]
    return z


class _Attend(torch.autograd.Function):
    """Attention over all edges, differentiable.

    moved: the rows that are sent to other ranks, [x | s] in GAT and x in GATv2. own: the destinations' t or y. a: GATv2's
    weight (H, C), None in GAT.
    """

    @staticmethod
    def forward(
        ctx: Any, moved: Tensor, own: Tensor, a: Tensor | None, spec: AttentionSpec, graph: GraphPart
    ) -> Tensor:
        ranks = graph.aggregation
        bound = Bound(None if a is None else a.detach().contiguous(), graph.clock.clone())
        spec = dataclasses.replace(spec, bound=bound)
        travelled = ranks.filled(spec.forwards, moved)
        if spec.dropout:
            _write_numbers(travelled[:, -1:], graph.ids)
        kept, state = ranks.filled(spec.scored, own), ranks.padded(2 * spec.heads, own)
        z = ranks.run(Attention(spec), travelled, spec.width, (kept, graph.ids, state), backward=False)
        ctx.spec, ctx.graph = spec, graph
        ctx.save_for_backward(travelled, kept, state, z)
        return z.contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            moved, own, a = _attend_gradients(ctx.graph, ctx.spec, g, *ctx.saved_tensors)
        grads = (None if grad is None else once(grad, "attend", g) for grad in (moved, own, a))
        return *grads, None, None


def _attend_gradients(
    graph: GraphPart, spec: AttentionSpec, g: Tensor, travelled: Tensor, own: Tensor, state: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the rows that were sent, of the destinations' rows, and of a, in one pass to the sources
    and one to the destinations.
    """
    ranks, heads, width = graph.aggregation, spec.heads, spec.width
    message = ranks.filled(spec.backwards, g)
    ends = [width, width + heads, width + heads + spec.scored]
    ranks.backend.neighbours.head_dots(message[:, :width], z, message[:, ends[0] : ends[1]])
    message[:, ends[1] : ends[2]].copy_(own)
    message[:, ends[2] : ends[2] + heads].copy_(state[:, :heads])
    torch.reciprocal(state[:, heads:], out=message[:, ends[2] + heads : ends[2] + 2 * heads])
    if spec.dropout:
        _write_numbers(message[:, -1:], graph.ids)
    moved = ranks.run(AttentionSources(spec), message, spec.travels, (travelled, graph.ids), backward=True)
    # Where rows have copies, the pass to the sources leaves complete gradients in the message.
    op = AttentionDestinations(spec)
    beside = (ranks.padded(width, g),) if spec.dynamic else ()
    grad = ranks.run(op, travelled, spec.scored, (message, graph.ids, *beside), backward=False)
    a = beside[0].sum(0).view(heads, width // heads) if beside else None
    return moved.contiguous(), grad.contiguous(), a


def _write_numbers(column: Tensor, ids: Tensor) -> None:
    """Column (V, 1) = the vertices' numbers, as integers in the bits of its type."""
    column.view(torch.int64 if column.itemsize == 8 else torch.int32).copy_(ids[: column.shape[0], None])


def _spec(graph: GraphPart, heads: int, width: int, dynamic: bool, dropout: float) -> AttentionSpec:
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")
    if not 1 <= heads <= MAX_HEADS or width % heads:
        raise GraphError(f"{width} columns must be equal parts for 1 .. {MAX_HEADS} heads, got {heads} heads")
    counted = graph.counts_edges
    return AttentionSpec(heads, width, dynamic, dropout, graph.next_site() if dropout else 0, counted=counted)


def _heads(scores: Tensor, x: Tensor, rows: int, name: str) -> int:
    if scores.dim() != 2 or scores.shape[0] != rows or scores.dtype != x.dtype:
        raise GraphError(f"{name} must be ({rows}, H) in {x.dtype}, as x; got {tuple(scores.shape)} in {scores.dtype}")
    return scores.shape[1]


def _check_type(name: str, graph: GraphPart) -> None:
    if graph.dtype == torch.bfloat16:
        raise ConfigError(f"{name} stores vertex numbers beside rows, which bf16 cannot hold; share the graph in fp32")
