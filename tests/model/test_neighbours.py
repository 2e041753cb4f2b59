"""Maximum and attention over neighbours in models: gradients are the dense formula's, for every strategy and rank count."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate.attention import Attending, Attention, AttentionHeads, AttentionSpec, DestinationRows
from mggcn.aggregate.maximum import Won
from mggcn.assemble import plan_graph
from mggcn.assemble_rank import Rank
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.model.builder import Builder
from mggcn.model.kinds.dense import Linear
from mggcn.model.values import Value
from tests.devices import CPU, Where, everywhere
from tests.graphs import make_graph, on_ranks, one_epoch, pattern
from tests.reference import dense_csr, dense_features, dropout_mask, philox
from tests.train.test_exact import SEED, TOLERANCE, config_of
from tests.train.test_mixed import with_run

HEADS = 3
Weights = dict[str, torch.Tensor]


def weight_mask(n: int, p: float, epoch: int, site: int) -> torch.Tensor:
    """Masks of attention's weights (source, destination, head)."""
    threshold = min(round(65536 * p), 65535)
    counter = np.zeros((n, n, 1, 4), np.uint64)
    counter[..., 1] = np.arange(n)[:, None, None]
    counter[..., 2] = np.arange(n)[None, :, None]
    counter[..., 3] = 1 << 31 | site
    words = philox(counter, (SEED, epoch))
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1).reshape(n, n, 8)[:, :, :HEADS]
    scale = float(np.float32(65536 / (65536 - threshold)))
    return torch.from_numpy((halves >= threshold) * scale)


