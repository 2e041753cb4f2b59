"""Means of neighbours by relation, mixed by coefficients: results and gradients of the dense formula."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.aggregate import relations as by_relation
from mggcn.errors import BackendError, CommError, ConfigError, GraphError, PlanError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.options import GraphOptions
from mggcn.nn import PartitionedGraph, aggregate, aggregate_relations, partitioned, rank_aggregation
from mggcn.nn.relations import MixedMeans, RelationMeans
from tests.devices import CPU, EMULATED, WHERE, Where
from tests.graphs import one_epoch
from tests.model.dense_stack import dense_means
from tests.model.test_rgcn import typed_edges, typed_graph
from tests.nn.test_aggregate import on_ranks, rows_of
from tests.nn.test_neighbours import compare, there_and_back
from tests.train.test_exact import config_of

KINDS = ("random", "weighted", "path", "star", "empty", "two vertices")
STRATEGIES = ("broadcast", "halo", "delayed")
RELATIONS = 6
Sample = Callable[[list[Any], int], list[Any]]
Found = list[tuple[Tensor, list[Tensor]]]


def graph_of(kind: str) -> Graph:
    """A typed graph whose relations 2 and 5 have no edges; its last vertices are isolated, or ranks have no rows."""
    if kind == "two vertices":
        edges, types = np.array([[0, 1, 1, 0], [1, 0, 0, 0]]), np.array([0, 1, 3, 3])
    else:
        edges, types = typed_edges(kind, 4)
    weights = np.random.default_rng(77).integers(1, 4, types.shape[0]).astype(np.float64)
    return from_arrays(
        edges=edges,
        edge_types=types + (types > 1),
        num_relations=RELATIONS,
        weights=weights if kind == "weighted" else None,
        num_vertices=int(edges.max(initial=0)) + 1 if kind == "two vertices" else 37,
        options=GraphOptions(duplicates="sum"),
    )


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def dense(graph: Graph, x: Tensor, coefficients: Tensor) -> Tensor:
    return torch.einsum("rb,rnm,md->nbd", coefficients, dense_means(graph), x).flatten(1)


def results(graph: Graph, ranks: int, x: Tensor, c: Tensor, g: Tensor, where: Where = CPU, **settings: Any) -> Found:
    def body(part: PartitionedGraph) -> Any:
        function = lambda rows, weight: aggregate_relations(rows, weight, part).flatten(1)  # noqa: E731
        return there_and_back(part, function, (x,), c, g)

    return on_ranks(graph, ranks, body, where, **settings)


def check(graph: Graph, ranks: int, cols: int, bases: int, seed: int, where: Where = CPU, **settings: Any) -> None:
    """Compare values and gradients to 1e-10."""
    x, c = rows_of(graph, cols, seed), numbers(seed + 1, RELATIONS, bases)
    g = rows_of(graph, bases * cols, seed + 2)
    found = results(graph, ranks, x, c, g, where, **settings)
    inputs = (x.clone().requires_grad_(), c.clone().requires_grad_())
    compare(found, dense(graph, *inputs), inputs, g)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_means_and_their_gradients(
    where: Where, strategy: str, ranks: int, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if an edge counts for another relation or basis, a mean has another divisor, or a copy counts twice."""
    # Blocks of a few rows, so that relations have several.
    monkeypatch.setattr(by_relation, "BLOCK_ROWS", 7)
    trials = list(enumerate(itertools.product(KINDS, (1, 11, 16), (1, 3), ("random", "none"))))
    for number, (kind, cols, bases, order) in sample(trials, 4 if where is CPU else 1):
        # Neither self-loops nor a norm, which are those of other functions, may change anything.
        settings = {"self_loops": number % 2 == 0, "norm": ("none", "symmetric", "mean")[number % 3]}
        check(graph_of(kind), ranks, cols, bases, number, where, strategy=strategy, order=order, **settings)


