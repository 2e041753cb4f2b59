"""Training over stacks of blocks: nothing but blocks and a feed is written here, and gradients are those of autograd.

T targets, S sources, all ranks' seeds in one mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.blocks.block import Block, Capacity, RowSet, Stack
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges
from mggcn.graph.csr import Graph
from mggcn.model import network
from mggcn.model.kinds.combine import AddOwn
from tests.graphs import make_graph, on_ranks, pattern
from tests.reference import dense_csr, dense_features

N, D, C = 61, 7, 4
INPUT, MIDDLE, SEEDS = RowSet("input"), RowSet("middle"), RowSet("seeds")
BELOW, ABOVE = Block("below", MIDDLE, INPUT), Block("above", SEEDS, MIDDLE)


@dataclass(frozen=True)
class Drawn:
    """Two blocks that shrink, of neighbours drawn at random; other sizes in every step where `vary`."""

    graph: Graph
    rank: int
    ranks: int
    vary: bool = False
    num_steps: int = 3

    @property
    def stack(self) -> Stack:
        return Stack((BELOW, ABOVE), (Capacity(N, N, N * N), Capacity(N, N, N * N)))

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        adj_t = dense_csr(self.graph.adj_t)
        for step in range(first, self.num_steps):
            rng = np.random.default_rng([number, step])
            labelled = np.flatnonzero(self.graph.splits["train"].array()[0])
            chosen = rng.permutation(labelled)[: 12 + 5 * step if self.vary else 14]
            seeds = np.sort(chosen[self.rank :: self.ranks])
            above, middle = drawn(adj_t, seeds, rng)
            below, sources = drawn(adj_t, middle, rng)
            rows = {SEEDS: seeds, MIDDLE: middle, INPUT: sources}
            yield Batch(rows=rows, edges={ABOVE: above, BELOW: below}, seeds=chosen)

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return {}

    def halt(self) -> None:
        return


def drawn(adj_t: Any, targets: npt.NDArray[np.int64], rng: Any) -> tuple[BlockEdges, npt.NDArray[np.int64]]:
    """Some in-edges of the targets, and their sources behind the targets."""
    kept = adj_t[targets] * (rng.random((targets.size, N)) < 0.7)
    others = np.setdiff1d(np.flatnonzero(kept.any(0)), targets)
    sources = np.concatenate([targets, others])
    rows = kept[:, sources]
    counts = (rows != 0).sum(1)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return BlockEdges(indptr, np.nonzero(rows)[1].astype(np.int32)), sources


def graph_of() -> Graph:
    adj = pattern("directed", N, 5) + np.roll(np.eye(N, dtype=np.float32), 1, 0)
    return make_graph((adj > 0).astype(np.float32), num_features=D, num_classes=C, sparse=False, weighted=False, seed=4)


def config_of(ranks: int, model: dict[str, Any], **train: Any) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (6,), "dropout": 0.0, "self_loops": False} | model)),
        train=TrainConfig(seed=8123, epochs=4, **train),
        run=RunConfig(ranks=ranks, transport="threads" if ranks > 1 else "auto", precision="fp64", threads=1),
    )


MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn"},
    "gcn-wide": {"kind": "gcn", "hidden": (20,)},
    "sage": {"kind": "sage", "aggregator": "mean"},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gin": {"kind": "gin"},
    "gat": {"kind": "gat", "heads": 2, "hidden": (8,)},
    "gatv2": {"kind": "gatv2", "heads": 2, "hidden": (8,)},
    "residual": {"kind": "gcn", "residual": "linear", "norm_layer": "layer"},
    "jumping": {"kind": "sage", "aggregator": "mean", "hidden": (6, 6), "head": "linear", "jumping": "concat"},
}


class Twin:
    """The model's layers over one batch, dense, in float64."""

    def __init__(
        self, graph: Graph, config: ModelConfig, batch: Batch, p: dict[str, torch.Tensor], blocks: Any = (BELOW, ABOVE)
    ) -> None:
        self.c, self.p, self.at, self.drawn = config, p, 0, 0
        self.x = torch.from_numpy(dense_features(graph)[batch.rows[blocks[0].sources]])
        degree = dense_csr(graph.adj_t).sum(1)
        with np.errstate(divide="ignore"):
            scale = np.where(degree > 0, degree**-0.5 if config.norm == "symmetric" else 1 / degree, 0)
        self.blocks = []
        for block in blocks:
            edges, sources = batch.edges[block], batch.rows[block.sources]
            a = np.zeros((edges.indptr.size - 1, sources.size))
            a[np.repeat(np.arange(a.shape[0]), np.diff(edges.indptr)), edges.indices] = (
                1 if edges.values is None else edges.values
            )
            row = scale[batch.rows[block.targets]][:, None]
            col = scale[sources][:, None] if config.norm == "symmetric" else np.ones((sources.size, 1))
            if batch.scales is not None:
                of_row, of_col = batch.scales[block.targets][0], batch.scales[block.sources][1]
                row = np.ones_like(row) if of_row is None else of_row[:, None]
                col = np.ones_like(col) if of_col is None else of_col[:, None]
            self.blocks.append((torch.from_numpy(a), torch.from_numpy(row), torch.from_numpy(col)))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        self.at += 1
        return x @ self.p[f"layers.{self.at}.weight"]

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p[f"layers.{self.at}.bias"]

    def logits(self) -> torch.Tensor:
        x, layers = self.x, []
        for number, block in enumerate(self.blocks):
            last = number == 1 and self.c.head == "convolution"
            h = self.convolution(x, block, last)
            if self.c.residual == "linear" and not last:
                h = h + self.bias(self.linear(x[: h.shape[0]]))
            if self.c.norm_layer == "layer" and not last:
                h = torch.nn.functional.layer_norm(h, h.shape[1:]) * self.p["norms.1.weight"] + self.p["norms.1.bias"]
            x = h if last else torch.relu(h)
            layers.append(x)
        if self.c.head == "convolution":
            return x
        return self.bias(self.linear(torch.cat([layer[: x.shape[0]] for layer in layers], 1)))

    def convolution(self, x: torch.Tensor, block: Any, last: bool) -> torch.Tensor:
        a, row, col = block
        own = x[: a.shape[0]]
        if self.c.kind == "gcn":
            return self.bias(row * (a @ (col * self.linear(x))))
        if self.c.kind == "sage" and self.c.aggregator == "mean":
            neighbours = row * (a @ self.linear(x))
            return self.bias(neighbours + self.linear(own))
        if self.c.kind == "sage":
            z = torch.relu(self.bias(self.linear(x)))
            spread = torch.where(a[:, :, None] > 0, z[None], torch.full((), -1.0, dtype=z.dtype))
            most = torch.where(a.any(1, keepdim=True), spread.amax(1), torch.zeros((), dtype=z.dtype))
            itself = self.linear(own)
            return self.bias(itself + self.linear(most))
        if self.c.kind == "gin":
            h = self.linear(x)
            h = torch.relu(self.bias((1 + self.p[f"layers.{self.at}.eps"]) * h[: a.shape[0]] + a @ h))
            return self.bias(self.linear(h))
        return self.attention(x, a, last)

    def attention(self, x: torch.Tensor, a: torch.Tensor, last: bool) -> torch.Tensor:
        heads = self.c.heads_of(last)
        self.drawn += 1
        if self.c.kind == "gat":
            z = self.linear(x).unflatten(1, (heads, -1))
            s, t = ((z * self.p[f"layers.{self.at}.{end}"]).sum(2) for end in ("source", "destination"))
            scores = torch.nn.functional.leaky_relu(t[: a.shape[0], None] + s[None], 0.2)
        else:
            z = self.bias(self.linear(x)).unflatten(1, (heads, -1))
            y = self.bias(self.linear(x[: a.shape[0]])).unflatten(1, (heads, -1))
            both = torch.nn.functional.leaky_relu(y[:, None] + z[None], 0.2)
            scores = (both * self.p[f"layers.{self.at}.attention"]).sum(3)
        weights = torch.where(a[:, :, None] > 0, scores, torch.full((), -torch.inf, dtype=z.dtype)).softmax(1)
        out = torch.einsum("tsh,shc->thc", torch.where(a[:, :, None] > 0, weights, torch.zeros_like(weights)), z)
        out = out.mean(1) if last else out.flatten(1)
        return out + self.p[f"attention.{self.drawn}.bias"]