def dense_attention(edges: torch.Tensor, scores: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """z from scores (u, v, head), values x (u, head, c)."""
    held = torch.where(edges[:, :, None], scores, -torch.inf)
    best = held.amax(0, keepdim=True)
    weights = (held - torch.where(best.isinf(), 0.0, best).detach()).exp()
    weights = weights / weights.sum(0, keepdim=True).clamp(min=1e-300) * mask
    return torch.einsum("uvh,uhc->vhc", weights, x).flatten(1)


class Dense:
    """The same models by torch.autograd on dense matrices."""

    def __init__(self, graph: Graph, model: ModelConfig, weights: Weights, epoch: int) -> None:
        self.model, self.epoch, self.p, self.layer = model, epoch, weights, 0
        adj = dense_csr(graph.adj) != 0
        if model.self_loops:
            np.fill_diagonal(adj, True)
        self.edges, self.n = torch.from_numpy(adj), graph.num_vertices
        self.classes = graph.num_classes

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        self.layer += 1
        return x @ self.p[f"layers.{self.layer}.weight"]

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p[f"layers.{self.layer}.bias"]

    def drop(self, x: torch.Tensor, site: int) -> torch.Tensor:
        mask = dropout_mask(np.arange(self.n), x.shape[1], self.model.dropout, SEED, self.epoch, site)
        return torch.from_numpy(mask) * x

    def masks(self, site: int) -> torch.Tensor:
        p = self.model.attention_dropout
        return weight_mask(self.n, p, self.epoch, site) if p else torch.ones(1).double()

    def max(self, x: torch.Tensor) -> torch.Tensor:
        for site, width in enumerate((*self.model.hidden, self.classes), start=1):
            h = torch.relu(self.bias(self.linear(x)))
            # torch.max gives the gradient to the first of equal values.
            held = torch.where(self.edges[:, :, None], h[:, None, :], -torch.inf).max(0).values
            own = self.linear(x)
            x = self.bias(own + self.linear(torch.where(held.isinf(), 0.0, held)))
            x = x if width == self.classes else self.drop(torch.relu(x), site)
        return x

    def gat(self, x: torch.Tensor) -> torch.Tensor:
        for site in range(1, len(self.model.hidden) + 2):
            h = self.linear(x).unflatten(1, (HEADS, -1))
            s, t = ((h * self.p[f"layers.{self.layer}.{end}"]).sum(2) for end in ("source", "destination"))
            scores = torch.nn.functional.leaky_relu(s[:, None] + t[None], 0.2)
            x = self.after(dense_attention(self.edges, scores, h, self.masks(site)), site)
        return x

    def gatv2(self, x: torch.Tensor) -> torch.Tensor:
        for site in range(1, len(self.model.hidden) + 2):
            h, y = (self.bias(self.linear(x)).unflatten(1, (HEADS, -1)) for _ in range(2))
            q = torch.nn.functional.leaky_relu(h[:, None] + y[None], 0.2)
            scores = (q * self.p[f"layers.{self.layer}.attention"]).sum(3)
            x = self.after(dense_attention(self.edges, scores, h, self.masks(site)), site)
        return x

    def after(self, z: torch.Tensor, site: int) -> torch.Tensor:
        bias = self.p[f"attention.{site}.bias"]
        if site <= len(self.model.hidden):
            return self.drop(torch.relu(z + bias), site)
        return z.unflatten(1, (HEADS, -1)).mean(1) + bias


def reference(
    name: str, graph: Graph, model: ModelConfig, weights: Weights, epoch: int
) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss, gradients and logits."""
    p = {key: w.double().clone().requires_grad_() for key, w in weights.items()}
    with torch.enable_grad():
        z = getattr(Dense(graph, model, p, epoch), name)(torch.from_numpy(dense_features(graph)))
        train = torch.from_numpy(graph.splits["train"].array()[0])
        labels = torch.from_numpy(graph.labels.array().astype(np.int64))  # type: ignore[union-attr]
        loss = torch.nn.functional.cross_entropy(z[train], labels[train])
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {key: v.grad.numpy() for key, v in p.items()}, z.detach().numpy()  # type: ignore[union-attr]


SETTINGS: dict[str, dict[str, Any]] = {
    "max": {"kind": "sage", "aggregator": "max"},
    "gat": {"kind": "gat", "heads": HEADS},
    "gatv2": {"kind": "gatv2", "heads": HEADS},
}
KINDS = ("random", "directed", "weighted", "star", "path", "empty", "hub-row", "disconnected")
CASES = [
    case
    for case in itertools.product(SETTINGS, (1, 2, 3, 5), ("broadcast", "halo", "delayed", "slice"), KINDS)
    if case[0] != "max" or case[2] != "slice"
]
Case = tuple[str, int, str, str]


def graph_of(kind: str, n: int = 23) -> Graph:
    return make_graph(
        pattern(kind, n, 6), num_features=7, num_classes=4, sparse=False, weighted=kind == "weighted", seed=8
    )


def error_of(case: Case, where: Where = CPU, prepare: Callable[[Any], None] | None = None, **settings: Any) -> float:
    """Largest error of loss, gradients and logits, relative to the largest value of each."""
    name, ranks, strategy, kind = case
    number = CASES.index(case)
    graph = graph_of(kind)
    # Covered beside each other: dropout, self-loops, depth, pruning.
    model = {"hidden": ((9,), (6, 12))[number % 2], "self_loops": number % 3 > 0, "dropout": 0.4 * (number % 2)}
    model |= SETTINGS[name] | ({"attention_dropout": 0.3 * (number % 5 > 1)} if name != "max" else {})
    config = config_of(ranks, strategy=strategy, **model)
    config = where.config(with_run(config, prune="auto" if number % 4 else "off"))
    found = one_epoch(config, graph, device_of=where.device_of)
    loss, gradients, _ = reference(name, graph, config.model, found[0].weights, 3)
    still = dataclasses.replace(config.model, dropout=0.0, attention_dropout=0.0)
    _, _, logits = reference(name, graph, still, found[0].weights, 3)
    assert found[0].grads.keys() == gradients.keys()
    errors = [abs(found[0].loss - loss) / loss]
    for rank in found:
        errors += [np.abs(rank.grads[n] - g).max() / max(np.abs(g).max(), 1e-3) for n, g in gradients.items()]
        if rank.ids.size:
            errors.append(np.abs(rank.logits - logits[rank.ids]).max() / max(np.abs(logits).max(), 1e-3))
    assert not np.isnan(errors).any()
    return max(map(float, errors))


@pytest.mark.covering(1, rest=2)
@pytest.mark.parametrize(("where", "case"), everywhere(CASES, lambda number: number % 17 == 2))
def test_gradients_equal_autograd(where: Where, case: Case) -> None:
    """Fails on a weight that a tile, a rank or a copy counts twice or not at all, a lost rescaling, a wrong winner of equal
    ones, or masks that depend on the partition.
    """
    assert error_of(case, where) < TOLERANCE


def test_ties_go_to_the_vertex_of_the_lowest_number() -> None:
    """Fails if which of equal neighbours gets the gradient depends on the ranks, or is another than the dense formula's."""

    def tied(b: Builder, x: Value, model: ModelConfig) -> Value:
        # Zero weights: all neighbours are equal, and the gradient of the maximum says which one was taken.
        zero = b.parameter("zero", (7, b.num_classes), "zeros")
        return b.bias(b.add(b.maximum(b.node(Linear(zero, 9), x, cols=b.num_classes)), b.linear(x, b.num_classes)))

    graph = graph_of("random")
    edges, x = torch.from_numpy(dense_csr(graph.adj) != 0), torch.from_numpy(dense_features(graph))
    for ranks, strategy in ((1, "broadcast"), (3, "halo"), (3, "delayed"), (5, "broadcast")):
        found = one_epoch(config_of(ranks, strategy=strategy, self_loops=False), graph, network=tied)
        p = {name: w.double().clone().requires_grad_() for name, w in found[0].weights.items()}
        with torch.enable_grad():
            held = torch.where(edges[:, :, None], (x @ p["zero"])[:, None, :], -torch.inf).max(0).values
            z = torch.where(held.isinf(), 0.0, held) + x @ p["layers.1.weight"] + p["layers.1.bias"]
            train = torch.from_numpy(graph.splits["train"].array()[0])
            labels = torch.from_numpy(graph.labels.array().astype(np.int64))  # type: ignore[union-attr]
            torch.nn.functional.cross_entropy(z[train], labels[train]).backward()  # type: ignore[no-untyped-call]
        expected = p["zero"].grad.numpy()  # type: ignore[union-attr]
        np.testing.assert_allclose(found[0].grads["zero"], expected, rtol=1e-11, atol=1e-13)


def planned_buffers(name: str) -> tuple[Any, Graph]:
    graph = graph_of("random", 60)
    config = config_of(2, strategy="halo", hidden=(9,), attention_dropout=0.3, **SETTINGS[name])
    return plan_graph(config, graph)[0], graph


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_no_buffer_has_a_number_for_each_edge(name: str) -> None:
    """Fails if a plan's buffer grows with edges and heads."""
    plan, graph = planned_buffers(name)
    edges = graph.adj.nnz + graph.num_vertices
    for rank in plan.ranks:
        names = [placed.spec.name for placed in rank.train.arena.placements]
        assert any(name.endswith(".state") for name in names)
        for placed in rank.train.arena.placements:
            spec = placed.spec
            assert spec.rows <= max(graph.num_vertices, 64) < edges // 4, spec  # 64: partial sums of a bias


@pytest.mark.parametrize(("activation", "kept"), [("relu", False), ("elu", True)])
def test_sums_of_attention_are_not_kept_beside_their_relu(activation: str, kept: bool) -> None:
    """Fails if both take memory until the backward pass, or sums are lost from which another activation was made."""
    config = config_of(2, hidden=(9,), activation=activation, **SETTINGS["gat"])
    for rank in plan_graph(config, graph_of("random", 60))[0].ranks:
        lifetimes = {placed.spec.name: placed.spec.lifetime for placed in rank.train.arena.placements}
        assert lifetimes["aggregate2"] == "kept"
        assert (lifetimes["aggregate1"] == "kept") == kept


@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_is_refused(name: str) -> None:
    """Fails if maxima or numbers of vertices are rounded to 8 bits."""
    for precision in ("bf16", "mixed"):
        config = with_run(config_of(1, hidden=(9,), **SETTINGS[name]), precision=precision)
        with pytest.raises(PlanError, match=r"bfloat16 cannot hold; use run.precision fp32, tf32 or fp64"):
            plan_graph(config, graph_of("random"))


def test_slices_and_delays_are_refused() -> None:
    """Fails if a row is torn from the numbers of its winners, or a part of a maximum stands for the whole."""
    for name, run, message in (
        ("max", {"strategy": "slice"}, "needs whole rows; choose broadcast, halo or delayed"),
        ("max", {"strategy": "delayed", "delay": "none"}, "do not add up; use run.delay 0"),
        ("gat", {"strategy": "delayed", "delay": "none"}, "do not add up; use run.delay 0"),
    ):
        with pytest.raises(PlanError, match=message):
            plan_graph(with_run(config_of(2, hidden=(9,), **SETTINGS[name]), **run), graph_of("random"))


def _unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destinations' scores have no gradient."""
    monkeypatch.setattr(DestinationRows, "tile", lambda self, matrix, rows, last: self._target.out.zero_())


def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vertex cut takes one copy's weights for all."""
    monkeypatch.setattr(Attending, "combine", lambda self, message, index: None)


def _latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile begins afresh."""
    before = Attending._attend

    def afresh(self: Attending, matrix: Any, rows: Any, last: bool) -> None:
        self._begun = False
        before(self, matrix, rows, last)

    monkeypatch.setattr(Attending, "_attend", afresh)


def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the maximum goes nowhere behind the first tile."""
    monkeypatch.setattr(Won, "tile", lambda self, matrix, rows, last: self._target.out.zero_())


def _first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has some heads counts masks from its first."""
    before = AttentionSpec.of
    monkeypatch.setattr(AttentionSpec, "of", lambda self, heads: dataclasses.replace(before(self, heads), first=0))


def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has some heads reads what destinations have for the first ones."""
    before = AttentionHeads.share

    def share(self: AttentionHeads, heads: range) -> Any:
        found = before(self, heads)
        own = tuple(range(len(columns)) for columns in found.local[0])
        return found._replace(local=(own,)) if isinstance(found.op, Attention) else found

    monkeypatch.setattr(AttentionHeads, "share", share)


FAULTS = [
    (_unscaled, ("gat", 1, "broadcast", "random")),
    (_unscaled, ("gatv2", 1, "broadcast", "random")),
    (_parts, ("gat", 3, "delayed", "random")),
    (_latest, ("gatv2", 2, "broadcast", "random")),
    (_nobody, ("max", 2, "halo", "random")),
    (_first, ("gat", 3, "slice", "random")),
    (_others, ("gatv2", 2, "slice", "directed")),
]


@pytest.mark.parametrize(("fault", "case"), FAULTS)
def test_planted_faults_are_seen(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], case: Case
) -> None:
    """The comparison above fails when a gradient, a part or a tile is lost."""
    assert error_of(case) < TOLERANCE
    fault(monkeypatch)
    assert error_of(case) > 1e-6


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize(("name", "strategy"), sorted({(name, strategy) for name, _, strategy, _ in CASES}))
@pytest.mark.parametrize("kind", ["directed", "random", "empty"])
def test_bytes_and_messages_are_as_planned(name: str, strategy: str, kind: str) -> None:
    """Fails if columns that travel beside rows, or a pass of the gradient, are not in the plan."""
    config = config_of(3, strategy=strategy, hidden=(6, 9), **SETTINGS[name])

    def body(rank: Rank) -> None:
        for program, run in (
            (rank.plan.train, lambda: rank.trainer.step(0)),
            (rank.plan.evaluate, rank.trainer.evaluate),
        ):
            rank.comm.bytes_sent = rank.comm.messages = 0
            run()
            assert rank.comm.bytes_sent == rank.plan.bytes_sent(program)
            assert rank.comm.messages == rank.plan.messages(program)

    on_ranks(config, graph_of(kind), body)


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_do_not_depend_on_the_ranks(name: str) -> None:
    """Fails if ten epochs in float32 with dropout differ by more than rounding between rank counts, or at all from run to
    run or from one thread to three.
    """
    graph = graph_of("random", 61)
    settings = SETTINGS[name] | {"hidden": (12,), "dropout": 0.3}
    settings |= {"attention_dropout": 0.4} if name != "max" else {}

    def losses(ranks: int, strategy: str = "broadcast", threads: int = 1) -> list[float]:
        config = with_run(config_of(ranks, strategy=strategy, **settings), precision="fp32")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, threads=threads))
        found: list[list[float]] = on_ranks(config, graph, lambda rank: [rank.trainer.step(e) for e in range(10)])
        return found[0]

    base = losses(1)
    assert losses(1, threads=3) == base
    assert losses(2) == losses(2)
    for ranks, strategy in ((2, "broadcast"), (4, "halo"), (4, "delayed"), *(((2, "slice"),) if name != "max" else ())):
        np.testing.assert_allclose(losses(ranks, strategy), base, rtol=1e-5)
