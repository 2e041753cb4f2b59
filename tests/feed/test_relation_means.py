"""R-GCN on batches: its gradients are those of the means over what was drawn, and with all neighbours the whole graph's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.blocks.block import Stack
from mggcn.config import Config, SampleConfig
from mggcn.errors import ConfigError, PlanError
from mggcn.feed.batch import Batch, BlockEdges
from mggcn.graph.csr import Graph
from mggcn.planning.batches import draws_of
from tests.blocks.sample_twin import Twin
from tests.feed.test_blocks import config_of
from tests.feed.test_sampled import ALL, grads_of, step_of
from tests.graphs import on_ranks
from tests.model.test_rgcn import typed_graph

RELATIONS = 5
MODEL: dict[str, Any] = {"kind": "rgcn", "hidden": (6,), "bases": 3}


def sampled(ranks: int, fanout: Any = (3, 2), **sample: Any) -> Config:
    settings: dict[str, Any] = {"batch": 14, "fanout": fanout} | sample
    return dataclasses.replace(config_of(ranks, MODEL), sample=SampleConfig(**settings))


def dense_relations(graph: Graph) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """The weights of edges by relation (R, N, N), a row for each target, and where there are edges."""
    adj_t, n = graph.adj_t, graph.num_vertices
    assert adj_t.types is not None
    rows = np.repeat(np.arange(n), np.diff(adj_t.indptr.array()))
    out = np.zeros((RELATIONS, n, n))
    at = (adj_t.types.array(), rows, adj_t.indices.array())
    out[at] = 1.0 if adj_t.values is None else adj_t.values.array()
    there = np.zeros(out.shape, bool)
    there[at] = True
    return out, there


def row_means(
    config: Config, weights: Any, relations: Any, places: Any, counts: Any, fanouts: tuple[int, ...]
) -> npt.NDArray[Any]:
    """What a row's entries count in the means of their relations, from the settings' definitions.

    weights (R, N): of the in-edges of the vertex, 0 where there is none. relations, places: of the row's entries; counts:
    how often each was drawn; fanouts: of each relation, or one of all.
    """
    sample, mine = config.sample, weights[relations, places]
    total = weights.sum(1)[relations]
    out = np.zeros(mine.size)
    # by type each relation is a draw of its own, else all are one.
    draws = [(relations == r, weights[r]) for r in range(RELATIONS)]
    if sample.weights == "block":
        for of, _ in draws:
            out[of] = mine[of] / mine[of].sum()
        return out
    of_draws = draws if sample.draws_by_type else [(relations >= 0, weights)]
    for (of, stored), fanout in zip(of_draws, fanouts, strict=True):
        degree, drawn = np.count_nonzero(stored), counts[of].sum()
        if sample.draw == "weight":
            whole = fanout == ALL or degree <= fanout
            out[of] = mine[of] if whole else stored.sum() / max(drawn, 1)
        elif sample.draw.startswith("labor"):
            out[of] = mine[of] * float(np.float32(max(degree / (fanout or 1), 1.0)))  # as the sampler keeps it
        else:
            out[of] = (mine * counts)[of] * degree / max(drawn, 1)
    return np.asarray(out / total)


def means(
    graph: Graph, config: Config, targets: Any, sources: Any, edges: BlockEdges, fanouts: tuple[int, ...], drawn: Any
) -> npt.NDArray[Any]:
    """The block's means by relation (R, T, S); drawn (E,): how often each edge was drawn."""
    weights, _ = dense_relations(graph)
    assert edges.types is not None
    out = np.zeros((RELATIONS, targets.size, sources.size))
    for t, v in enumerate(targets):
        row = slice(edges.indptr[t], edges.indptr[t + 1])
        relations, places = edges.types[row].astype(np.int64), edges.indices[row]
        out[relations, t, places] = row_means(config, weights[:, v], relations, sources[places], drawn[row], fanouts)
    return out


