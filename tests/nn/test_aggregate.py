"""Sums over neighbours across ranks: forwards, backwards, and in modules of one's own, against the dense formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.assemble.plan import STRATEGIES
from mggcn.comm.control_store import CHECKED_CALLS
from mggcn.errors import BackendError, CommError, GraphError
from mggcn.graph.csr import Graph
from mggcn.nn import PartitionedGraph, aggregate, rank_aggregation, run
from mggcn.nn.sharing import NORMS
from tests.devices import CPU, WHERE, Where
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr

KINDS = ("random", "directed", "weighted", "hub-row", "empty", "disconnected")


def graph_of(kind: str, n: int = 37) -> Graph:
    weighted = kind == "weighted"
    return make_graph(pattern(kind, n, 21), num_features=6, num_classes=3, sparse=False, weighted=weighted, seed=9)


def on_ranks(
    graph: Graph, ranks: int, body: Callable[[PartitionedGraph], Any], where: Where = CPU, **settings: Any
) -> list[Any]:
    return run(
        body,
        graph,
        ranks=ranks,
        timeout_s=60,
        device_of=where.device_of,
        **({"precision": "fp64", "device": where.device, "threads": 1} | settings),
    )


def dense_operator(graph: Graph, norm: str, self_loops: bool) -> Tensor:
    """S_r A^T S_c in float64."""
    adj = dense_csr(graph.adj)
    if self_loops:
        np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
    degree = adj.sum(0)
    with np.errstate(divide="ignore"):
        inverse = {"none": np.ones_like(degree), "mean": 1 / degree, "symmetric": 1 / np.sqrt(degree)}[norm]
    inverse[~np.isfinite(inverse)] = 0
    return torch.from_numpy(inverse[:, None] * adj.T * (inverse if norm == "symmetric" else 1.0))


def rows_of(graph: Graph, cols: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(graph.num_vertices, cols)))


def there_and_back(part: PartitionedGraph, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """z of all vertices, and the gradient by x of sum(z * g): the sum over ranks, which may hold copies."""
    mine = part.take(x).requires_grad_()
    z = aggregate(mine, part)
    assert z.is_contiguous()
    (z * part.take(g) * part.owned[:, None]).sum().backward()
    assert mine.grad is not None
    every = torch.zeros_like(x)
    every[part.ids.cpu()] = mine.grad.cpu()
    return part.gather(z).cpu(), part.total(every).cpu()


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_result_and_gradient_are_those_of_the_dense_product(where: Where, strategy: str, ranks: int) -> None:
    """Fails if a strategy, a norm, inserted self-loops or a width gives another product, or backward another adjoint."""
    trials = itertools.product(KINDS, (1, 11, 16), NORMS)
    for number, (kind, cols, norm) in enumerate(trials):
        if number % (5 if where is CPU else 17) != ranks % 5:
            continue
        graph, loops = graph_of(kind), number % 2 == 0
        x, g = rows_of(graph, cols, number), rows_of(graph, cols, number + 100)
        settings = {"strategy": strategy, "norm": norm, "self_loops": loops, "order": ("random", "none")[number % 2]}
        found = on_ranks(graph, ranks, lambda part: there_and_back(part, x, g), where, **settings)  # noqa: B023
        operator = dense_operator(graph, norm, loops)
        for z, grad in found:
            torch.testing.assert_close(z, operator @ x, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(grad, operator.t() @ g, rtol=1e-10, atol=1e-10)


class Net(torch.nn.Module):
    """Two aggregations of different width, a residual and a gate: more than mggcn's own models have."""

    def __init__(self, width_in: int, hidden: int, classes: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4711)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 3)
            for shape in ((width_in, hidden), (width_in, hidden), (2 * hidden, classes), (hidden, classes), (classes,))
        )
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, aggregated: Callable[[Tensor], Tensor]) -> Tensor:
        a, b, c, d, bias = self.weights
        h = torch.tanh(aggregated(x @ a)) + x @ b
        h = h * torch.sigmoid(aggregated(h))
        return torch.cat([h, aggregated(h)], 1) @ c + aggregated(h @ d) + bias


def loss_of(scores: Tensor, labels: Tensor, rows: Tensor, count: int) -> Tensor:
    """A loss of one's own: cross-entropy and a penalty, over global counts."""
    nll = torch.nn.functional.cross_entropy(scores[rows], labels[rows], reduction="sum")
    return (nll + 0.1 * (scores[rows] ** 2).sum()) / count


