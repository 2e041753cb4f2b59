"""Training on links: gradients and scores of the whole graph and of batches, beside float64 autograd of dense formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from torch import Tensor

from mggcn.assemble.rank import Rank
from mggcn.config import Config, LinksConfig, ModelConfig, RunConfig, SampleConfig, TrainConfig
from mggcn.feed.pairs import STREAM, LinkDraws
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.generate import community
from mggcn.graph.links import split_links
from mggcn.graph.philox import draw_below
from mggcn.model.kinds import pairs
from mggcn.model.kinds.combine import Scaled
from mggcn.model.network import make_values
from mggcn.model.values import Adjoint, Value
from tests.devices import CPU, WHERE, Where
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, pattern
from tests.reference import dense_csr, dense_features, dropout_mask, normalized

N, SEED, EPOCH = 61, 8123, 2
Ends = tuple[np.ndarray, np.ndarray, np.ndarray]


def graph_of(kind: str = "random", negatives: int = 7) -> Graph:
    graph = make_graph(pattern(kind, N, 5), num_features=7, num_classes=2, seed=4, weighted=kind == "weighted")
    return split_links(graph, (0.7, 0.15, 0.15), negatives=negatives, seed=3)


def config_of(
    ranks: int = 1,
    model: Mapping[str, Any] = {},
    run: Mapping[str, Any] = {},
    sample: Mapping[str, Any] = {},
    **links: Any,
) -> Config:
    kinds: dict[str, Any] = {"hidden": (6,), "dropout": 0.0} | dict(model)
    where: dict[str, Any] = {"precision": "fp64", "transport": "threads" if ranks > 1 else "auto"} | dict(run)
    return Config(
        model=ModelConfig(**kinds),
        train=TrainConfig(seed=SEED, epochs=4),
        sample=SampleConfig(**sample),
        links=LinksConfig(**({"embedding": 5} | links)),
        run=RunConfig(ranks=ranks, threads=1, **where),
    )


def ends_of(graph: Graph, config: Config, chosen: np.ndarray, step: int) -> Ends:
    """Sources, destinations and labels of all pairs of a step's links, by the names of their draws alone."""
    links, count = graph.links["train"].array().astype(np.int64), config.links.negatives

    def drawn(among: list[int], link: int) -> list[int]:
        places = draw_below(len(among), (SEED, step), np.array([link]), count, stream=STREAM)[0]
        return [among[place] for place in places]

    of_step = sorted(links[chosen, 1].tolist()) if config.links.negatives_from == "in-batch" else []
    negatives = []
    for link, (source, destination) in zip(chosen.tolist(), links[chosen].tolist(), strict=True):
        among = [v for v in of_step if v not in (source, destination)]
        negatives += drawn(among or [v for v in range(graph.num_vertices) if v != source], link)
    sources, destinations = links[chosen].T
    heads = np.concatenate([sources, np.repeat(sources, count)])
    return heads, np.concatenate([destinations, negatives]), np.arange(heads.size) < chosen.size


def decoded(p: Mapping[str, Tensor], config: Config, x: Tensor) -> Tensor:
    """Scores of pairs from the product of their embeddings."""
    layers = len(config.model.hidden) + 1
    if not config.links.decoder:
        return x.sum(1)
    for number in range(len(config.links.decoder) + 1):
        x = torch.relu(x) if number else x
        x = x @ p[f"layers.{layers + number + 1}.weight"] + p[f"layers.{layers + number + 1}.bias"]
    return x[:, 0]


def reference(config: Config, graph: Graph, a_hat: np.ndarray, p: Mapping[str, Tensor], ends: Ends, step: int) -> Any:
    """Loss, gradients and embeddings of a GCN over a dense matrix."""
    params = {name: w.double().clone().requires_grad_() for name, w in p.items()}
    layers, h = len(config.model.hidden) + 1, torch.from_numpy(dense_features(graph))
    with torch.enable_grad():
        for layer in range(1, layers + 1):
            h = torch.from_numpy(a_hat) @ (h @ params[f"layers.{layer}.weight"]) + params[f"layers.{layer}.bias"]
            if layer < layers:
                mask = dropout_mask(np.arange(N), h.shape[1], config.model.dropout, SEED, step, layer)
                h = torch.relu(h) * torch.from_numpy(mask)
        heads, tails, labels = map(torch.from_numpy, ends)
        scores = decoded(params, config, h[heads] * h[tails])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels.double())
        loss.backward()
    return float(loss.detach()), {n: w.grad.numpy() for n, w in params.items()}, h.detach()  # type: ignore[union-attr]  # all have one


