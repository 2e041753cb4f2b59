"""Dropout by vertex and batch norm over ranks: equal for every number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.errors import ConfigError, GraphError
from mggcn.nn import BatchNorm, PartitionedGraph, dropout
from tests.devices import WHERE, Where
from tests.graphs import make_graph, pattern
from tests.nn.test_aggregate import graph_of, on_ranks, rows_of
from tests.reference import dropout_mask

STRATEGIES = ("broadcast", "delayed")


def whole(part: PartitionedGraph, grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient of all vertices, the sum over ranks, which may hold copies."""
    every = torch.zeros_like(like)
    assert grad is not None
    every[part.ids.cpu()] = grad.cpu()
    return part.total(every).cpu()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_is_that_of_the_vertex(where: Where, strategy: str) -> None:
    """Fails if a mask depends on the rank or the order, is another one backwards, or the same in the next call or epoch."""
    graph = graph_of("random")
    x, g = rows_of(graph, 11, 3), rows_of(graph, 11, 4)
    x[::3] = 0.0

    def body(part: PartitionedGraph) -> list[Any]:
        found = []
        for epoch in (4, 5):
            part.start_epoch(epoch, seed=631)
            for _ in range(2):
                mine = part.take(x).requires_grad_()
                z = dropout(mine, part, 0.3)
                (z * part.take(g) * part.owned[:, None]).sum().backward()
                found.append((part.gather(z.detach()).cpu(), whole(part, mine.grad, x)))
        mine = part.take(x)
        assert dropout(mine, part, 0.3, training=False) is mine
        return found

    masks = [
        torch.from_numpy(dropout_mask(np.arange(37), 11, 0.3, 631, epoch, site)) for epoch in (4, 5) for site in (1, 2)
    ]
    assert len({mask.numpy().tobytes() for mask in masks}) == 4
    for ranks in (1, 3):
        for found in on_ranks(graph, ranks, body, where, strategy=strategy, order="permute"):
            for (z, grad), mask in zip(found, masks, strict=True):
                torch.testing.assert_close(z, x * mask, rtol=1e-7, atol=0)
                torch.testing.assert_close(grad, g * mask, rtol=1e-7, atol=0)
    with pytest.raises(ConfigError, match=r"p must lie in \[0, 1\), got 1"):
        on_ranks(graph, 1, lambda part: dropout(part.take(x), part, 1.0))


@pytest.mark.covering(2)
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "slice", "delayed"])
@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_is_that_of_the_whole_graph(strategy: str, ranks: int, affine: bool, momentum: float | None) -> None:
    """Fails if copies count, ranks' variances are averaged, or a gradient through the statistics is lost."""
    graph = graph_of("hub-row")
    x, g = 100 + rows_of(graph, 5, 7) * torch.tensor([1.0, 10.0, 0.1, 1e-3, 0.0]), rows_of(graph, 5, 8)
    expected, reference = x.clone().requires_grad_(), torch.nn.BatchNorm1d(5, momentum=momentum, affine=affine).double()
    if affine:
        with torch.no_grad():
            reference.weight.copy_(torch.arange(1.0, 6.0))
            reference.bias.copy_(torch.arange(5.0))
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    for _ in range(2):
        z = reference(expected)
        (z * g).sum().backward()

    def body(part: PartitionedGraph) -> Any:
        norm = BatchNorm(5, momentum=momentum, affine=affine).double()
        norm.load_state_dict(start)
        mine = part.take(x).requires_grad_()
        for _ in range(2):
            z = norm(mine, part)
            (z * part.take(g) * part.owned[:, None]).sum().backward()
        part.sum_gradients(norm)
        grads = [p.grad for p in norm.parameters()]
        evaluated = norm.eval()(mine.detach(), part)
        return part.gather(z.detach()), whole(part, mine.grad, x), grads, norm.state_dict(), part.gather(evaluated)

    for z_found, grad, grads, state, evaluated in on_ranks(graph, ranks, body, strategy=strategy):
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(z_found, z.detach(), **close)
        torch.testing.assert_close(grad, expected.grad, **close)
        for found, parameter in zip(grads, reference.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, **close)
        assert state.keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(evaluated, reference.eval()(x).detach(), **close)
        reference.train()


def test_batch_norm_of_few_vertices() -> None:
    """Fails if a rank without rows makes a result that is not a number, or one vertex has a variance."""
    graph = make_graph(pattern("random", 2, 1), num_features=3, num_classes=2, sparse=False, weighted=False, seed=3)
    x = rows_of(graph, 3, 5)
    for z in on_ranks(graph, 5, lambda part: part.gather(BatchNorm(3).double()(part.take(x), part).detach())):
        torch.testing.assert_close(z, torch.nn.BatchNorm1d(3).double()(x).detach())
    with pytest.raises(GraphError, match=r"BatchNorm\(4\) got rows of 3 columns"):
        on_ranks(graph, 1, lambda part: BatchNorm(4)(part.take(x), part))
    one = make_graph(pattern("random", 1, 1), num_features=3, num_classes=1, sparse=False, weighted=False, seed=3)
    with pytest.raises(GraphError, match="needs two vertices or more to train, the graph has 1"):
        on_ranks(one, 1, lambda part: BatchNorm(3).double()(part.take(x[:1]), part))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_keep_their_type(precision: str) -> None:
    """Fails if statistics are of bf16, or rows come back in another type."""
    graph = graph_of("random")
    x = 50 + rows_of(graph, 4, 2)

    def body(part: PartitionedGraph) -> Tensor:
        rows = part.take(x).to(part.dtype)
        z = BatchNorm(4)(rows, part)
        assert z.dtype == rows.dtype == dropout(rows, part, 0.5).dtype
        return part.gather(z.detach()).double()

    expected = torch.nn.BatchNorm1d(4).double()(
        x.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision]).double()
    )
    found = on_ranks(graph, 2, body, precision=precision)[0]
    torch.testing.assert_close(
        found,
        expected.detach(),
        **({"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-2}),
    )
