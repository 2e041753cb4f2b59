"""Maximum of neighbours and attention over them across ranks: results and gradients of the dense formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import mggcn
from mggcn.errors import CommError, ConfigError, GraphError, PlanError
from mggcn.graph.csr import Graph
from mggcn.nn import DeviceGraph, PartitionedGraph, aggregate, attend, attend_dynamic, reduce
from tests.devices import CPU, WHERE, Where
from tests.nn.test_aggregate import graph_of, on_ranks, rows_of
from tests.reference import dense_csr, weight_mask

KINDS = ("random", "directed", "hub-row", "empty", "disconnected")
STRATEGIES = ("broadcast", "halo", "delayed")
Sample = Callable[[list[Any], int], list[Any]]


def edges_of(graph: Graph, self_loops: bool) -> Tensor:
    """Whether there is an edge into v from u, bool [v, u]."""
    edges = torch.from_numpy(dense_csr(graph.adj).T != 0)
    return edges | torch.eye(graph.num_vertices, dtype=torch.bool) if self_loops else edges


def dense_maximum(edges: Tensor, x: Tensor) -> Tensor:
    """The first of the largest takes the gradient; rows without edges are 0."""
    candidates = torch.where(edges[:, :, None], x.detach()[None], -torch.inf)
    winners = candidates.argmax(1)
    return torch.where(edges.any(1)[:, None], x.gather(0, winners), 0.0)


def dense_attention(edges: Tensor, scores: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """scores [v, u, h]; x (N, D); mask [v, u, h]."""
    scores = torch.where(edges[:, :, None], scores, -1e300)
    weights = torch.where(edges.any(1)[:, None, None], torch.softmax(scores, 1), 0.0) * mask
    heads = scores.shape[2]
    return torch.einsum("vuh,uhc->vhc", weights, x.view(x.shape[0], heads, -1)).flatten(1)


def there_and_back(
    part: PartitionedGraph, body: Callable[..., Tensor], tensors: tuple[Tensor, ...], weight: Tensor | None, g: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The result of all vertices, and the gradients of sum(z * g), summed over ranks, which may hold copies."""
    mine = [part.take(x).requires_grad_() for x in tensors]
    shared = [] if weight is None else [weight.to(part.device).clone().requires_grad_()]
    z = body(*mine, *shared)
    assert z.is_contiguous()
    (z * part.take(g) * part.owned[:, None]).sum().backward()
    found = []
    for x, every in zip(mine, map(torch.zeros_like, tensors), strict=True):
        assert x.grad is not None
        every[part.ids.cpu()] = x.grad.cpu()
        found.append(part.total(every).cpu())
    return part.gather(z.detach()).cpu(), [*found, *(part.total(w.grad).cpu() for w in shared)]


