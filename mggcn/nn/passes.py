"""The kernel calls for one message forwards and one gradient backwards, each into a new tensor.

Shapes: N vertices, E edges, D columns; an operand of width 1 stands for all D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.edges import EdgeGradient, EdgeRows, Operand, Reduction
from mggcn.nn.graph import DeviceGraph
from mggcn.nn.messages import DERIVATIVES, Message, Side


def reduce_messages(
    graph: DeviceGraph, message: Message, lhs: Tensor, rhs: Tensor | None, *, keep_winners: bool
) -> tuple[Tensor, Tensor | None]:
    """Return z (N, D) and, for a maximum or minimum, the places of the winners, int32 (N, D), if requested."""
    widths = [x.shape[1] for x in (lhs, rhs) if x is not None]
    cols = max(widths) if all(widths) else 0
    z = lhs.new_empty((graph.num_vertices, cols))
    winners = None
    if keep_winners and message.reducer != "sum":
        winners = torch.empty(z.shape, dtype=torch.int32, device=z.device)
    if not cols:
        return z, winners
    backend = graph.backend(z.dtype, cols)
    edges = graph.by_destination
    product = _product(backend, edges, message, lhs, rhs)
    if product is not None:
        backend.spmm(*product, z, accumulate=False, epilogue=None)
    else:
        messages = Reduction(
            message.op, message.reducer, Operand(_rows(lhs), message.of("lhs")), _operand(message, "rhs", rhs)
        )
        backend.edges.reduce(edges, messages, z, winners)
    return z, winners


def gradient_of(
    graph: DeviceGraph,
    message: Message,
    side: Side,
    width: int,
    g: Tensor,
    winners: Tensor | None,
    lhs: Tensor | None,
    rhs: Tensor | None,
) -> Tensor:
    """Return the gradient by one operand, as wide as that; g (N, D) is the gradient by z.

    winners: as reduce_messages returned them; lhs and rhs: the operands that Message.read_for names.
    """
    of = message.of(side)
    out = g.new_empty((graph.num_edges if of == "edge" else graph.num_vertices, width))
    if not g.shape[1]:
        return out.zero_()
    derivative = DERIVATIVES[message.op, side]
    edges = graph.by_source if of == "source" else graph.by_destination
    if of == "source" and derivative.partial == "one" and message.reducer == "sum":
        # The columns of an operand of width 1 are summed first: the product is then as narrow.
        dense = (g if width == g.shape[1] else g.sum(1, keepdim=True)).contiguous()
        backend = graph.backend(g.dtype, width)
        backend.spmm(edges.matrix, dense, out, accumulate=False, epilogue=None)
        return out.neg_() if derivative.scale < 0 else out
    operands = {"lhs": _operand(message, "lhs", lhs), "rhs": _operand(message, "rhs", rhs)}
    a, b = (None if name is None else operands[name] for name in (derivative.a, derivative.b))
    by = EdgeGradient(of, derivative.partial, derivative.scale, a, b)
    graph.backend(g.dtype, width).edges.gradient(edges, by, _rows(g), winners, out)
    return out


def _product(
    backend: KernelBackend, edges: EdgeRows, message: Message, lhs: Tensor, rhs: Tensor | None
) -> tuple[Sparse, Tensor] | None:
    """Return the sparse product that computes a sum, if there is one: of copied sources, or of sources times edge
    weights.
    """
    if message.reducer != "sum":
        return None
    if message.op == "copy" and message.lhs_of == "source":
        return edges.matrix, lhs.contiguous()
    if message.op != "mul" or rhs is None or lhs.dtype == torch.bfloat16:  # weights of products are of the type of sums
        return None
    dense, weights = (lhs, rhs) if message.lhs_of == "source" else (rhs, lhs)
    if {message.lhs_of, message.rhs_of} != {"source", "edge"} or weights.shape[1] != 1:
        return None
    weights = weights.contiguous()
    if edges.edge_ids is not None:
        in_order = torch.empty_like(weights)
        backend.gather_rows(weights, edges.edge_ids, in_order)
        weights = in_order
    matrix = edges.matrix
    return Sparse(matrix.indptr, matrix.indices, weights.view(-1), matrix.schedule), dense.contiguous()


def _operand(message: Message, side: Side, table: Tensor | None) -> Operand | None:
    return None if table is None else Operand(_rows(table), message.of(side))


def _rows(table: Tensor) -> Tensor:
    """A table as kernels read it: columns side by side, rows apart."""
    rows, cols = table.shape
    whole = (cols == 1 or table.stride(1) == 1) and (rows == 1 or table.stride(0) >= cols)
    return table if whole else table.contiguous()