def as_told(edges: BlockEdges, num_sources: int) -> npt.NDArray[Any]:
    """The block's means by relation (R, T, S) as the feed made them."""
    assert edges.values is not None
    out = np.zeros((RELATIONS, edges.indptr.size - 1, num_sources))
    rows = np.repeat(np.arange(out.shape[1]), np.diff(edges.indptr))
    out[edges.types, rows, edges.indices] = edges.values
    return out


def counts_of(config: Config, graph: Graph, batch: Batch, stack: Stack, step: int) -> list[npt.NDArray[Any]]:
    """How often each edge of a batch was drawn, of the hop at the input first."""
    if config.sample.draw != "replace":
        return [np.ones(batch.edges[block].indices.size) for block in stack.blocks]
    twin = Twin(graph.adj_t, draws_of(config.sample, RELATIONS))
    return [np.array(hop.values) for hop in reversed(twin.draw(batch.rows[stack.seeds], 8123, step)[2])]


def reference(config: Config, graph: Graph, found: list[Any]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step of all ranks by autograd."""
    p = {name: w.double().clone().requires_grad_() for name, w in found[0]["weights"].items()}
    labels = graph.labels.array().astype(np.int64)  # type: ignore[union-attr]
    features = torch.from_numpy(np.asarray(graph.features.array(), np.float64))  # type: ignore[union-attr]
    with torch.enable_grad():
        loss = torch.zeros((), dtype=torch.float64)
        for rank in found:
            batch, stack = rank["batch"], rank["stack"]
            counts = counts_of(config, graph, batch, stack, rank["step"])
            x = features[batch.rows[stack.blocks[0].sources]]
            for layer, block in enumerate(stack.blocks, start=1):
                targets, sources, edges = batch.rows[block.targets], batch.rows[block.sources], batch.edges[block]
                fanouts = draws_of(config.sample, RELATIONS).of_types(len(stack.blocks) - layer)
                a = means(graph, config, targets, sources, edges, fanouts, counts[layer - 1])
                w = torch.einsum("rb,bde->rde", p[f"layers.{layer}.coefficients"], p[f"layers.{layer}.bases"])
                z = torch.einsum("rts,sd,rde->te", torch.from_numpy(a), x, w)
                z = z + x[: targets.size] @ p[f"layers.{layer}.weight"] + p[f"layers.{layer}.bias"]
                x = torch.relu(z) if layer == 1 else z
            wanted = torch.from_numpy(labels[batch.rows[stack.seeds]])
            loss = loss + torch.nn.functional.cross_entropy(x, wanted, reduction="sum") / batch.seeds.size
        loss.backward()
    return float(loss.detach()), {n: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for n, v in p.items()}


def compare(config: Config, graph: Graph) -> None:
    found = on_ranks(config, graph, step_of)
    loss, expected = reference(config, graph, found)
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-10)
    for key, gradient in expected.items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0]["grads"][key], gradient, atol=atol, err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("by_type", [False, True])
@pytest.mark.parametrize("weights", ["unbiased", "block"])
@pytest.mark.parametrize("kind", ["random", "weighted"])
def test_gradients_of_a_batch(kind: str, weights: str, by_type: bool, ranks: int) -> None:
    """Fails if an edge is of another relation, counts otherwise than its definition says, or a gradient is lost."""
    compare(sampled(ranks, weights=weights, by_type=by_type), typed_graph(kind, RELATIONS))


@pytest.mark.parametrize("by_type", [False, True])
@pytest.mark.parametrize("draw", ["replace", "labor", "labor-one", "weight"])
@pytest.mark.parametrize("weights", ["unbiased", "block"])
def test_gradients_of_every_draw(weights: str, draw: str, by_type: bool) -> None:
    """Fails if an edge counts otherwise than the definition of a draw says, also where some relations are drawn in full."""
    config = sampled(1, (5, 3), draw=draw, by_type=by_type, weights=weights)
    compare(config, typed_graph("weighted", RELATIONS))


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "weighted", "star"])
def test_all_neighbours_give_the_whole_graphs_gradient(kind: str, ranks: int) -> None:
    """Fails if neighbours, their relations or what they count are not all of the whole graph's."""
    graph = typed_graph(kind, RELATIONS)
    whole = dataclasses.replace(config_of(ranks, MODEL), sample=SampleConfig())
    draws = ("uniform", "weight") if kind == "weighted" else ("uniform",)
    for by_type, weights, draw in itertools.product((False, True), ("unbiased", "block"), draws):
        batches = sampled(ranks, (60, ALL), batch=1000, by_type=by_type, weights=weights, draw=draw)
        found = [
            on_ranks(config, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]
            for config in (batches, whole)
        ]
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-10)
        for key, gradient in found[1][1].items():
            atol = 1e-10 * (np.abs(gradient).max() or 1)
            np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