def first_step(rank: Rank) -> dict[str, Any]:
    trainer = rank.trainer
    loss = trainer.gradients(EPOCH)
    grads = {n: g.cpu().numpy().copy() for n, g in trainer.runtime.weights.grads.items()}
    return {"loss": loss, "grads": grads, "weights": trainer.runtime.weights.state_dict(), "links": trainer.links()}


def compare(found: list[dict[str, Any]], loss: float, grads: Mapping[str, np.ndarray]) -> None:
    assert found[0]["loss"] == pytest.approx(loss, rel=1e-12)
    assert found[0]["grads"].keys() == grads.keys()
    for name, gradient in grads.items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0]["grads"][name], gradient, atol=atol, err_msg=name)


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "dot": ("random", {}),
    "dot of a directed graph": ("directed", {"negatives": 3, "model": {"dropout": 0.4}}),
    "network": ("weighted", {"decoder": (4, 3), "negatives": 2}),
    "in-batch": ("random", {"negatives_from": "in-batch", "negatives": 2, "decoder": (4,)}),
    "permuted": ("random", {"run": {"order": "permute"}}),
    "halo": ("random", {"run": {"strategy": "halo"}}),
    "slice": ("random", {"run": {"strategy": "slice"}}),
    "vertex cut": ("random", {"run": {"strategy": "delayed"}, "decoder": (4,)}),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.covering(1)
def test_gradients_and_scores_of_the_whole_graph(name: str, ranks: int, where: Where) -> None:
    """Fails if a pair is lost, drawn by another name, or scored by other rows; if its gradient does not reach both ends, on
    whichever rank; or if links are scored with weights or negatives other than theirs.
    """
    kind, settings = WHOLE[name]
    graph, config = graph_of(kind), where.config(config_of(ranks, **settings))
    found = on_ranks(config, graph, first_step, device_of=where.device_of)
    ends = ends_of(graph, config, np.arange(graph.links["train"].shape[0]), EPOCH)
    a_hat = normalized(graph, config.model)
    loss, grads, _ = reference(config, graph, a_hat, found[0]["weights"], ends, EPOCH)
    compare(found, loss, grads)
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    weights = {n: w.double() for n, w in found[0]["weights"].items()}
    _, _, z = reference(plain, graph, a_hat, weights, ends, EPOCH)
    for rank in found:
        assert rank["links"] == found[0]["links"]
        assert rank["links"].keys() == {"val", "test"}
        for part, scores in rank["links"].items():
            links = graph.links[part].array()
            all_scores = decoded(weights, config, (z[links[:, :1]] * z[links[:, 1:]]).flatten(0, 1)).reshape(
                len(links), -1
            )
            positive, negative = all_scores[:, 0].numpy(), all_scores[:, 1:].numpy()
            labels = np.repeat([1, 0], [positive.size, negative.size])
            auc = oracle.roc_auc_score(labels, np.concatenate([positive, negative.ravel()]))
            assert scores["roc_auc"] == pytest.approx(auc, rel=1e-12)
            ranked = (negative > positive[:, None]).sum(1) + 0.5 * (negative == positive[:, None]).sum(1) + 1
            assert scores["mrr"] == pytest.approx((1 / ranked).mean(), rel=1e-12)
            best = np.sort(negative.ravel())[-10]
            assert scores["hits@10"] == pytest.approx((positive > best).mean(), rel=1e-12)