@pytest.mark.parametrize("where", [CPU, EMULATED], ids=lambda where: where.name)
def test_hubs_and_rows_wider_than_the_work_space(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if columns beyond the first panel are lost, or a hub's parts need more work space than a GPU's kernels have."""
    for module in (rank_aggregation, partitioned):
        monkeypatch.setattr(module, "PANEL", 8)
    leaves, cols, bases = np.arange(1, 3001), 40, 2
    hub = np.zeros_like(leaves)
    edges, types = np.array([[*leaves, *hub], [*hub, *leaves]]), np.repeat([0, 1], leaves.shape[0])
    graph = from_arrays(edges=edges, edge_types=types, num_vertices=3001)
    x, c, g = numbers(1, 3001, cols), numbers(2, 2, bases), numbers(3, 3001, bases * cols)
    found = results(graph, 1, x, c, g, where, strategy="halo")
    inputs = (x.clone().requires_grad_(), c.clone().requires_grad_())
    means = torch.stack([inputs[0][1:].mean(0), inputs[0][0]])
    mixed = (inputs[1][:, :, None] * means[:, None]).flatten(1)
    compare(found, torch.cat([mixed[:1], mixed[1:].expand(3000, -1)]), inputs, g)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_without_a_gradient(strategy: str) -> None:
    """Fails if a gradient by x or by the coefficients is another one where only that one is needed."""
    graph, x, c, g = graph_of("random"), numbers(1, 37, 5), numbers(2, RELATIONS, 3), numbers(3, 37, 3, 5)

    def body(part: PartitionedGraph) -> tuple[Tensor, Tensor]:
        def gradient(by_rows: bool) -> Tensor:
            rows, weight = part.take(x).requires_grad_(by_rows), c.clone().requires_grad_(not by_rows)
            (aggregate_relations(rows, weight, part) * part.take(g) * part.owned[:, None, None]).sum().backward()
            grad, none = (rows.grad, weight.grad) if by_rows else (weight.grad, rows.grad)
            assert none is None
            assert grad is not None
            return grad

        every = torch.zeros_like(x)
        every[part.ids] = gradient(True)
        return part.total(every), part.total(gradient(False))

    inputs = (x.clone().requires_grad_(), c.clone().requires_grad_())
    (dense(graph, *inputs) * g.flatten(1)).sum().backward()
    for grads in on_ranks(graph, 3, body, strategy=strategy):
        for grad, tensor in zip(grads, inputs, strict=True):
            torch.testing.assert_close(grad, tensor.grad, rtol=1e-10, atol=1e-10)


def test_float32() -> None:
    """Fails if results or gradients are of another type, or are less exact than float32."""
    graph = graph_of("weighted")
    x, c, g = (numbers(k, *shape).float() for k, shape in enumerate(((37, 11), (RELATIONS, 3), (37, 33))))
    inputs = (x.double().requires_grad_(), c.double().requires_grad_())
    (expected := dense(graph, *inputs)).backward(g.double())
    for z, grads in results(graph, 3, x, c, g, precision="fp32"):
        assert z.dtype == torch.float32
        torch.testing.assert_close(z.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        for grad, tensor in zip(grads, inputs, strict=True):
            torch.testing.assert_close(grad.double(), tensor.grad, rtol=1e-5, atol=2e-5)


class Rgcn(torch.nn.Module):
    """R-GCN as a user writes it, with the weights of a trained model of kind "rgcn"."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        names = {name: name.replace(".", "_") for name in weights}
        self.parameter_of = names
        for name, weight in weights.items():
            self.register_parameter(names[name], torch.nn.Parameter(weight.double().clone()))

    def layer(self, x: Tensor, number: int, part: PartitionedGraph) -> Tensor:
        root, bias, bases, coefficients = (
            getattr(self, f"layers_{number}_{name}") for name in ("weight", "bias", "bases", "coefficients")
        )
        z = aggregate_relations(x, coefficients, part)
        return x @ root + torch.einsum("vbd,bde->ve", z, bases) + bias

    def forward(self, x: Tensor, part: PartitionedGraph) -> Tensor:
        return self.layer(torch.relu(self.layer(x, 1, part)), 2, part)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_the_model_of_the_same_weights(strategy: str) -> None:
    """Fails if logits, loss or a parameter's gradient differ from those of model.kind = "rgcn" by more than rounding."""
    graph = typed_graph("weighted")
    model = one_epoch(config_of(2, strategy=strategy, kind="rgcn", hidden=(6,), bases=3), graph)[0]

    def body(part: PartitionedGraph) -> tuple[float, dict[str, Any], Tensor]:
        net, labels, train = Rgcn(model.weights), part.labels(), part.split("train")
        scores = net(part.features.double(), part)
        loss = torch.nn.functional.cross_entropy(scores[train], labels[train], reduction="sum") / part.count(train)
        loss.backward()
        part.sum_gradients(net)
        grads = {name: getattr(net, ours).grad.numpy() for name, ours in net.parameter_of.items()}
        return part.total(loss).item(), grads, part.gather(scores)

    for loss, grads, scores in on_ranks(graph, 3, body, strategy=strategy):
        np.testing.assert_allclose(loss, model.loss, rtol=1e-10)
        np.testing.assert_allclose(scores.numpy()[model.ids], model.logits, rtol=1e-9, atol=1e-10)
        assert grads.keys() == model.grads.keys()
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, model.grads[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fault", ["coefficients", "rows", "relation", "divisor"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself fails when a gradient is wrong, a relation is mixed up or a mean is a sum."""
    if fault == "coefficients":
        backward = MixedMeans._backward

        def twice(self: MixedMeans, part: Any, *on: Tensor) -> None:
            backward(self, part, *on)
            self._room.gradients[part.spans[0][0]] *= 1.01

        monkeypatch.setattr(MixedMeans, "_backward", twice)
    elif fault == "rows":
        begin = RelationMeans.begin
        still = lambda self, *on: begin(dataclasses.replace(self, of_rows=False), *on)  # noqa: E731
        monkeypatch.setattr(RelationMeans, "begin", still)
    elif fault == "relation":
        forward = MixedMeans._forward

        def mixed(self: Any, part: Any, h: Any) -> Any:
            return forward(self, dataclasses.replace(part, spans=tuple((0, a, b) for _, a, b in part.spans)), h)

        monkeypatch.setattr(MixedMeans, "_forward", mixed)
    else:
        upload = by_relation.upload_tile
        ones = lambda backend, tile: upload(backend, dataclasses.replace(tile, values=None))  # noqa: E731
        monkeypatch.setattr("mggcn.aggregate.broadcast.upload_tile", ones)
    with pytest.raises(AssertionError):
        check(graph_of("random"), 2, 4, 3, 5)


def test_what_does_not_fit_is_refused() -> None:
    """Fails if graphs without types, wrong shapes, types or strategies are taken, or ranks that disagree go on."""
    graph = graph_of("random")

    def refused(
        error: type[Exception], message: str, body: Callable[[PartitionedGraph, Tensor, Tensor], Any], **named: Any
    ) -> None:
        on = named.pop("graph", graph)

        def on_rank(part: PartitionedGraph) -> Any:
            x = torch.ones(part.num_rows, 4, dtype=part.dtype)
            return body(part, x, torch.ones(RELATIONS, 2, dtype=part.dtype))

        with pytest.raises(error, match=message):
            on_ranks(on, 2, on_rank, **named)

    plain = lambda part, x, c: aggregate_relations(x, c, part)  # noqa: E731
    refused(GraphError, "edges have types, and this one has none; give edge_types", plain, graph=graph.untyped())
    refused(ConfigError, "which bf16 would round each time; share the graph in fp32", plain, precision="bf16")
    refused(PlanError, "means by relation needs whole rows; choose broadcast, halo or delayed", plain, strategy="slice")
    refused(GraphError, r"\(6, B\) .* got \(5, 2\)", lambda part, x, c: aggregate_relations(x, c[:-1], part))
    refused(GraphError, r"\(6, B\) .* got \(6,\)", lambda part, x, c: aggregate_relations(x, c[:, 0], part))
    refused(GraphError, r"B >= 1.* got \(6, 0\)", lambda part, x, c: aggregate_relations(x, c[:, :0], part))
    refused(GraphError, "got list", lambda part, x, c: aggregate_relations(x, [1.0], part))  # type: ignore[arg-type]
    refused(GraphError, "float64 .* got torch.float32", lambda part, x, c: aggregate_relations(x, c.float(), part))
    refused(GraphError, "its own rows", lambda part, x, c: aggregate_relations(x[1:], c, part))
    refused(
        CommError,
        "rows of one width",
        lambda part, x, c: aggregate_relations(x, c[:, : 1 + part.rank].contiguous(), part),
    )
    refused(
        CommError,
        "by one operation",
        lambda part, x, c: aggregate_relations(x, c, part) if part.rank else aggregate(x, part),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operands_and_gradients_stay_as_they_are(strategy: str) -> None:
    """Fails if an operand or torch's own gradient is overwritten by a strategy."""
    x, c, g = numbers(1, 37, 8), numbers(2, RELATIONS, 2), numbers(3, 37, 2, 8)

    def body(part: PartitionedGraph) -> None:
        rows, weight, above = part.take(x).requires_grad_(), c.clone().requires_grad_(), part.take(g)
        aggregate_relations(rows, weight, part).backward(above)
        for here, given in ((rows.detach(), part.take(x)), (weight.detach(), c), (above, part.take(g))):
            assert torch.equal(here, given)

    on_ranks(graph_of("random"), 3, body, strategy=strategy)


def test_second_derivatives_are_refused() -> None:
    """Fails if a gradient of a gradient is silently zero."""

    def body(part: PartitionedGraph) -> None:
        x = part.take(numbers(1, 37, 3)).requires_grad_()
        c = numbers(2, RELATIONS, 2).requires_grad_()
        for grad in torch.autograd.grad((aggregate_relations(x, c, part) ** 2).sum(), (x, c), create_graph=True):
            with pytest.raises(BackendError, match="aggregate_relations has no second derivative"):
                torch.autograd.grad(grad.sum(), x, retain_graph=True)

    on_ranks(graph_of("random"), 1, body)


def test_matrices_and_memory_for_messages_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a call uploads the graph again or keeps new buffers, or a graph is uploaded by relation unasked."""
    graph, uploads = graph_of("random"), []
    upload = by_relation.upload_tile

    def counted(backend: Any, tile: Any) -> Any:
        uploads.append(tile.types is not None)
        return upload(backend, tile)

    monkeypatch.setattr("mggcn.aggregate.halo.upload_tile", counted)

    def body(part: PartitionedGraph) -> None:
        assert part.num_relations == RELATIONS
        x, c = (numbers(1, *shape).requires_grad_() for shape in ((part.num_rows, 3), (RELATIONS, 2)))
        aggregate(x, part).sum().backward()
        assert not any(uploads)
        known = []
        for _ in range(3):
            aggregate_relations(x, c, part).sum().backward()
            known.append((len(uploads), len(part.aggregation._slots)))
        assert any(uploads)
        assert len(set(known)) == 1

    on_ranks(graph, 1, body, strategy="halo")
