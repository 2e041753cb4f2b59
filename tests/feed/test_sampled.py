"""Training on sampled batches: gradients are those of the sampled formula, and with all neighbours the whole graph's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.config import Config, SampleConfig
from mggcn.feed.batch import Batch
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.partition.rows.tiles import scales
from tests.devices import CPU, Where, everywhere
from tests.feed.test_blocks import MODELS, Twin, config_of, graph_of
from tests.graphs import make_graph, on_ranks, pattern
from tests.reference import dense_csr

ALL = -1
DRAWS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "replace": {"draw": "replace"},
    "labor": {"draw": "labor"},
    "labor-one, mean": {"draw": "labor-one", "weights": "mean"},
    "block": {"weights": "block"},
}


def sampled(ranks: int, model: dict[str, Any], fanout: tuple[int, ...] = (3, 2), **sample: Any) -> Config:
    config = config_of(ranks, model)
    return dataclasses.replace(config, sample=SampleConfig(**({"batch": 14, "fanout": fanout} | sample)))


def expected_matrix(graph: Graph, config: Config, ids: Any, edges: Any) -> Any:
    """The block's matrix with what each drawn edge counts, from the setting's definition alone: float64 (T, S)."""
    sample, dense = config.sample, dense_csr(graph.adj_t)
    targets = edges.indptr.size - 1
    out = np.zeros((targets, ids.size))
    for t in range(targets):
        own = out[t]
        places = edges.indices[edges.indptr[t] : edges.indptr[t + 1]]
        neighbours = [s for s in places if not (config.model.self_loops and s == t)]
        degree = np.count_nonzero(dense[ids[t]]) - bool(config.model.self_loops and dense[ids[t], ids[t]])
        for s in neighbours:
            own[s] = degree / len(neighbours) if sample.weights != "block" else 1.0
        if config.model.self_loops:
            own[t] = 1.0
    return out


class Sampled(Twin):
    """The twin over a batch of the feed: what edges count is the feed's, or computed anew."""

    def __init__(self, graph: Graph, config: Config, batch: Batch, p: Any, blocks: Any, own_values: bool) -> None:
        super().__init__(graph, config.model, batch, p, blocks)
        if not own_values or config.model.attends or config.model.aggregator == "max":
            return
        rows = batch.rows
        self.blocks = [
            (torch.from_numpy(expected_matrix(graph, config, rows[b.sources], batch.edges[b])), row, col)
            for b, (_, row, col) in zip(blocks, self.blocks, strict=True)
        ]


def reference(config: Config, graph: Graph, found: list[Any], own_values: bool) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step of all ranks by autograd."""
    p = {name: w.double().clone().requires_grad_() for name, w in found[0]["weights"].items()}
    labels = graph.labels.array().astype(np.int64)  # type: ignore[union-attr]
    with torch.enable_grad():
        loss = torch.zeros((), dtype=torch.float64)
        for rank in found:
            batch, stack = rank["batch"], rank["stack"]
            z = Sampled(graph, config, batch, p, stack.blocks, own_values).logits()
            wanted = torch.from_numpy(labels[batch.rows[stack.seeds]])
            loss = loss + torch.nn.functional.cross_entropy(z, wanted, reduction="sum") / batch.seeds.size
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {n: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for n, v in p.items()}


def step_of(rank: Rank) -> dict[str, Any]:
    """A step's loss, gradients and batch."""
    # The batch comes first: an epoch that the trainer has begun draws later ones into the same memory.
    batch = next(rank.feed.epoch(8123, 2))
    loss = rank.trainer.gradients(2)
    rows = {name: ids.copy() for name, ids in batch.rows.items()}
    return {
        "loss": loss,
        "grads": {n: g.cpu().numpy().copy() for n, g in rank.trainer.runtime.weights.grads.items()},
        "weights": rank.trainer.runtime.weights.state_dict(),
        "batch": dataclasses.replace(batch, rows=rows),
        "stack": rank.feed.stack,
    }


def compare(config: Config, graph: Graph, own_values: bool, where: Where = CPU) -> None:
    found = on_ranks(where.config(config), graph, step_of, device_of=where.device_of)
    loss, expected = reference(config, graph, found, own_values)
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-12)
    for key, gradient in expected.items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0]["grads"][key], gradient, atol=atol, err_msg=key)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_batch(name: str, ranks: int) -> None:
    """Fails if a batch's gradient is not that of what was drawn, an edge counts otherwise than its chance says, or the loss
    is not the mean over all ranks' seeds.
    """
    compare(sampled(ranks, MODELS[name]), graph_of(), own_values=True)


