"""Dropout by vertex and batch norm over ranks: layers whose results do not depend on the number of ranks.

V rows of this rank, D columns, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mggcn.backend.base import Dropout, Epilogue
from mggcn.errors import ConfigError, GraphError
from mggcn.nn.aggregate import GraphPart, check_rows
from mggcn.nn.partitioned import PartitionedGraph


def dropout(x: Tensor, graph: GraphPart, p: float = 0.5, training: bool = True) -> Tensor:
    """Return x (V, D) with elements dropped with probability p and the others divided by the probability of keeping them.

    The mask follows from seed and epoch (`PartitionedGraph.start_epoch`), the number of the call in the epoch, the vertex
    and the column, as in planned models: it is equal for every number of ranks, order and device, and on copies of a row.
    All ranks make the same calls in the same order; nothing is sent. Probabilities are multiples of 1/65536.

    Cost: a pass over x, and one backwards; no mask is stored.

    Args:
        x: Rows (V, D) in the graph's type.
        graph: This rank's part, as `run` passes it, or a block of `batches`, whose epochs are steps.
        p: Probability of dropping, in [0, 1).
        training: False returns x.

    Raises:
        ConfigError: p does not lie in [0, 1).
        GraphError: x does not fit the graph.

    Source: Philox4x32-10 (Salmon et al. 2011), as cpu/philox.h.
    """
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"p must lie in [0, 1), got {p}")
    check_rows(x, graph)
    if not training or not p:
        return x
    mask = Dropout(p, graph.clock.clone(), graph.next_site())
    dropped: Tensor = _Drop.apply(x, graph, mask)  # type: ignore[no-untyped-call]
    return dropped


class _Drop(torch.autograd.Function):
    """Multiplies rows by the mask; the gradient does the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: GraphPart, mask: Dropout) -> Tensor:
        ctx.graph, ctx.mask = graph, mask
        ranks = graph.aggregation
        ranks.backend.activate()
        rows = ranks.filled(x.shape[1], x)
        ranks.backend.finish(rows, rows, Epilogue(dropout=mask, row_ids=graph.ids))
        return rows.contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _Drop.apply(g, ctx.graph, ctx.mask), None, None  # type: ignore[no-untyped-call]


class BatchNorm(torch.nn.Module):
    """Batch norm of all vertices, whatever the number of ranks: torch.nn.BatchNorm1d of the whole graph, and its state.

    Every vertex counts once: copies of other ranks' rows are normalised, not counted. A call in training mode is
    collective, forwards and backwards; ranks combine counts, means and squared deviations by Chan's rule in one message of
    2 P D numbers each way. Running statistics are equal on all ranks; the gradients of weight and bias are summed by
    `PartitionedGraph.sum_gradients`, as all are.

    Args:
        width: Columns, D.
        eps: Added to the variance.
        momentum: Share of the new statistics in the running ones; None makes these the mean of all calls' statistics.
        affine: Whether there are a weight and a bias.

    Raises:
        GraphError: On a call, rows that do not fit; in training mode also a block of a batch, or fewer than two vertices.

    Source: Ioffe and Szegedy 2015; Chan, Golub and LeVeque 1979.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.eps: float = eps
        self.momentum: float | None = momentum
        self.weight: torch.nn.Parameter | None = torch.nn.Parameter(torch.ones(width)) if affine else None
        self.bias: torch.nn.Parameter | None = torch.nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor, graph: GraphPart) -> Tensor:
        """Return this rank's rows (V, D), normalised. Collective in training mode, for which a block of `batches` has no
        ranks: there torch.nn.BatchNorm1d normalises by the rows of the block.
        """
        check_rows(x, graph)
        if x.shape[1] != self.running_mean.shape[0]:
            raise GraphError(f"BatchNorm({self.running_mean.shape[0]}) got rows of {x.shape[1]} columns")
        if not self.training:
            mean, var = self.running_mean, self.running_var
        elif isinstance(graph, PartitionedGraph):
            mean, var = self._batch(x, graph)
        else:
            raise GraphError(
                "mggcn.nn.BatchNorm trains on all vertices of a graph, and a block of a batch has some of them; take "
                f"torch.nn.BatchNorm1d({x.shape[1]}), which counts the rows that it is given"
            )
        scale = torch.rsqrt(var + self.eps)
        z = (x.to(scale.dtype) - mean) * (scale if self.weight is None else scale * self.weight)
        return (z if self.bias is None else z + self.bias).to(x.dtype)

    def _batch(self, x: Tensor, graph: PartitionedGraph) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of all ranks' own rows; running statistics follow them."""
        counts = graph.owned_counts
        total = int(counts.sum())
        if total < 2:
            raise GraphError(f"batch norm needs two vertices or more to train, the graph has {total}")
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = rows[graph.owned] if graph.has_copies else rows
        here = rows.sum(0) / max(rows.shape[0], 1)
        table = _on_all_ranks(torch.stack([here, (rows - here).square().sum(0)]), graph)
        share = (counts / total).to(rows.dtype)[:, None]
        mean = (share * table[:, 0]).sum(0)
        var = table[:, 1].sum(0) / total + (share * (table[:, 0] - mean).square()).sum(0)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            new = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), new)
            self.running_var.lerp_((var * (total / (total - 1))).to(self.running_var.dtype), new)
        return mean, var


def _on_all_ranks(x: Tensor, graph: PartitionedGraph) -> Tensor:
    """The tensors of all ranks, (P, ...), on every rank. Collective, and backwards too."""
    table: Tensor = _Gather.apply(x, graph)  # type: ignore[no-untyped-call]
    return table


class _Gather(torch.autograd.Function):
    """Every rank reads every rank's tensor, so a tensor's gradient is the sum of all ranks' gradients for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: PartitionedGraph) -> Tensor:
        ctx.graph = graph
        table = x.new_zeros((graph.num_ranks, *x.shape))
        table[graph.rank] = x
        return graph.sum_over_ranks(table)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.graph.sum_over_ranks(g.clone(memory_format=torch.contiguous_format))[ctx.graph.rank], None
