"""Training on sampled batches: gradients are those of the sampled formula, and with all neighbours the whole graph's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from mggcn import native
from mggcn.assemble.rank import Rank
from mggcn.config import Config, SampleConfig
from mggcn.feed.batch import Batch
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.partition.rows.tiles import scales
from mggcn.planning import op_cost
from mggcn.planning.batches import draws_of
from tests.blocks.sample_twin import Twin as DrawTwin
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


def expected_values(config: Config, weights: Any, v: int, drawn: Any, counts: Any, fanout: int) -> Any:
    """What the entries of a row count, from the settings' definitions alone, float64.

    weights (N,): of the in-edges of v, NaN where there is none, all 1 in a graph without. drawn: the vertices of the
    entries, ascending; counts: how often each was drawn.
    """
    sample, loops = config.sample, config.model.self_loops
    stored, own = weights[~np.isnan(weights)], drawn == v
    if loops:
        stored = np.delete(weights, v)[~np.isnan(np.delete(weights, v))]
    mine, others = weights[drawn], ~own if loops else np.ones(drawn.size, bool)
    degree, most = stored.size, stored.size if fanout == ALL else fanout
    if sample.weights == "block":
        values = mine
    elif sample.draw == "weight":
        whole = fanout == ALL or (stored > 0).sum() <= fanout
        values = mine if whole else np.full(mine.size, stored.sum() / max(others.sum(), 1))
    elif sample.draw.startswith("labor") and sample.weights == "unbiased":
        values = mine * float(np.float32(max(degree / max(most, 1), 1.0)))  # as the sampler keeps it
    else:
        values = mine * counts * (degree / max(counts[others].sum(), 1))
    return np.where(others, values, 1.0 if np.isnan(weights[v]) else weights[v])


def expected_matrix(graph: Graph, config: Config, ids: Any, edges: Any, fanout: int) -> Any:
    """The block's matrix with what each drawn edge counts, of draws without repeats: float64 (T, S)."""
    dense = dense_csr(graph.adj_t)
    out = np.zeros((edges.indptr.size - 1, ids.size))
    for t, row in enumerate(out):
        places = edges.indices[edges.indptr[t] : edges.indptr[t + 1]]
        weights = np.where(dense[ids[t]] != 0, dense[ids[t]], np.nan)
        row[places] = expected_values(config, weights, ids[t], ids[places], np.ones(places.size), fanout)
    return out


class Sampled(Twin):
    """The twin over a batch of the feed: what edges count is the feed's, or computed anew."""

    def __init__(self, graph: Graph, config: Config, batch: Batch, p: Any, blocks: Any, own_values: bool) -> None:
        super().__init__(graph, config.model, batch, p, blocks)
        if not own_values or config.model.attends or config.model.aggregator == "max":
            return
        rows = batch.rows
        self.blocks = [
            (torch.from_numpy(expected_matrix(graph, config, rows[b.sources], batch.edges[b], fanout)), row, col)
            for b, fanout, (_, row, col) in zip(blocks, config.sample.fanout[::-1], self.blocks, strict=True)
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
        "step": 2 * rank.feed.num_steps,
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
    compare(config, graph_of(), own_values=draw != "replace")


@pytest.mark.covering(1, rest="slow")
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


def weighted_graph(zeros: bool = False) -> Graph:
    """Edges of random weights; a fifth of them 0 if asked for, in adj_t alone."""
    rng = np.random.default_rng(1)
    adj = pattern("directed", 61, 5) * (rng.random((61, 61)) + 0.5)
    graph = make_graph(adj, num_features=7, num_classes=4, weighted=True, seed=4)
    if not zeros:
        return graph
    values = graph.adj_t.values.array() * (rng.random(graph.adj_t.nnz) < 0.8)  # type: ignore[union-attr]  # weighted
    adj_t = dataclasses.replace(graph.adj_t, values=ArrayRows(values.astype(np.float32)))
    return dataclasses.replace(graph, adj_t=adj_t)


@pytest.mark.parametrize("draw", ["uniform", "replace", "weight", "labor", "labor-one"])
@pytest.mark.parametrize("loops", [False, True])
def test_all_neighbours_of_every_draw_give_the_whole_graphs_gradient(loops: bool, draw: str) -> None:
    """Fails if edges count other than their weights where all are taken and nothing is random."""
    graph, model = weighted_graph(), {"kind": "sage", "aggregator": "mean", "self_loops": loops}
    for weights in ("unbiased", "mean"):
        for fanout in ((ALL, ALL), *([] if draw == "replace" else [(60, ALL)])):
            batches = sampled(1, model, fanout, batch=1000, draw=draw, weights=weights)
            found = [
                on_ranks(config, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]
                for config in (batches, dataclasses.replace(batches, sample=SampleConfig()))
            ]
            assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
            for key, gradient in found[1][1].items():
                atol = 1e-10 * (np.abs(gradient).max() or 1)
                np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


@pytest.mark.parametrize("weights", ["unbiased", "mean", "block"])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor", "labor-one"])
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_weights_of_1_are_no_weights(name: str, draw: str, weights: str) -> None:
    """Fails if the gradient of a graph whose weights are all 1 is not that of the graph without weights, bit for bit."""
    graph = graph_of()
    adj, adj_t = (
        dataclasses.replace(m, values=ArrayRows(np.ones(m.nnz, np.float32))) for m in (graph.adj, graph.adj_t)
    )
    config = sampled(1, MODELS[name], (6, 4), batch=1000, draw=draw, weights=weights)
    found = [
        on_ranks(config, of, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]
        for of in (graph, dataclasses.replace(graph, adj=adj, adj_t=adj_t))
    ]
    assert found[0][0] == found[1][0]
    for key, gradient in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][key], gradient, err_msg=key)


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