@pytest.mark.parametrize(("where", "name"), everywhere(["gcn", "sage", "gat", "sage-max"]))
def test_gradients_of_a_batch_on_every_device(where: Where, name: str) -> None:
    """Fails if what a batch brings to a device is not what the host drew."""
    compare(sampled(1, MODELS[name]), graph_of(), own_values=True, where=where)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("hidden", [6, 20])
def test_gradients_of_every_draw(draw: str, loops: bool, hidden: int) -> None:
    """Fails if a way to draw, or what its edges count, gives another gradient than autograd over the same batch.

    With 20 columns no gradient flows back through the last hop, which is then not transposed.
    """
    config = sampled(1, {"kind": "gcn", "self_loops": loops, "hidden": (hidden,)}, **DRAWS[draw])
    compare(config, graph_of(), own_values=draw in ("uniform", "block"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", [*MODELS, "sgc", "appnp"])
def test_all_neighbours_give_the_whole_graphs_gradient(name: str, ranks: int) -> None:
    """Fails if seeds, neighbours or what they count are not all of the whole graph's."""
    graph = graph_of()
    model = MODELS.get(name, {"kind": name, "hops": 2} | ({"hidden": ()} if name == "sgc" else {}))
    for loops in (False, True):
        own = (
            {}
            if model["kind"] in ("gin", "gat", "gatv2") or model.get("aggregator") == "max"
            else {"self_loops": loops}
        )
        batches = sampled(ranks, model | own, batch=1000, fanout=(60, ALL))
        whole = dataclasses.replace(batches, sample=SampleConfig())
        found = [
            on_ranks(config, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]
            for config in (batches, whole)
        ]
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
        for key, gradient in found[1][1].items():
            atol = 1e-10 * (np.abs(gradient).max() or 1)
            np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


LOSSES: dict[str, dict[str, Any]] = {
    "weights of classes": {"class_weights": "balanced"},
    "smoothing": {"label_smoothing": 0.2},
    "ignored": {"ignored_labels": (1,), "class_weights": "balanced", "label_smoothing": 0.1},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_all_seeds_are_the_whole_graphs(name: str, ranks: int) -> None:
    """Fails if classes are weighted, smoothed or left out otherwise in a batch of all seeds than over the whole graph."""
    batches = sampled(ranks, {"kind": "gcn"}, batch=1000, fanout=(60, ALL))
    batches = dataclasses.replace(batches, train=dataclasses.replace(batches.train, **LOSSES[name]))
    found = [
        on_ranks(config, graph_of(), lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]
        for config in (batches, dataclasses.replace(batches, sample=SampleConfig()))
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for key, gradient in found[1][1].items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


def test_drawn_by_class_the_loss_is_the_weighted_one_on_average() -> None:
    """Fails if classes are weighted twice or not at all, or their vertices are not drawn as often as they weigh."""
    whole = config_of(1, {"kind": "gcn"}, class_weights="1,0.5,2,1", ignored_labels=(3,))
    batches = dataclasses.replace(whole, sample=SampleConfig(batch=8, fanout=(ALL, ALL), deal="by-class"))
    losses = on_ranks(batches, graph_of(), lambda rank: [rank.trainer.gradients(e) for e in range(150)])[0]
    exact = on_ranks(whole, graph_of(), lambda rank: rank.trainer.gradients(0))[0]
    error = np.std(losses) / np.sqrt(len(losses))
    assert 0 < error < 0.05
    assert np.mean(losses) == pytest.approx(exact, abs=3.5 * error)


def grads_of(rank: Rank) -> dict[str, Any]:
    return {n: g.numpy().copy() for n, g in rank.trainer.runtime.weights.grads.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor"])
def test_the_mean_of_many_draws_is_the_whole_graphs_sum(seed: int, draw: str) -> None:
    """Fails if an unbiased estimate of A_hat X is biased: a chi-square over all entries of its mean, with self-loops."""
    graph = graph_of()
    config = sampled(1, {"kind": "gcn", "hidden": (), "self_loops": True}, (3,), batch=1000, draw=draw)

    def estimates(rank: Rank) -> Any:
        (block,) = rank.feed.stack.blocks
        sums, squares, count = 0.0, 0.0, 1500
        for step in range(count):
            batch = next(rank.feed.epoch(seed, step))
            dense = np.zeros((graph.num_vertices, graph.num_vertices))
            edges, sources = batch.edges[block], batch.rows[block.sources]
            rows = np.repeat(batch.rows[block.targets], np.diff(edges.indptr))
            dense[rows, sources[edges.indices]] = edges.values
            sums, squares = sums + dense, squares + dense**2
        return sums / count, squares / count, count

    ((mean, square, count),) = on_ranks(config, graph, estimates)
    exact = dense_csr(graph.adj_t)
    np.fill_diagonal(exact, 1.0)
    exact[graph.splits["train"].array()[0] == 0] = 0
    spread = np.sqrt(np.maximum(square - mean**2, 0) / count)
    random = spread > 0
    np.testing.assert_allclose(mean[~random], exact[~random], atol=1e-6)
    scores = ((mean - exact)[random] / spread[random]) ** 2
    # Of a row's entries all but one are free; entries of other rows are independent but for LABOR: its mean is compared.
    assert scores.mean() == pytest.approx(1.0, abs=0.35)


def test_ranks_and_threads_change_no_batch() -> None:
    """Fails if the batches drawn beside the step differ from those drawn in turn, or those of ranks are not one batch."""
    graph = make_graph(pattern("directed", 200, 3), num_features=5, num_classes=3, sparse=False, weighted=False, seed=2)
    losses = {}
    for ranks, ahead in ((1, 0), (1, 3), (2, 1), (3, 2), (4, 0)):
        config = sampled(ranks, {"kind": "sage", "aggregator": "mean", "dropout": 0.5}, batch=20, ahead=ahead)
        train = dataclasses.replace(config.train, epochs=3)
        config = dataclasses.replace(config, train=train)
        losses[ranks, ahead] = on_ranks(config, graph, lambda rank: [rank.trainer.step(e) for e in range(3)])[0]
    assert losses[1, 0] == losses[1, 3]
    for found in losses.values():
        np.testing.assert_allclose(found, losses[1, 0], rtol=1e-11)


def test_weighted_edges_keep_their_weights() -> None:
    """Fails if the weight of a drawn edge is lost, or that of another one."""
    graph = make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, sparse=False, weighted=True, seed=4)
    values = np.random.default_rng(1).random(graph.adj_t.nnz).astype(np.float32) + 0.5
    graph = dataclasses.replace(graph, adj_t=dataclasses.replace(graph.adj_t, values=ArrayRows(values)))
    config = sampled(1, {"kind": "gcn", "self_loops": True})

    def body(rank: Rank) -> Any:
        batch = next(rank.feed.epoch(1, 0))
        rows = batch.rows
        return [(rows[b.targets].copy(), rows[b.sources].copy(), batch.edges[b]) for b in rank.feed.stack.blocks]

    dense, pattern_ = dense_csr(graph.adj_t), dense_csr(dataclasses.replace(graph.adj_t, values=None))
    for targets, sources, edges in on_ranks(config, graph, body)[0]:
        for t, v in enumerate(targets):
            places = edges.indices[edges.indptr[t] : edges.indptr[t + 1]]
            drawn = [s for s in places if s != t]
            degree = np.count_nonzero(pattern_[v]) - bool(pattern_[v, v])
            for s, value in zip(places, edges.values[edges.indptr[t] : edges.indptr[t + 1]], strict=True):
                wanted = (dense[v, v] or 1.0) if s == t else dense[v, sources[s]] * degree / len(drawn)
                assert value == pytest.approx(wanted, rel=1e-6)


def test_scales_of_a_block_are_its_degrees() -> None:
    """Fails if sample.weights block normalises by the whole graph's degrees."""
    config = sampled(1, {"kind": "gcn"}, weights="block")

    def body(rank: Rank) -> Any:
        batch = next(rank.feed.epoch(1, 0))
        block = rank.feed.stack.blocks[-1]
        assert batch.scales is not None
        return batch.edges[block], batch.scales[block.targets][0], batch.scales[block.sources][1]

    edges, row, col = on_ranks(config, graph_of(), body)[0]
    into = np.diff(edges.indptr)
    out_of = np.bincount(edges.indices, minlength=col.size)
    np.testing.assert_allclose(row, scales(into.astype(float), "symmetric")[0], rtol=1e-12)
    np.testing.assert_allclose(col, scales(out_of.astype(float), "symmetric")[1], rtol=1e-12)