def reference(
    config: Config, graph: Graph, batches: list[Batch], weights: dict[str, torch.Tensor]
) -> tuple[float, dict[str, npt.NDArray[Any]]]:
    """Loss and gradients of one step, all ranks' batches together."""
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    labels = graph.labels.array().astype(np.int64)  # type: ignore[union-attr]
    with torch.enable_grad():
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            z = Twin(graph, config.model, batch, p).logits()
            wanted = torch.from_numpy(labels[batch.rows[SEEDS]])
            loss = loss + torch.nn.functional.cross_entropy(z, wanted, reduction="sum") / batch.seeds.size
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {n: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for n, v in p.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_over_two_blocks_that_shrink(name: str, ranks: int) -> None:
    """Fails if rows are not those of a block, a gradient of own rows is lost, or a mean is over one rank's seeds."""
    config, graph = config_of(ranks, MODELS[name]), graph_of()

    def body(rank: Rank) -> Any:
        loss = rank.trainer.gradients(2)
        grads = {n: g.numpy().copy() for n, g in rank.trainer.runtime.weights.grads.items()}
        return loss, grads, rank.trainer.runtime.weights.state_dict()

    found = on_ranks(config, graph, body, feed_of=lambda rank: Drawn(graph, rank, ranks))
    batches = [next(Drawn(graph, rank, ranks).epoch(0, 2)) for rank in range(ranks)]
    assert all(len({ids.size for ids in batch.rows.values()}) == 3 for batch in batches)
    loss, expected = reference(config, graph, batches, found[0][2])
    assert found[0][0] == pytest.approx(loss, rel=1e-12)
    assert expected.keys() == found[0][1].keys()
    for key, gradient in expected.items():
        np.testing.assert_allclose(found[0][1][key], gradient, atol=1e-10 * (np.abs(gradient).max() or 1), err_msg=key)


@pytest.mark.parametrize("fault", ["own rows", "the other rows"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if the gradient of a block's own rows is lost, or others get what memory held."""

    def run(self: AddOwn, rt: Any, op: Any) -> None:
        a, g, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        out.copy_(a)
        if fault == "own rows":
            return
        out[: g.shape[0]] += g
        out[g.shape[0] :] += 0.1

    monkeypatch.setattr(AddOwn, "run", run)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_gradients_over_two_blocks_that_shrink("sage", 1)


@pytest.mark.parametrize("name", ["sage", "gin", "jumping"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.covering(2)
def test_own_rows_added_alone_keep_the_bits(
    name: str, precision: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a gradient changes where own rows are added to theirs, instead of zeros around them to all."""
    config = config_of(ranks, MODELS[name])
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))

    def body(rank: Rank) -> tuple[int, Any]:
        losses = [rank.trainer.step(epoch) for epoch in range(3)]
        weights = rank.trainer.runtime.weights.flat.numpy().tobytes()
        return sum(isinstance(op.kind, AddOwn) for op in rank.plan.train.ops), (losses, weights)

    def trained() -> list[Any]:
        network.make_values.cache_clear()
        return on_ranks(config, graph_of(), body, feed_of=lambda rank: Drawn(graph_of(), rank, ranks))

    found = trained()
    with monkeypatch.context() as patch:
        patch.setattr(network, "add_own_rows", lambda graph: graph)
        other = trained()
    network.make_values.cache_clear()
    assert all(adds > 0 for adds, _ in found)
    assert not any(adds for adds, _ in other)
    assert [bits for _, bits in found] == [bits for _, bits in other]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_other_sizes_in_every_step(ranks: int) -> None:
    """Fails if a step keeps rows, edges or targets of another one, weights move once an epoch, or a loss is lost."""
    config, graph = config_of(ranks, MODELS["gcn"], optimizer="sgd", lr=0.3), graph_of()
    feeds = [Drawn(graph, rank, ranks, vary=True) for rank in range(ranks)]

    def body(rank: Rank) -> Any:
        start = rank.trainer.runtime.weights.state_dict()
        losses = [rank.trainer.step(epoch) for epoch in range(2)]
        rank.trainer.evaluate()
        return losses, start, rank.trainer.runtime.weights.state_dict(), rank.trainer.logits().clone()

    found = on_ranks(config, graph, body, feed_of=feeds.__getitem__)
    weights, expected, sizes = found[0][1], [], set()
    for epoch in range(2):
        losses = []
        for batches in zip(*(feed.epoch(0, epoch) for feed in feeds), strict=True):
            sizes.add(tuple(ids.size for ids in batches[0].rows.values()))
            loss, gradients = reference(config, graph, list(batches), weights)
            losses.append(loss)
            weights = {name: w - 0.3 * torch.from_numpy(gradients[name]) for name, w in weights.items()}
        expected.append(np.mean(losses))
    assert len(sizes) >= 5
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-10)
    for name, weight in weights.items():
        np.testing.assert_allclose(found[0][2][name], weight, rtol=1e-8, atol=1e-10)


def test_a_batch_that_was_not_planned_is_refused() -> None:
    """Fails if a batch beyond its capacity is run, or one whose rows do not follow each other."""
    graph = graph_of()
    small = Stack((BELOW, ABOVE), (Capacity(N, N, N * N), Capacity(3, N, N * N)))
    batch = next(Drawn(graph, 0, 1).epoch(0, 0))
    with pytest.raises(PlanError, match="block 'above' has 14 targets, but at most 3 were planned"):
        batch.check(small)
    odd = dataclasses.replace(batch, rows={**batch.rows, MIDDLE: batch.rows[MIDDLE][::-1]})
    with pytest.raises(PlanError, match="must begin with its targets"):
        odd.check(Drawn(graph, 0, 1).stack)
    above = batch.edges[ABOVE]
    for edges, words in (
        (BlockEdges(above.indptr[::-1].copy(), above.indices), "ascending from 0"),
        (BlockEdges(above.indptr, above.indices, np.ones(1)), "edges and 1 values"),
    ):
        with pytest.raises(PlanError, match=words):
            dataclasses.replace(batch, edges={**batch.edges, ABOVE: edges}).check(Drawn(graph, 0, 1).stack)
    with pytest.raises(PlanError, match="needs the rows and edges of the blocks below, above"):
        dataclasses.replace(batch, edges={ABOVE: above}).check(Drawn(graph, 0, 1).stack)
    with pytest.raises(PlanError, match="must be the sources of block"):
        Stack((ABOVE, BELOW), small.capacities)
    with pytest.raises(PlanError, match="aggregates more often than the 2 blocks"):
        on_ranks(
            config_of(1, {"kind": "gcn", "hidden": (6, 6)}),
            graph,
            lambda rank: None,
            feed_of=lambda r: Drawn(graph, r, 1),
        )
