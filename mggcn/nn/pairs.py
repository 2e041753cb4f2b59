"""Pairs of vertices as differentiable torch functions: embeddings of all ranks, and scores of pairs of them.

N vertices, V rows of this rank, M pairs, D columns. No pass stores a number for each pair and column but where a network
reads them, and no float is added by two threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.utils import skip_init

from mggcn.backend.base import KernelBackend
from mggcn.model.kinds.pairs import pair_dot, pair_dot_grad, pair_product, pair_product_grad
from mggcn.model.runtime import PairRows
from mggcn.nn.once import once
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.rank_aggregation import padded_rows

ROWS = 2048
"""Pairs whose rows are read at a time, which stay in the cache."""


class PairModule(Module):
    """A user's module, and the network that scores pairs of its embeddings, `columns` wide, of the product of both.

    hidden: widths of the network's hidden layers. seed: of its first weights, Glorot-uniform as those of planned models.
    """

    def __init__(self, module: Module, columns: int, hidden: Sequence[int], dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.module: Module = module
        widths = [columns, *hidden, 1]
        pairs = itertools.pairwise(widths)
        self.decoder: ModuleList = ModuleList(skip_init(Linear, d, e, dtype=dtype) for d, e in pairs)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.decoder:
            weight, bias = layer.parameters()
            bound = math.sqrt(6 / sum(weight.shape))
            drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
            weight.data.copy_(drawn.mul_(2 * bound).sub_(bound))
            bias.data.zero_()


def users_module(module: Module) -> Module:
    """Return the user's own module of one that is trained: without the network that scores pairs."""
    return module.module if isinstance(module, PairModule) else module


def decoder_of(module: Module) -> list[tuple[Tensor, Tensor]]:
    """Return the layers that score pairs, weight (D, E) and bias (E,) of each; [] for dot products."""
    if not isinstance(module, PairModule):
        return []
    both = (tuple(layer.parameters()) for layer in module.decoder)
    return [(weight.detach().T, bias.detach()) for weight, bias in both]


def pair_scores(module: Module, x: Tensor, pairs: PairRows, backend: KernelBackend) -> Tensor:
    """Return the scores (M,) of pairs of the rows of x (N, D), logits of a link.

    Cost: for dot products two rows a pair in either direction; with a network beside that three tensors (M, D), one for
    each direction and one for the rows at both ends.
    """
    if not isinstance(module, PairModule):
        scores: Tensor = _Dot.apply(x, pairs, backend)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return scores[:, 0]
    h: Tensor = _Product.apply(x, pairs, backend)  # type: ignore[no-untyped-call]  # torch's apply has no types
    for number, layer in enumerate(module.decoder):
        h = layer(torch.relu(h) if number else h)
    return h[:, 0]


def every_row(x: Tensor, part: PartitionedGraph) -> Tensor:
    """Return the rows (N, D) of all vertices, by id, from this rank's x (V, D). Collective, forwards and backwards.

    Gradients are those of the sum of all ranks' losses; copies of rows get none. Cost: N rows on every rank, and as many
    bytes sent, in either direction.
    """
    rows: Tensor = _EveryRow.apply(x, part)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return rows


class _EveryRow(torch.autograd.Function):
    """Rows of all ranks; the gradient is summed over ranks, and each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: PartitionedGraph) -> Tensor:
        ctx.part = part
        every = padded_rows(part.num_vertices, x.shape[1], x).zero_()
        every[part.ids[part.owned]] = x[part.owned]
        part.sum_over_ranks(_whole(every))
        return every

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        part = ctx.part
        with torch.no_grad():
            every = padded_rows(part.num_vertices, g.shape[1], g)
            every.copy_(g)
            part.sum_over_ranks(_whole(every))
            grad = g.new_zeros(part.num_rows, g.shape[1])
            grad[part.owned] = every[part.ids[part.owned]]
        return once(grad, "every_row", g), None


class _Dot(torch.autograd.Function):
    """Dot products of pairs (M, 1); their gradient is a sparse product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: PairRows, backend: KernelBackend) -> Tensor:
        ctx.pairs, ctx.backend = pairs, backend
        ctx.save_for_backward(x)
        out = x.new_empty(pairs.heads.shape[0], 1)
        heads, tails = (padded_rows(ROWS, x.shape[1], x) for _ in range(2))
        backend.activate()
        pair_dot(backend, x, pairs, heads, tails, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            grad = padded_rows(x.shape[0], x.shape[1], x)
            ctx.backend.activate()
            pair_dot_grad(ctx.backend, g, x, ctx.pairs, grad)
        return once(grad, "dot products of pairs", g, x), None, None


class _Product(torch.autograd.Function):
    """Products of pairs, column by column (M, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: PairRows, backend: KernelBackend) -> Tensor:
        ctx.pairs, ctx.backend = pairs, backend
        ctx.save_for_backward(x)
        out = padded_rows(pairs.heads.shape[0], x.shape[1], x)
        backend.activate()
        pair_product(backend, x, pairs, padded_rows(ROWS, x.shape[1], x), out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            ends = padded_rows(2 * g.shape[0], g.shape[1], x)
            grad = padded_rows(x.shape[0], x.shape[1], x)
            ctx.backend.activate()
            pair_product_grad(ctx.backend, g, x, ctx.pairs, ends, grad)
        return once(grad, "products of pairs", g, x), None, None


def _whole(rows: Tensor) -> Tensor:
    """Return rows from `padded_rows` as the vector that they lie in: messages are contiguous."""
    return rows.as_strided((rows.shape[0] * rows.stride(0),), (1,))