def covariances(dense: Any, targets: Any, fanout: int, draw: str) -> list[tuple[Any, Any, Any]]:
    """Rows, columns and covariance of the values of edges that are not independent; other edges' values are.

    dense (N, N): 1 for each edge that may be drawn. LABOR takes (t, s) iff the number of s is below c_t = f / degree_t.
    """
    degree = dense.sum(1)
    if draw == "labor":
        chance = np.minimum(1, fanout / np.maximum(degree, 1))
        rows = [targets[(dense[targets, s] > 0) & (chance[targets] < 1)] for s in range(dense.shape[0])]
        return [
            (t, np.full(t.size, s), 1 / np.maximum.outer(chance[t], chance[t]) - 1)
            for s, t in enumerate(rows)
            if t.size
        ]
    found = []
    for t in targets[degree[targets] > (1 if draw == "replace" else fanout)]:
        d = degree[t]
        variance = (d - 1) / fanout if draw == "replace" else d / fanout - 1
        columns = np.flatnonzero(dense[t])
        found.append((np.full(columns.size, t), columns, variance * (d * np.eye(columns.size) - 1) / (d - 1)))
    return found


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor"])
def test_the_mean_of_many_draws_is_the_whole_graphs_sum(seed: int, draw: str) -> None:
    """Fails if an unbiased estimate of A_hat X is biased: a chi-square over all entries of its mean, with self-loops."""
    graph, count, fanout = graph_of(), 1500, 3
    config = sampled(1, {"kind": "gcn", "hidden": (), "self_loops": True}, (fanout,), batch=1000, draw=draw)

    def estimates(rank: Rank) -> Any:
        (block,) = rank.feed.stack.blocks
        total = np.zeros((graph.num_vertices, graph.num_vertices))
        for step in range(count):
            batch = next(rank.feed.epoch(seed, step))
            edges, sources = batch.edges[block], batch.rows[block.sources]
            rows = np.repeat(batch.rows[block.targets], np.diff(edges.indptr))
            total[rows, sources[edges.indices]] += edges.values
        return total / count

    (mean,) = on_ranks(config, graph, estimates)
    targets = np.flatnonzero(graph.splits["train"].array()[0])
    edges = dense_csr(graph.adj_t)
    np.fill_diagonal(edges, 0.0)
    error = mean.copy()
    error[targets] -= (edges + np.eye(graph.num_vertices))[targets]
    statistic, free, random = 0.0, 0, np.zeros(mean.shape, bool)
    for rows, columns, covariance in covariances(edges, targets, fanout, draw):
        of = error[rows, columns]
        statistic += count * float(of @ np.linalg.pinv(covariance, hermitian=True) @ of)
        free += int(np.linalg.matrix_rank(covariance, hermitian=True))
        random[rows, columns] = True
    np.testing.assert_allclose(error[~random], 0, atol=1e-6)
    assert free > 100
    assert chi2.sf(statistic, free) > 0.001