def trained(part: PartitionedGraph, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of some steps and the gradients of the last."""
    net = Net(6, 5, 3).to(part.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    x, labels, train = part.features, part.labels(), part.split("train")
    count = part.count(train)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net(x, lambda h: aggregate(h, part)), labels, train, count)
        loss.backward()
        part.sum_gradients(net)
        optimizer.step()
        losses.append(part.total(loss).item())
    assert net.unused.grad is None
    return losses, {n: p.grad.cpu().numpy().copy() for n, p in net.named_parameters() if p.grad is not None}


def trained_dense(graph: Graph, operator: Tensor, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    net = Net(6, 5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    x = torch.from_numpy(graph.features.array()).double()  # type: ignore[union-attr]
    labels = torch.from_numpy(graph.labels.array())  # type: ignore[union-attr]
    train = torch.from_numpy(graph.splits["train"].array()[0])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net(x, lambda h: operator @ h), labels, train, int(train.sum()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.grad.numpy().copy() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_module_of_ones_own_trains_as_on_the_dense_graph(where: Where, strategy: str, ranks: int) -> None:
    """Fails if losses or weight gradients of a module, loss and loop of one's own depend on ranks or strategy."""
    for kind in ("directed", "hub-row") if where is CPU else ("directed",):
        graph = graph_of(kind)
        wanted = trained_dense(graph, dense_operator(graph, "mean", True), 3)
        found = on_ranks(
            graph, ranks, lambda part: trained(part, 3), where, strategy=strategy, norm="mean", self_loops=True
        )
        for losses, grads in found:
            np.testing.assert_allclose(losses, wanted[0], rtol=1e-10)
            assert grads.keys() == wanted[1].keys()
            for name, grad in grads.items():
                np.testing.assert_allclose(grad, wanted[1][name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_ranks_than_vertices(strategy: str) -> None:
    """Fails if a rank without rows leaves the others waiting, or its empty sums are not numbers."""
    graph = graph_of("path", 4)
    wanted = trained_dense(graph, dense_operator(graph, "none", False), 2)
    for losses, _ in on_ranks(graph, 6, lambda part: trained(part, 2), strategy=strategy):
        np.testing.assert_allclose(losses, wanted[0], rtol=1e-10)


def test_rows_of_copies_are_equal() -> None:
    """Fails if two ranks that hold one vertex of a vertex cut see different sums for it."""
    graph = graph_of("hub-row")
    x = rows_of(graph, 7, 3)
    found = on_ranks(graph, 3, lambda part: (part.ids, aggregate(part.take(x), part)), strategy="delayed")
    every: dict[int, Tensor] = {}
    shared = 0
    for ids, z in found:
        for vertex, row in zip(ids.tolist(), z, strict=True):
            shared += vertex in every
            assert torch.equal(every.setdefault(vertex, row), row)
    assert shared > 5


@pytest.mark.parametrize("where", WHERE[1:])
def test_wide_rows_of_a_gpu_go_in_panels(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if panels overlap, leave columns out, or write beside their own."""
    monkeypatch.setattr(rank_aggregation, "PANEL", 16)
    graph = graph_of("directed")
    operator = dense_operator(graph, "symmetric", True)
    for cols in (15, 16, 17, 41):
        x, g = rows_of(graph, cols, 1), rows_of(graph, cols, 2)
        settings = {"norm": "symmetric", "self_loops": True}
        for z, grad in on_ranks(graph, 2, lambda part: there_and_back(part, x, g), where, **settings):  # noqa: B023
            torch.testing.assert_close(z, operator @ x)
            torch.testing.assert_close(grad, operator.t() @ g)


def test_operands_and_gradients_stay_as_they_are() -> None:
    """Fails if an operand that fits as it is, or torch's own gradient, is overwritten by a strategy."""
    graph = graph_of("random")
    for strategy, cols in itertools.product(STRATEGIES, (8, 11)):
        x, g = rows_of(graph, cols, 1), rows_of(graph, cols, 2)

        def body(part: PartitionedGraph, x: Tensor = x, g: Tensor = g) -> None:
            mine, above = part.take(x).requires_grad_(), part.take(g)
            aggregate(mine, part).backward(above)
            assert torch.equal(mine.detach(), part.take(x))
            assert torch.equal(above, part.take(g))

        on_ranks(graph, 3, body, strategy=strategy)


def test_memory_for_messages_is_taken_once_per_width() -> None:
    """Fails if every call takes new slots, or two widths share them."""
    graph = graph_of("random")

    def body(part: PartitionedGraph) -> None:
        slots = part.aggregation._slots
        for cols, known in ((8, 1), (8, 1), (11, 2), (8, 2)):
            aggregate(part.features.new_ones(part.num_rows, cols).requires_grad_(), part).sum().backward()
            assert len(slots) == known

    on_ranks(graph, 3, body)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_the_same_bits_in_every_run(precision: str) -> None:
    """Fails if sums depend on which rank is faster."""
    graph = graph_of("weighted")

    def body(part: PartitionedGraph) -> tuple[Tensor, Tensor]:
        x = part.features.clone().requires_grad_()
        z = aggregate(x, part)
        (z**2).sum().backward()
        assert x.grad is not None
        return z.detach(), x.grad

    for strategy in STRATEGIES:
        runs = [on_ranks(graph, 3, body, strategy=strategy, precision=precision) for _ in range(3)]
        for one, *others in zip(*runs, strict=True):
            assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


def test_second_derivatives_are_refused() -> None:
    """Fails if a second derivative is silently wrong."""

    def body(part: PartitionedGraph) -> None:
        x = part.features.clone().requires_grad_()
        (grad,) = torch.autograd.grad((aggregate(x, part) ** 2).sum(), x, create_graph=True)
        grad.sum().backward()

    with pytest.raises(BackendError, match="aggregate has no second derivative"):
        on_ranks(graph_of("random"), 2, body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda part: torch.ones(part.num_rows + 1, 3, dtype=torch.float64),
            r"aggregates \(\d+, D\).*its own rows; got",
        ),
        (lambda part: torch.ones(part.num_rows, dtype=torch.float64), "aggregates"),
        (lambda part: torch.ones(part.num_rows, 0, dtype=torch.float64), "with D >= 1"),
        (lambda part: torch.ones(part.num_rows, 3), "shared in torch.float64 on cpu, got rows in torch.float32"),
        (lambda part: np.ones((part.num_rows, 3)), "got ndarray"),
        (lambda part: torch.ones(part.num_rows, 3, dtype=torch.float64, device="meta"), "on meta; convert"),
    ],
)
def test_rows_that_do_not_fit_are_refused(make: Callable[[PartitionedGraph], Any], message: str) -> None:
    """Fails if rows of another shape, type or device reach a kernel or a message."""
    with pytest.raises(GraphError, match=message):
        on_ranks(graph_of("random"), 2, lambda part: aggregate(make(part), part))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("more", [1, 8], ids=["same messages", "other messages"])
def test_ranks_that_disagree_are_told(where: Where, strategy: str, more: int) -> None:
    """Fails if ranks that aggregate different widths exchange garbage, also in messages of one length, or wait for ever."""

    def body(part: PartitionedGraph) -> None:
        ones = torch.ones(part.num_rows, 9 + more, dtype=torch.float64, device=part.device)
        for width in (9, 9 + more, 9 + more * part.rank):
            aggregate(ones[:, :width], part)

    with pytest.raises(CommError, match=f"rank 0 forwards with 9, rank 1 forwards with {9 + more} columns"):
        on_ranks(graph_of("random"), 2, body, where, strategy=strategy)


def test_ranks_that_go_opposite_ways_are_told() -> None:
    """Fails if the sums of one rank meet the gradients of another."""

    def body(part: PartitionedGraph) -> None:
        x = torch.ones(part.num_rows, 3, dtype=torch.float64, requires_grad=True)
        z = aggregate(x, part)
        if part.rank == 0:
            z.sum().backward()
        else:
            aggregate(x, part)

    with pytest.raises(CommError, match="rank 0 backwards with 3, rank 1 forwards with 3 columns"):
        on_ranks(graph_of("random"), 2, body)


def test_later_calls_are_not_compared() -> None:
    """Fails if every epoch pays for comparing what the first ones did, or a new width goes uncompared."""
    compared = []

    def body(part: PartitionedGraph) -> None:
        ones = torch.ones(part.num_rows, 4, dtype=torch.float64)
        before = part.aggregation.compared
        for _ in range(CHECKED_CALLS + 9):
            aggregate(ones, part)
        compared.append(part.aggregation.compared - before)
        aggregate(ones[:, : 3 - part.rank], part)

    with pytest.raises(CommError, match="rank 0 forwards with 3, rank 1 forwards with 2"):
        on_ranks(graph_of("random"), 2, body)
    assert compared == [CHECKED_CALLS, CHECKED_CALLS]