NUMBERS: Any = ("0:2/2:all/3:0/else:1", "1:3/4:2/else:1")
"""Fan-outs by relation, among them all, and none, in the layer next to the output."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor", "labor-one", "weight"])
@pytest.mark.parametrize("weights", ["unbiased", "block"])
@pytest.mark.covering(2)
def test_gradients_of_numbers_by_relation(weights: str, draw: str, ranks: int) -> None:
    """Fails if a relation is drawn by another one's number, or edges count as if all numbers were alike."""
    config = sampled(ranks, NUMBERS, draw=draw, weights=weights)
    compare(config, typed_graph("weighted", RELATIONS))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_large_numbers_by_relation_give_the_whole_graphs_gradient(ranks: int) -> None:
    """Fails if a number by relation that is no less than any degree leaves an edge out."""
    graph = typed_graph("random", RELATIONS)
    config = sampled(ranks, ({0: 60, "else": 70}, {3: "all", 1: 80, "else": 90}), batch=1000)
    whole = dataclasses.replace(config, sample=SampleConfig())
    (loss, grads), (exact, expected) = (
        on_ranks(one, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0] for one in (config, whole)
    )
    assert loss == pytest.approx(exact, rel=1e-10)
    for key, gradient in expected.items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(grads[key], gradient, atol=atol, err_msg=key)


def test_ranks_draw_the_same_edges_by_relation() -> None:
    """Fails if a step's edges depend on the number of ranks, a row has more of a relation than its number, or a batch has
    more rows or edges than its bounds."""
    graph = typed_graph("random", RELATIONS)
    fanouts = [draws_of(sampled(1, NUMBERS).sample, RELATIONS).of_types(hop) for hop in range(2)]

    def edges_of(rank: Rank) -> list[set[tuple[int, int, int, int]]]:
        stack, found = rank.feed.stack, list[set[tuple[int, int, int, int]]]()
        assert stack is not None
        for batch in rank.feed.epoch(8123, 1):
            found.append(set())
            for hop, block in enumerate(reversed(stack.blocks)):
                edges, size = batch.edges[block], stack.capacities[-1 - hop]
                assert edges.types is not None
                assert edges.indices.size <= size.edges
                assert batch.rows[block.sources].size <= size.sources
                targets = np.repeat(np.arange(edges.indptr.size - 1), np.diff(edges.indptr))
                counts = np.zeros((edges.indptr.size - 1, RELATIONS), np.int64)
                np.add.at(counts, (targets, edges.types), 1)
                assert all(
                    of.max(initial=0) <= most or most == ALL for of, most in zip(counts.T, fanouts[hop], strict=True)
                )
                ends = batch.rows[block.targets][targets], batch.rows[block.sources][edges.indices]
                found[-1].update((hop, int(r), int(t), int(s)) for r, t, s in zip(edges.types, *ends, strict=True))
        return found

    of_ranks = []
    for ranks in (1, 2, 3):
        parts = on_ranks(sampled(ranks, NUMBERS, batch=12, plan="bound"), graph, edges_of)
        of_ranks.append([set().union(*(part[step] for part in parts)) for step in range(len(parts[0]))])
    assert len(of_ranks[0]) > 1
    assert {relation for step in of_ranks[0] for hop, relation, _, _ in step if hop == 0} == {0, 1, 2, 4}
    assert of_ranks == of_ranks[:1] * 3