@pytest.mark.parametrize("draw", ["uniform", "replace", "labor", "labor-one"])
def test_ranks_draw_the_same_edges(draw: str) -> None:
    """Fails if the set of (hop, target, source) of a step, of all ranks together, depends on their number."""
    graph = make_graph(pattern("directed", 200, 3), num_features=5, num_classes=3, sparse=False, weighted=False, seed=2)

    def triples(rank: Rank) -> list[set[tuple[int, int, int]]]:
        stack, found = rank.feed.stack, list[set[tuple[int, int, int]]]()
        assert stack is not None
        for batch in rank.feed.epoch(8123, 1):
            found.append(set())
            for hop, block in enumerate(reversed(stack.blocks)):
                edges = batch.edges[block]
                targets = np.repeat(batch.rows[block.targets], np.diff(edges.indptr)).tolist()
                sources = batch.rows[block.sources][edges.indices].tolist()
                found[-1].update((hop, t, s) for t, s in zip(targets, sources, strict=True))
        return found

    of_ranks = []
    for ranks in (1, 2, 3, 4):
        config = sampled(ranks, {"kind": "sage", "aggregator": "mean"}, (4, 3), batch=24, draw=draw)
        parts = on_ranks(config, graph, triples)
        of_ranks.append([set().union(*(part[step] for part in parts)) for step in range(len(parts[0]))])
    assert len(of_ranks[0]) > 2
    assert all(of_ranks[0])
    assert of_ranks == of_ranks[:1] * 4


def test_ranks_and_threads_change_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the batches drawn beside the step differ from those drawn in turn, threads change a bit, or those of ranks
    are not one batch.
    """
    graph = make_graph(pattern("directed", 200, 3), num_features=5, num_classes=3, sparse=False, weighted=False, seed=2)
    for work in ("SMALL_ROWS", "SMALL_WORK", "SHORT_WORK"):
        monkeypatch.setattr(op_cost, work, 0)  # so small a graph would have one thread
    losses, steps = {}, range(20)
    for ranks, ahead, threads in (
        (1, 0, 1),
        (1, 3, 1),
        (1, 0, 2),
        (1, 1, 2),
        (2, 1, 1),
        (2, 0, 2),
        (3, 2, 1),
        (4, 0, 1),
    ):
        config = sampled(ranks, {"kind": "sage", "aggregator": "mean", "dropout": 0.5}, batch=20, ahead=ahead)
        train, run = (dataclasses.replace(config.train, epochs=20), dataclasses.replace(config.run, threads=threads))
        config = dataclasses.replace(config, train=train, run=run)
        losses[ranks, ahead, threads] = on_ranks(config, graph, lambda rank: [rank.trainer.step(e) for e in steps])[0]
    for key, found in losses.items():
        if key[0] == 1:
            assert found == losses[1, 0, 1], key
        np.testing.assert_allclose(found, losses[1, 0, 1], rtol=1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
@pytest.mark.parametrize("weights", ["unbiased", "mean", "block"])
@pytest.mark.parametrize("draw", ["uniform", "replace", "weight", "labor", "labor-one"])
def test_what_edges_with_weights_count(draw: str, weights: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a weight is lost, that of another edge, or counts where a draw has it in its chance; or if an edge counts
    otherwise than the settings' definitions say.
    """
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    plain = native.kernel
    monkeypatch.setattr(native, "kernel", lambda name, kind="", set_="": plain(name, kind, set_ or isa))
    graph, whole, random = weighted_graph(zeros=True), 0, 0
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.adj_t.indptr.array()))
    dense = np.full((graph.num_vertices, graph.num_vertices), np.nan)
    dense[rows, graph.adj_t.indices.array()] = graph.adj_t.values.array()  # type: ignore[union-attr]  # weighted

    def body(rank: Rank) -> Any:
        batch = next(rank.feed.epoch(1, 0))
        blocks = reversed(rank.feed.stack.blocks)
        return [(batch.rows[b.targets].copy(), batch.rows[b.sources].copy(), batch.edges[b]) for b in blocks]

    for loops, fanout in itertools.product((False, True), ((3, 9), (ALL, 2))):
        config = sampled(1, {"kind": "gcn", "self_loops": loops}, fanout, draw=draw, weights=weights)
        found = on_ranks(config, graph, body)[0]
        twin = DrawTwin(graph.adj_t, draws_of(config.sample), self_loops=loops).draw(found[0][0], 1, 0)
        for (targets, sources, edges), hop, most in zip(found, twin[2], fanout, strict=True):
            for t, v in enumerate(targets):
                row = slice(edges.indptr[t], edges.indptr[t + 1])
                drawn = sources[edges.indices[row]]
                counts = np.array(hop.values[row]) if draw == "replace" else np.ones(drawn.size)
                expected = expected_values(config, dense[v], v, drawn, counts, most)
                np.testing.assert_allclose(edges.values[row], expected, rtol=1e-6)
                taken = drawn.size == np.count_nonzero(~np.isnan(dense[v])) + bool(loops and np.isnan(dense[v, v]))
                whole, random = whole + taken, random + (not taken)
    assert min(whole, random) > 20


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
