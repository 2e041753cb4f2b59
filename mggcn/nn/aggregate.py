"""The sum over in-neighbours across ranks as a differentiable torch function.

V rows of this rank, D width.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from mggcn.errors import GraphError
from mggcn.nn.once import once
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.sampled_block import SampledBlock

GraphPart: TypeAlias = PartitionedGraph | SampledBlock
"""A rank's part of a shared graph, or a block of a batch."""


def aggregate(x: Tensor, graph: GraphPart) -> Tensor:
    """Return this rank's rows of z = S_r A^T S_c x, (V, D): z[v] sums x over the edges u -> v.

    `norm` of `run` says what S_r and S_c are. Gradients are exactly those of the sum of all ranks' losses; on copies of a
    row they are parts of a sum over all copies.

    Collective: all ranks call it in the same order with the same D, forwards and, if x needs a gradient, backwards. So a
    loss must depend on every aggregation on every rank, also where there are no labelled rows (a sum over none will do).

    Cost: the products and messages of the strategy, as `mggcn plan` prices them; two (V, D) tensors, or one where rows of x
    are multiples of 64 bytes and not scaled; memory for messages once for each width.

    Args:
        x: Rows (V, D) in the graph's type on its device. Rows that are copies of another rank's must equal those; then the
            results do, too.
        graph: This rank's part, as `run` passes it, or a block of `batches`: x has its S sources, z its T targets.

    Raises:
        GraphError: x does not fit the graph.
        CommError: Another rank failed, or called something else.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]))
        >>> def neighbours(part):
        ...     return part.gather(mggcn.nn.aggregate(part.take(torch.arange(3.0)[:, None]), part))
        >>> mggcn.nn.run(neighbours, graph, ranks=2)[0].flatten().tolist()
        [2.0, 0.0, 1.0]
    """
    check_rows(x, graph)
    z: Tensor = _Aggregate.apply(x, graph)  # type: ignore[no-untyped-call]
    return z


def check_rows(x: Tensor, graph: GraphPart, rows: int | None = None) -> None:
    """Raise GraphError unless x has a row for each of the graph's, or so many, in its type and on its device."""
    rows = graph.num_rows if rows is None else rows
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != rows or x.shape[1] < 1:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        who = "a block" if isinstance(graph, SampledBlock) else f"rank {graph.rank}"
        raise GraphError(f"{who} aggregates ({rows}, D) with D >= 1, its own rows; got {came}")
    if x.dtype != graph.dtype or x.device != graph.device:
        raise GraphError(
            f"the graph is shared in {graph.dtype} on {graph.device}, got rows in {x.dtype} on {x.device}; convert them "
            "or set its precision='fp64', 'fp32' or 'bf16'"
        )


class _Aggregate(torch.autograd.Function):
    """The product and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: GraphPart) -> Tensor:
        ctx.graph = graph
        return graph.aggregation.apply(x, adjoint=False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            grad = ctx.graph.aggregation.apply(g, adjoint=True)
        return once(grad, "aggregate", g), None
