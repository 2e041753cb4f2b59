"""DistGNN's aggregation primitive as a differentiable torch function (section 4.1, Algorithm 1, Table 1).

Shapes: N vertices, E edges, D columns.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mggcn.backend.edges import OFS, REDUCERS, Of, Reducer
from mggcn.errors import ConfigError, GraphError
from mggcn.nn.graph import DeviceGraph
from mggcn.nn.messages import SIDES, Message, Side
from mggcn.nn.once import once
from mggcn.nn.passes import gradient_of, reduce_messages

Op = Literal["add", "sub", "mul", "div", "copylhs", "copyrhs"]
OPS: tuple[Op, ...] = get_args(Op)
READS: dict[Op, tuple[Side, ...]] = {"copylhs": ("lhs",), "copyrhs": ("rhs",)}
"""Operands of an op that does not read both."""


class _Given(NamedTuple):
    """An operand as the caller gave it."""

    name: Side
    tensor: Tensor
    of: Of


def reduce_edges(
    graph: DeviceGraph,
    op: Op,
    reducer: Reducer,
    lhs: Tensor | None = None,
    rhs: Tensor | None = None,
    *,
    lhs_of: Of = "source",
    rhs_of: Of = "edge",
) -> Tensor:
    """Return z (N, D) with z[v] = reduction, over the edges u -> v, of lhs op rhs; DGL calls it gspmm.

    A vertex without in-edges gets 0. Among equal maxima or minima the first edge takes the gradient, edges being ordered
    by destination, then source, then as given. A NaN message makes its column of z NaN, also under max and min, where
    the first NaN takes the gradient; edges that are not taken get exactly 0, whatever their values.

    Cost: a pass over the edges, and one for each operand backwards. No message is stored; max and min keep 4 bytes for each
    element of z. A sum of copied sources, or of sources times edge weights of width 1, is a sparse product.
    No atomics: the same bits in every run and for any number of threads.

    Args:
        graph: The edges.
        op: "add", "sub", "mul", "div", "copylhs" or "copyrhs"; an operand that a copy does not read may be left out.
        reducer: "sum", "max" or "min".
        lhs: Left operand, with rows as `lhs_of` says. Width 1, or a vector, stands for all D columns; vectors alone give a
            vector.
        rhs: Right operand, with rows as `rhs_of` says.
        lhs_of: Whose rows lhs has: of the "source" or "destination" of an edge, (N, D), or of the "edge", (E, D) in the
            order of `graph.edges()`.
        rhs_of: The same for rhs.

    Raises:
        ConfigError: The op, the reducer or a target is unknown.
        GraphError: Operands do not fit the graph or each other.
        BackendError: The device has no kernels for the type, or a second derivative is asked for.

    Examples:
        >>> graph = mggcn.nn.DeviceGraph.from_edges(torch.tensor([[0, 2, 1], [1, 1, 0]]))
        >>> mggcn.nn.reduce_edges(graph, "copylhs", "max", torch.tensor([5.0, 6.0, 7.0])).tolist()
        [6.0, 7.0, 0.0]
    """
    _check_known("op", op, OPS)
    _check_known("reducer", reducer, REDUCERS)
    operands = {"lhs": (lhs, lhs_of), "rhs": (rhs, rhs_of)}
    given = [_given(graph, op, side, *operands[side]) for side in READS.get(op, SIDES)]
    _check_together(given)
    tables = [x.tensor if x.tensor.dim() == 2 else x.tensor.unsqueeze(1) for x in given]
    message = Message("copy" if op in READS else op, reducer, *(x.of for x in given))  # type: ignore[arg-type]
    z: Tensor = _ReduceEdges.apply(graph, message, *tables, *[None] * (2 - len(tables)))  # type: ignore[no-untyped-call]
    return z.squeeze(1) if all(x.tensor.dim() == 1 for x in given) else z


class _ReduceEdges(torch.autograd.Function):
    """The primitive and its first derivatives. Operands are tables; rhs is None for a copy."""

    @staticmethod
    def forward(ctx: Any, graph: DeviceGraph, message: Message, lhs: Tensor, rhs: Tensor | None) -> Tensor:
        required = _wanted(ctx)
        z, winners = reduce_messages(graph, message, lhs, rhs, keep_winners=bool(required))
        read = message.read_for(required)
        ctx.save_for_backward(lhs if "lhs" in read else None, rhs if "rhs" in read else None, winners)
        ctx.graph, ctx.message = graph, message
        ctx.widths = {"lhs": lhs.shape[1], "rhs": 0 if rhs is None else rhs.shape[1]}
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        lhs, rhs, winners = ctx.saved_tensors
        grads: dict[str, Tensor] = {}
        for side in _wanted(ctx):
            with torch.no_grad():
                grad = gradient_of(ctx.graph, ctx.message, side, ctx.widths[side], g, winners, lhs, rhs)
            grads[side] = once(grad, "reduce_edges", g, lhs, rhs)
        return None, None, grads.get("lhs"), grads.get("rhs")


def _wanted(ctx: Any) -> list[Side]:
    """Return the operands that need a gradient."""
    return [side for side, needed in zip(SIDES, ctx.needs_input_grad[2:], strict=True) if needed]


def _given(graph: DeviceGraph, op: Op, name: Side, tensor: Tensor | None, of: Of) -> _Given:
    """An operand that fits the graph."""
    _check_known(f"{name}_of", of, OFS)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise GraphError(f"{op} reads {name}, which must be a dense tensor, got {kind}")
    rows = graph.num_edges if of == "edge" else graph.num_vertices
    if tensor.dim() not in (1, 2) or tensor.shape[0] != rows:
        raise GraphError(
            f"{name} is of the {of}: expected ({rows},) or ({rows}, D), got {tuple(tensor.shape)}; "
            f'{name}_of says whether an operand is of the "source", "destination" or "edge"'
        )
    if tensor.device != graph.device:
        raise GraphError(f"{name} is on {tensor.device}, the graph on {graph.device}; bring both to one device")
    return _Given(name, tensor, of)


def _check_together(given: list[_Given]) -> None:
    types = {x.tensor.dtype for x in given}
    if len(types) > 1:
        raise GraphError(f"lhs is {given[0].tensor.dtype}, rhs {given[1].tensor.dtype}; convert one of them")
    widths = {x.tensor.shape[1] for x in given if x.tensor.dim() == 2} - {1}
    if len(widths) > 1:
        raise GraphError(
            f"lhs has {given[0].tensor.shape[1]} columns, rhs {given[1].tensor.shape[1]}; expected equal widths, or 1"
        )


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")