@pytest.mark.parametrize(
    ("kind", "draw", "by_type"),
    [
        ("random", "uniform", False),
        ("weighted", "uniform", True),
        ("random", "replace", True),
        ("random", "labor", True),
    ],
)
def test_the_mean_of_many_draws_is_the_mean_over_all_neighbours(kind: str, draw: str, by_type: bool) -> None:
    """Fails if an unbiased estimate of a relation's mean is biased, such as by relations of which none is drawn."""
    graph, count = typed_graph(kind, RELATIONS), 800
    config = sampled(1, (2, 2), batch=1000, draw=draw, by_type=by_type)

    def estimates(rank: Rank) -> Any:
        block = rank.feed.stack.blocks[-1]  # type: ignore[union-attr]
        sums, squares = np.zeros((2, RELATIONS, graph.num_vertices, graph.num_vertices))
        for step in range(count):
            batch: Batch = next(rank.feed.epoch(7, step))
            sources, found = batch.rows[block.sources], np.zeros((RELATIONS, graph.num_vertices, graph.num_vertices))
            at = np.ix_(np.arange(RELATIONS), batch.rows[block.targets], sources)
            found[at] = as_told(batch.edges[block], sources.size)
            sums, squares = sums + found, squares + found**2
        return sums / count, squares / count

    ((mean, square),) = on_ranks(config, graph, estimates)
    weights, _ = dense_relations(graph)
    total = weights.sum(2, keepdims=True)
    exact = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    exact[:, graph.splits["train"].array()[0] == 0] = 0
    spread = np.sqrt(np.maximum(square - mean**2, 0) / count)
    random = spread > 1e-9
    np.testing.assert_allclose(mean[~random], exact[~random], atol=1e-6)
    scores = ((mean - exact)[random] / spread[random]) ** 2
    assert scores.mean() == pytest.approx(1.0, abs=0.35)


def test_what_has_no_types_is_refused() -> None:
    """Fails if draws of each relation are planned for a model or a graph that has none."""
    with pytest.raises(ConfigError, match=r"sample.by_type draws neighbours of each relation"):
        dataclasses.replace(config_of(1, {"kind": "gcn"}), sample=SampleConfig(batch=8, fanout=(2, 2), by_type=True))
    with pytest.raises(PlanError, match="the graph's edges have no types"):
        on_ranks(sampled(1, by_type=True), typed_graph("random").untyped(), lambda rank: None)
    with pytest.raises(
        ConfigError, match=r"sample.fanout 0:3/else:1,2 draws neighbours of each relation, which model.kind gcn"
    ):
        dataclasses.replace(
            config_of(1, {"kind": "gcn"}),
            sample=SampleConfig(batch=8, fanout=({0: 3, "else": 1}, 2)),  # type: ignore[arg-type]  # as users give it
        )


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("0:3/7:2/else:1", "sample.fanout 0:3/7:2/else:1 names relation 7, and the graph has relations 0 .. 4"),
        ("0:3/1:2/4:1", "names no number for relation 2, and the graph has relations 0 .. 4; name it, or add /else:5"),
        ("else:0", "a fan-out must lie in 1 .. 65535 or be -1 for all for some type"),
        ("0:70000/else:1", "70000"),
    ],
)
def test_numbers_by_relation_that_do_not_fit_the_graph(numbers: str, words: str) -> None:
    """Fails if a relation that the graph lacks is passed over, or one without a number is drawn by any."""
    with pytest.raises(ConfigError, match=words) as caught:
        on_ranks(sampled(1, (numbers, 2)), typed_graph("random"), lambda rank: None)
    assert "\n" not in str(caught.value)