@pytest.mark.parametrize("kind", [pairs.Everyone, pairs.PairDot, pairs.PairProduct])
def test_planted_faults_are_seen(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if half of the gradient of pairs could be lost and nothing would be noticed."""
    original = kind.adjoint

    def half(self: Any, value: Value, gradient: Value) -> Adjoint:
        found = original(self, value, gradient)
        return Adjoint(tuple(Value(Scaled(0.5), (one,), one.cols) for one in found.operands), found.effects)

    monkeypatch.setattr(kind, "adjoint", half)
    make_values.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_gradients_and_scores_of_the_whole_graph("network" if kind is pairs.PairProduct else "dot", 2, CPU)
    finally:
        make_values.cache_clear()


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("links", [[[3, 7]], [[1, 7], [2, 7], [7, 1]], [[0, 1], [1, 2], [2, 0]]])
def test_a_link_is_not_its_own_negative(links: list[list[int]], in_batch: bool) -> None:
    """Fails if an end of a link is drawn for it, other than its destination where a step has no other."""
    pairs = np.array(links, np.int32)
    every = np.arange(len(pairs))
    heads, tails = LinkDraws(ArrayRows(pairs), 9, 200, in_batch).ends(SEED, EPOCH, every, every)
    drawn = tails[len(pairs) :].reshape(-1, 200)
    np.testing.assert_array_equal(heads[len(pairs) :], np.repeat(pairs[:, 0], 200))
    for (source, destination), some in zip(links, drawn.tolist(), strict=True):
        others = {v for _, v in links} - {source, destination} if in_batch else set()
        assert set(some) == (others or set(range(9)) - {source})


def without(graph: Graph, links: np.ndarray) -> np.ndarray:
    """A_hat of a batch that draws all neighbours: a step's links are left out, and what is left of a row counts as all."""
    adj_t = dense_csr(graph.adj_t)
    degree, count = adj_t.sum(1), (adj_t != 0).sum(1)
    left = adj_t.copy()
    left[links[:, 1], links[:, 0]] = left[links[:, 0], links[:, 1]] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        left *= np.nan_to_num(count / (left != 0).sum(1), posinf=0)[:, None]
        scale = np.where(degree > 0, degree**-0.5, 0)
    return np.asarray(scale[:, None] * left * scale[None, :])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "links", [{}, {"decoder": (4,), "negatives": 3}, {"negatives_from": "in-batch"}], ids=["dot", "network", "in-batch"]
)
@pytest.mark.parametrize("kind", ["random", "directed"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.covering(2)
def test_gradients_of_a_batch_with_all_neighbours(kind: str, links: dict[str, Any], ranks: int, where: Where) -> None:
    """Fails if a batch's pairs are other than their names say, its own links are read, or the loss is not the mean over the
    pairs of all ranks.
    """
    graph = graph_of(kind)
    config = where.config(config_of(ranks, {"self_loops": False}, sample={"batch": 23, "fanout": (-1, -1)}, **links))

    def body(rank: Rank) -> dict[str, Any]:
        seeds = next(rank.feed.epoch(SEED, EPOCH)).seeds.copy()
        return first_step(rank) | {"seeds": seeds, "step": EPOCH * rank.feed.num_steps}

    found = on_ranks(config, graph, body, device_of=where.device_of)
    chosen, step = found[0]["seeds"], found[0]["step"]
    assert chosen.size == 23
    a_hat = without(graph, graph.links["train"].array()[chosen])
    loss, grads, _ = reference(config, graph, a_hat, found[0]["weights"], ends_of(graph, config, chosen, step), step)
    compare(found, loss, grads)


@pytest.mark.parametrize("kind", ["random", "directed"])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor"])
@pytest.mark.covering(1)
def test_a_steps_links_are_in_none_of_its_blocks(kind: str, draw: str) -> None:
    """Fails if a link of a step, of any rank, or its reverse is drawn in any hop of any rank's batch."""
    graph = graph_of(kind)
    links, drawn = graph.links["train"].array(), 0

    def body(rank: Rank) -> int:
        stack, count = rank.feed.stack, 0
        assert stack is not None
        for epoch in range(6):
            for batch in rank.feed.epoch(SEED + epoch, epoch):
                mine = links[batch.seeds]
                left_out = {(int(a), int(b)) for u, v in mine for a, b in ((u, v), (v, u))}
                for block in stack.blocks:
                    edges = batch.edges[block]
                    targets = np.repeat(batch.rows[block.targets], np.diff(edges.indptr))
                    sources = batch.rows[block.sources][edges.indices]
                    both = set(zip(sources.tolist(), targets.tolist(), strict=True))
                    assert not {pair for pair in both if pair[0] != pair[1]} & left_out
                    count += len(both)
        return count

    for ranks in (1, 2):
        config = config_of(ranks, sample={"batch": 30, "fanout": (6, 4), "draw": draw})
        drawn += sum(on_ranks(config, graph, body))
    assert drawn > 1000


@pytest.mark.parametrize("draw", ["uniform", "replace", "weight", "labor", "labor-one"])
@pytest.mark.parametrize("kind", ["directed", "weighted"])
def test_what_is_left_counts_as_all_edges(kind: str, draw: str) -> None:
    """Fails if the edges that remain of a vertex, without a step's own links, are not scaled up to all of them."""
    if draw == "weight" and kind != "weighted":
        pytest.skip("an unweighted graph is not drawn by weight")
    graph, parts = graph_of(kind), 0
    weights, links = dense_csr(graph.adj_t), graph.links["train"].array()
    left = weights.copy()

    def body(rank: Rank) -> Any:
        batch = next(rank.feed.epoch(SEED, 0))
        blocks = reversed(rank.feed.stack.blocks)
        edges = [(batch.rows[b.targets].copy(), batch.rows[b.sources].copy(), batch.edges[b]) for b in blocks]
        return batch.seeds.copy(), edges

    for fanouts in ((-1, -1), (3, 2)):
        sample = {"batch": 40, "fanout": fanouts, "draw": draw}
        chosen, blocks = on_ranks(config_of(1, {"self_loops": False}, sample=sample), graph, body)[0]
        left[:] = weights
        for u, v in links[chosen]:
            left[u, v] = left[v, u] = 0
        for (targets, sources, edges), fanout in zip(blocks, fanouts, strict=True):
            for t, v in enumerate(targets):
                row = slice(edges.indptr[t], edges.indptr[t + 1])
                drawn, values = sources[edges.indices[row]], edges.values[row]
                stored, there = np.count_nonzero(weights[v]), np.count_nonzero(left[v])
                parts += 0 < there < stored
                counted = there if fanout == -1 else min(fanout, there)
                if not drawn.size:
                    continue
                if draw == "weight":
                    expected = left[v, drawn] if counted == there else np.ones(drawn.size)
                    np.testing.assert_allclose(values, expected * weights[v].sum() / expected.sum(), rtol=1e-6)
                elif draw == "replace":
                    assert (values / weights[v, drawn]).sum() == pytest.approx(stored, rel=1e-6)
                else:
                    np.testing.assert_allclose(values, weights[v, drawn] * stored / counted, rtol=1e-6)
    assert parts > 10


def test_ranks_and_threads_change_no_batch_of_links() -> None:
    """Fails if a loss depends on how links, or the drawing of batches, are shared out, or on what is planned by."""
    graph = graph_of()
    losses = {}
    for ranks, ahead in ((1, 0), (1, 3), (2, 1), (3, 0)):
        drawn = {"batch": 40, "fanout": (3, 2), "ahead": ahead, "plan": "run" if ranks == 2 else "auto"}
        config = config_of(ranks, {"dropout": 0.5}, sample=drawn)
        found = on_ranks(config, graph, lambda rank: [rank.trainer.step(epoch) for epoch in range(3)])
        losses[ranks, ahead] = found[0]
    assert losses[1, 0] == losses[1, 3]
    for several in losses.values():
        np.testing.assert_allclose(several, losses[1, 0], rtol=1e-11)


MODELS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "aggregator": "max"},
    "gat": {"kind": "gat", "heads": 2},
    "gin": {"kind": "gin"},
    "batch norm": {"norm_layer": "batch"},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sample", [{}, {"batch": 23, "fanout": (4, 3)}], ids=["whole", "batches"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_other_models(name: str, sample: dict[str, Any], ranks: int) -> None:
    """Fails if a gradient is not the slope of the loss along a line, where embeddings come from other layers than GCN's."""
    config = config_of(ranks, MODELS[name], sample=sample, decoder=(4,), negatives=2)

    def body(rank: Rank) -> tuple[float, float]:
        weights, rng = rank.trainer.runtime.weights, np.random.default_rng(12)
        # Biases of zero would leave rows of zeros at the kink of ReLU.
        start = {n: w + 0.1 * torch.from_numpy(rng.random(w.shape)) for n, w in sorted(weights.state_dict().items())}
        weights.load_state_dict(start)
        rank.trainer.gradients(EPOCH)
        line = {n: torch.from_numpy(rng.normal(size=g.shape)) for n, g in sorted(weights.grads.items())}
        slope = sum(float((weights.grads[n].double() * line[n]).sum()) for n in line)
        losses = []
        for step in (1e-7, -1e-7):
            weights.load_state_dict({n: w + step * line[n] if n in line else w for n, w in start.items()})
            losses.append(rank.trainer.gradients(EPOCH))
        return slope, (losses[0] - losses[1]) / 2e-7

    for slope, difference in on_ranks(config, graph_of(), body):
        assert abs(slope) > 1e-3
        assert slope == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("decoder", [(), (4,)])
@pytest.mark.covering(1)
def test_bytes_and_messages_are_as_planned(decoder: tuple[int, ...], where: Where) -> None:
    """Fails if rows of all ranks, their gradients, or what scores are summed from, are sent off plan."""
    config = where.config(config_of(3, decoder=decoder))
    on_ranks(config, graph_of(), assert_sent_as_planned, device_of=where.device_of)


def test_a_step_that_is_too_large_comes_in_parts() -> None:
    """Fails if halves of a step's links have other pairs, or another loss, than the step as a whole."""
    graph = graph_of()
    settings: dict[str, Any] = {"sample": {"batch": 60, "fanout": (3, 2), "ahead": 0}, "negatives": 2}

    def losses(rank: Rank) -> Any:
        return [rank.trainer.gradients(epoch) for epoch in (0, 1)], first_step(rank)["grads"]

    ((whole, grads),) = on_ranks(config_of(**settings), graph, losses)

    def in_parts(rank: Rank) -> Any:
        feed: Any = rank.feed
        draw, most = feed._sampler.draw, [0]

        def refusing(slot: Any, seeds: np.ndarray, *rest: Any) -> Any:
            if seeds.size > 40:
                most[0] += 1
                from mggcn.blocks.sampler import BatchTooLargeError

                raise BatchTooLargeError(0, "seeds", 40)
            return draw(slot, seeds, *rest)

        feed._sampler.draw = refusing
        found = losses(rank)
        assert most[0] > 0
        return found

    ((parts, in_halves),) = on_ranks(config_of(**settings), graph, in_parts)
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    for name, gradient in grads.items():
        np.testing.assert_allclose(in_halves[name], gradient, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("sample", [{}, {"batch": 300, "fanout": (8, 4)}], ids=["whole", "batches"])
def test_links_of_communities_are_learnt(sample: dict[str, Any]) -> None:
    """Fails if links do not become more likely than other pairs, or rounded messages break them."""
    graph = split_links(community(400, 4000, 16, 4, seed=5), (0.8, 0.1, 0.1), seed=2)
    for run in ({}, {"precision": "mixed"}):
        config = config_of(1, {"hidden": (16,)}, {"precision": "fp32"} | run, sample, embedding=16)
        config = dataclasses.replace(config, train=TrainConfig(seed=7, epochs=60, lr=0.01))
        rounds = 60 if not sample else 10

        def body(rank: Rank, rounds: int = rounds) -> Any:
            return [rank.trainer.step(epoch) for epoch in range(rounds)], rank.trainer.evaluate()

        ((losses, scores),) = on_ranks(config, graph, body)
        assert losses[-1] < losses[0]
        assert scores["train"] is None
        assert scores["test"] > 0.75


def test_links_are_scored_from_blocks_too() -> None:
    """Fails if embeddings that are computed layer by layer lack a vertex of a pair, or differ from the whole graph's."""
    graph, found = graph_of(), list[Any]()
    for evaluate in ("whole", "blocks"):
        config = config_of(2, sample={"batch": 40, "fanout": (3, 2)}, decoder=(4,))
        train = dataclasses.replace(config.train, evaluate=evaluate)
        config = dataclasses.replace(config, train=train)
        found += on_ranks(
            config, graph, lambda rank: (rank.trainer.step(0), rank.trainer.evaluate(), rank.trainer.links())
        )
    assert all(one == found[0] for one in found)
