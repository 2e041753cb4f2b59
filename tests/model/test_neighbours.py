"""Maximum and attention over neighbours in models: ties, memory, messages, refusals and losses of several ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.assemble.plan import plan_graph
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.model.builder import Builder
from mggcn.model.kinds.dense import Linear
from mggcn.model.values import Value
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, one_epoch, pattern
from tests.reference import dense_csr, dense_features
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run

HEADS = 3


SETTINGS: dict[str, dict[str, Any]] = {
    "max": {"kind": "sage", "aggregator": "max"},
    "gat": {"kind": "gat", "heads": HEADS},
    "gatv2": {"kind": "gatv2", "heads": HEADS},
}
MOVES = [
    (name, strategy)
    for name, strategy in itertools.product(SETTINGS, ("broadcast", "halo", "delayed", "slice"))
    if (name, strategy) != ("max", "slice")
]


def graph_of(kind: str, n: int = 23) -> Graph:
    return make_graph(pattern(kind, n, 6), num_features=7, num_classes=4, weighted=kind == "weighted", seed=8)


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


def planned_with(name: str, degree: int, heads: int) -> Any:
    """The plan of two ranks for 60 vertices with that many neighbours each."""
    steps = np.arange(1, degree // 2 + 1)
    sources = np.repeat(np.arange(60), steps.size)
    there = np.stack([sources, (sources + np.tile(steps, 60)) % 60])
    graph = mggcn.load(
        np.concatenate([there, there[::-1]], axis=1),
        features=np.ones((60, 7), np.float32),
        labels=np.arange(60) % 4,
        splits={"train": np.arange(60) < 50, "val": np.arange(60) >= 50},
    )
    settings = {**SETTINGS[name], "heads": heads}
    return plan_graph(config_of(2, hidden=(9,), attention_dropout=0.3, **settings), graph)[0]


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_no_memory_grows_with_edges_and_heads(name: str) -> None:
    """Fails if a buffer of training or evaluation grows with edges, or anything else with edges times heads."""
    grown = set()
    for heads in (1, HEADS):
        few, many = (planned_with(name, degree, heads) for degree in (4, 40))
        for one, other in zip(few.ranks, many.ranks, strict=True):
            assert any(placed.spec.name.endswith(".state") for placed in one.train.arena.placements)
            for program in ("train", "evaluate"):
                buffers = [
                    sorted((p.spec.name, p.spec.rows, p.spec.cols, p.spec.dtype) for p in arena.placements)
                    for arena in (getattr(one, program).arena, getattr(other, program).arena)
                ]
                assert buffers[0] == buffers[1]
            grown.add((one.rank, other.total_bytes - one.total_bytes))
    assert len(grown) == 2
    assert all(more > 0 for _, more in grown)  # the graph itself


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


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize(("name", "strategy"), MOVES)
@pytest.mark.parametrize("kind", ["directed", "random", "empty"])
def test_bytes_and_messages_are_as_planned(name: str, strategy: str, kind: str) -> None:
    """Fails if columns that travel beside rows, or a pass of the gradient, are not in the plan."""
    config = config_of(3, strategy=strategy, hidden=(6, 9), **SETTINGS[name])

    on_ranks(config, graph_of(kind), assert_sent_as_planned)


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