def compare(found: list[tuple[Tensor, list[Tensor]]], z: Tensor, inputs: tuple[Tensor, ...], g: Tensor) -> None:
    (z * g).sum().backward()
    for result, grads in found:
        torch.testing.assert_close(result, z.detach(), rtol=1e-10, atol=1e-10)
        for grad, x in zip(grads, inputs, strict=True):
            torch.testing.assert_close(grad, x.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_maximum_and_its_gradient(where: Where, strategy: str, ranks: int, sample: Sample) -> None:
    """Fails if a neighbour is missed, a tie goes to another vertex than the first, or a gradient to a loser."""
    trials = list(enumerate(itertools.product(KINDS, (1, 11), ("max", "min"))))
    for number, (kind, cols, reducer) in sample(trials, 3 if where is CPU else 1):
        graph, loops = graph_of(kind), number % 2 == 0
        x, g = (rows_of(graph, cols, number) * 2).round(), rows_of(graph, cols, number + 100)  # rounded: ties

        def body(part: PartitionedGraph) -> Any:
            return there_and_back(part, lambda rows: reduce(rows, part, reducer), (x,), None, g)  # noqa: B023

        found = on_ranks(graph, ranks, body, where, strategy=strategy, self_loops=loops)
        x = x.clone().requires_grad_()
        sign = 1 if reducer == "max" else -1
        compare(found, sign * dense_maximum(edges_of(graph, loops), sign * x), (x,), g)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "slice"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_attention_and_its_gradients(where: Where, strategy: str, ranks: int, sample: Sample) -> None:
    """Fails if a score, a weight, a mask or one of the gradients by rows, scores and a is not the dense formula's."""
    trials = list(enumerate(itertools.product(KINDS, ((1, 3), (3, 4), (9, 2)), (0.0, 0.4), (False, True))))
    for number, (kind, (heads, cols), p, dynamic) in sample(trials, 4 if where is CPU else 1):
        graph, loops, n = graph_of(kind), number % 3 != 0, 37
        x, s, t = (rows_of(graph, width, number + k) for k, width in enumerate((heads * cols, heads, heads)))
        y, g = (rows_of(graph, heads * cols, number + k) for k in (50, 100))
        a = torch.from_numpy(np.random.default_rng(number).normal(size=(heads, cols)))

        def body(part: PartitionedGraph) -> Any:
            part.start_epoch(6, seed=911)
            if dynamic:  # noqa: B023
                function = lambda x, y, a: attend_dynamic(x, y, a, part, dropout=p)  # noqa: B023, E731
                return there_and_back(part, function, (x, y), a, g)  # noqa: B023
            function = lambda x, s, t: attend(x, s, t, part, dropout=p)  # noqa: B023, E731
            return there_and_back(part, function, (x, s, t), None, g)  # noqa: B023

        found = on_ranks(graph, ranks, body, where, strategy=strategy, self_loops=loops)
        inputs = tuple(tensor.clone().requires_grad_() for tensor in ((x, y, a) if dynamic else (x, s, t)))
        mask = weight_mask(n, heads, p, (911, 6), 1) if p else torch.ones(n, n, heads, dtype=torch.float64)
        leaky = torch.nn.functional.leaky_relu
        if dynamic:
            both = (inputs[0][None] + inputs[1][:, None]).view(n, n, heads, cols)
            scores = (leaky(both, 0.2) * inputs[2]).sum(3)
        else:
            scores = leaky(inputs[1][None] + inputs[2][:, None], 0.2)
        compare(found, dense_attention(edges_of(graph, loops), scores, inputs[0], mask), inputs, g)


def test_what_does_not_fit_is_refused() -> None:
    """Fails if wrong shapes, types or strategies are taken, or ranks that compute different things go on."""
    graph = graph_of("random")

    def refused(
        error: type[Exception], message: str, body: Callable[[PartitionedGraph, Tensor], Any], **named: Any
    ) -> None:
        with pytest.raises(error, match=message):
            on_ranks(graph, 2, lambda part: body(part, part.features.to(part.dtype)), **named)

    refused(ConfigError, "reducer must be one of sum, max, min, got 'mean'", lambda part, x: reduce(x, part, "mean"))  # type: ignore[arg-type]
    refused(ConfigError, "which bf16 cannot hold", lambda part, x: reduce(x, part), precision="bf16")
    refused(PlanError, "slice", lambda part, x: reduce(x, part), strategy="slice")
    refused(GraphError, r"source must be \(\d+, H\)", lambda part, x: attend(x, x[:-1], x, part))
    refused(
        GraphError, "destination has 3; give both the same number", lambda part, x: attend(x, x[:, :2], x[:, :3], part)
    )
    refused(GraphError, "6 columns must be equal parts", lambda part, x: attend(x, x[:, :4], x[:, :4], part))
    refused(GraphError, "weight of shape", lambda part, x: attend_dynamic(x, x, x.new_ones(2, 2), part))
    refused(ConfigError, "dropout must lie in", lambda part, x: attend(x, x, x, part, dropout=1.0))
    refused(
        CommError,
        "all ranks must aggregate by one operation",
        lambda part, x: reduce(x, part) if part.rank else aggregate(x, part),
    )


def test_memory_for_attention_is_taken_once() -> None:
    """Fails if every dropout, which is another operation in each call, takes memory for messages that stays."""
    graph = graph_of("random")

    def body(part: PartitionedGraph) -> None:
        known = set()
        for _ in range(3):
            x, scores = (part.features.new_ones(part.num_rows, cols).requires_grad_() for cols in (8, 2))
            attend(x, scores, scores, part, dropout=0.2).sum().backward()
            known.add(len(part.aggregation._slots))
        assert len(known) == 1

    on_ranks(graph, 3, body)


def multigraph(n: int = 37) -> tuple[Graph, Tensor]:
    """A graph as PyG counts its repeated edges, and the number of edges into v from u, [v, u]."""
    draw = np.random.default_rng(5519)
    pairs = draw.integers(0, n, (2, 90))
    pairs = pairs[:, pairs[0] != pairs[1]]
    pairs = np.repeat(pairs, draw.integers(1, 4, pairs.shape[1]), axis=1)
    edges = torch.from_numpy(pairs[:, draw.permutation(pairs.shape[1])])
    counts = torch.zeros(n, n, dtype=torch.float64).index_put(
        (edges[1], edges[0]), torch.ones(()).double(), accumulate=True
    )
    return mggcn.load(Data(edge_index=edges, num_nodes=n)), counts


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "slice"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parallel_edges_are_entries_of_the_softmax(where: Where, strategy: str, ranks: int, dynamic: bool) -> None:
    """Fails if repeated edges count once in a score, a sum or a gradient, in a tile of any rank or on any device."""
    (graph, counts), heads, cols, n = multigraph(), 2, 5, 37
    assert counts.max() > 1
    x, y, g = (rows_of(graph, heads * cols, seed) for seed in (61, 62, 63))
    s, t = (rows_of(graph, heads, seed) for seed in (64, 65))
    a = torch.from_numpy(np.random.default_rng(66).normal(size=(heads, cols)))

    def body(part: PartitionedGraph) -> Any:
        if dynamic:
            return there_and_back(part, lambda x, y, a: attend_dynamic(x, y, a, part), (x, y), a, g)
        return there_and_back(part, lambda x, s, t: attend(x, s, t, part), (x, s, t), None, g)

    found = on_ranks(graph, ranks, body, where, strategy=strategy, self_loops=True)
    inputs = tuple(tensor.clone().requires_grad_() for tensor in ((x, y, a) if dynamic else (x, s, t)))
    if dynamic:
        both = (inputs[0][None] + inputs[1][:, None]).view(n, n, heads, cols)
        scores = (torch.nn.functional.leaky_relu(both, 0.2) * inputs[2]).sum(3)
    else:
        scores = torch.nn.functional.leaky_relu(inputs[1][None] + inputs[2][:, None], 0.2)
    counts = counts + torch.eye(n)
    scores = scores + torch.where(counts > 0, counts, 1.0).log()[:, :, None]
    mask = torch.ones(n, n, heads, dtype=torch.float64)
    compare(found, dense_attention(counts > 0, scores, inputs[0], mask), inputs, g)


def test_parallel_edges_with_weights_are_refused_by_attention_alone() -> None:
    """Fails if attention counts edges whose weights were added up, or sums and maxima refuse them."""
    edges = torch.tensor([[0, 0, 1], [1, 1, 2]])
    graph = mggcn.load(Data(edge_index=edges, num_nodes=3, edge_weight=torch.tensor([0.5, 2.0, 1.0])))
    x = torch.ones(3, 1, dtype=torch.float64)
    with pytest.raises(GraphError, match=r"attention counts each.*weights=None.*duplicates=\"merge\""):
        on_ranks(graph, 2, lambda part: attend(part.take(x), part.take(x), part.take(x), part))
    assert on_ranks(graph, 1, lambda part: part.gather(aggregate(part.take(x), part)))[0].flatten().tolist() == [
        0,
        2.5,
        1,
    ]
    assert on_ranks(graph, 1, lambda part: part.gather(reduce(part.take(x), part)))[0].flatten().tolist() == [0, 1, 1]
    merged = mggcn.load(Data(edge_index=edges, num_nodes=3), options=mggcn.GraphOptions(duplicates="merge"))
    for one in (merged, mggcn.load(Data(edge_index=edges[:, 1:], num_nodes=3, edge_weight=torch.tensor([2.0, 1.0])))):
        on_ranks(one, 1, lambda part: attend(part.take(x), part.take(x), part.take(x), part))


def test_a_device_graph_has_parallel_edges_each() -> None:
    """Fails if repeated edges count once, or their number is called a weight."""
    graph, counts = multigraph()
    edges = DeviceGraph(graph)
    assert edges.num_edges == int(counts.sum())
    assert edges.edge_weights is None
    x = rows_of(graph, 3, 71).requires_grad_()
    z = mggcn.nn.reduce_edges(edges, "copylhs", "sum", x)
    torch.testing.assert_close(z, counts @ x)
    z.sum().backward()
    torch.testing.assert_close(x.grad, counts.sum(0)[:, None].expand(-1, 3))
