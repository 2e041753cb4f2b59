"""Whole runs of every convolution: the losses of one rank on several, the same bits twice and when resumed; batch norm."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import plan_graph
from mggcn.assemble.rank import Rank
from mggcn.config import Config
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.options import GraphOptions
from mggcn.train.checkpoint import load_checkpoint
from tests.graphs import Trained, assert_sent_as_planned, make_graph, on_ranks, one_epoch, pattern
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run
from tests.train.test_trainer import fit

BATCH: dict[str, Any] = {
    "hidden": (12, 12),
    "dropout": 0.3,
    "norm_layer": "batch",
    "residual": "linear",
    "head": "linear",
}
HEADS: dict[str, Any] = {"heads": 4, "attention_dropout": 0.3}
MODELS: dict[str, dict[str, Any]] = {
    "gcn": BATCH,
    "gcn mean": BATCH | {"norm": "mean", "norm_layer": "none", "input_dropout": 0.2},
    "sage": BATCH | {"kind": "sage", "norm_layer": "layer"},
    "sage mean": BATCH | {"kind": "sage", "aggregator": "mean", "jumping": "max"},
    # Not before a batch norm: where every maximum is active, it takes the pooling's bias out again, Adam steps by the sign
    # of a gradient that is rounding alone, and the next ReLU hangs on it. `NORMED` has the two together. Under BATCH's
    # dropout a maximum is so near a tie in epoch 9 that rounding decides it.
    "sage max": BATCH
    | {"kind": "sage", "aggregator": "max", "norm_layer": "layer", "head": "convolution", "dropout": 0.2},
    "gin": BATCH | {"kind": "gin", "norm_layer": "layer", "activation": "elu"},
    "gat": BATCH | HEADS | {"kind": "gat", "activation": "elu"},
    "gatv2": BATCH | HEADS | {"kind": "gatv2", "norm_layer": "layer", "head": "convolution", "jumping": "concat"},
    "sgc": {"kind": "sgc", "hops": 3, "input_dropout": 0.2},
    "appnp": {"kind": "appnp", "hidden": (12,), "dropout": 0.3, "norm_layer": "batch", "activation": "gelu"},
    "rgcn": BATCH | {"kind": "rgcn", "bases": 3},
    "mlp": BATCH | {"kind": "mlp", "activation": "leaky_relu"},
}
TASKS: dict[str, dict[str, Any]] = {
    "classes": {},
    "balanced": {"class_weights": "balanced", "label_smoothing": 0.1},
    "labels": {},
    "numbers": {"loss": "mse", "clip_norm": 0.5},
    "errors": {"loss": "mae", "optimizer": "sgd", "momentum": 0.9, "clip_norm": 1.0},
}
"""Settings of the training by task; labels of `graph_of` by the first letters."""
PLACES = [(2, "broadcast"), (4, "broadcast"), (2, "halo"), (4, "halo"), (2, "delayed"), (4, "delayed"), (4, "slice")]


def typed(graph: Graph, relations: bool = True) -> Graph:
    """The graph with directed edges of five relations in place of its own, five a vertex, parallel ones among them."""
    if not relations:
        return graph
    n, rng = graph.num_vertices, np.random.default_rng(6)
    edges, types = rng.integers(0, n - 1, (2, 5 * n)), rng.integers(0, 5, 5 * n)
    weights = None if graph.adj.values is None else rng.random(5 * n) + 0.5
    sums = GraphOptions(duplicates="sum")
    made = from_arrays(edges=edges, edge_types=types, weights=weights, num_vertices=n, num_relations=5, options=sums)
    return dataclasses.replace(graph, adj=made.adj, adj_t=made.adj_t, num_relations=5)


@functools.cache
def graph_of(task: str, relations: bool = False) -> Graph:
    """A graph of 61 vertices, some entries of labels unknown; but for `classes` and `errors` its edges have weights."""
    weighted = task not in ("classes", "errors")
    kind = "weighted" if weighted else "random"
    sizes: Any = {"num_features": 7, "num_classes": 4, "sparse": False, "weighted": weighted, "seed": 8}
    graph, rng = typed(make_graph(pattern(kind, 61, 6), **sizes), relations), np.random.default_rng(5)
    if task == "labels":
        labels = rng.integers(-1, 2, (61, 4)).astype(np.int8)
        labels[:, 0] = np.abs(labels[:, 0])
    elif task in ("numbers", "errors"):
        labels = rng.normal(size=(61, 4)).astype(np.float32)
        labels[:, 1:][rng.random((61, 3)) < 0.3] = np.nan
    else:
        return graph
    return dataclasses.replace(graph, labels=ArrayRows(labels))


def settled(name: str, task: str, ranks: int, strategy: str, threads: int = 1, **train: Any) -> Config:
    """A run in float32; of what a strategy cannot run, the run by halo."""
    if strategy == "slice" and name in ("sage max", "rgcn"):
        strategy = "halo"
    config = with_run(config_of(ranks, strategy=strategy, **MODELS[name]), precision="fp32", threads=threads)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **(TASKS[task] | train)))


def curve(
    name: str, task: str, ranks: int, strategy: str, threads: int = 1, epochs: int = 10
) -> tuple[list[float], Any]:
    """Losses of epochs and what the weights then are, running statistics among them."""

    def body(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(epochs)]
        return losses, rank.trainer.runtime.weights.state_dict()

    first, *others = on_ranks(settled(name, task, ranks, strategy, threads), graph_of(task, name == "rgcn"), body)
    for losses, weights in others:
        assert losses == first[0]
        assert all(torch.equal(weights[key], value) for key, value in first[1].items())
    return first  # type: ignore[no-any-return]


@functools.cache
def of_one_rank(name: str, task: str) -> list[float]:
    return curve(name, task, 1, "broadcast")[0]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize(("ranks", "strategy"), PLACES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_do_not_depend_on_the_ranks(name: str, task: str, ranks: int, strategy: str) -> None:
    """Fails if ten epochs in float32 differ by more than rounding between rank counts."""
    base = of_one_rank(name, task)
    assert min(base) < base[0]
    np.testing.assert_allclose(curve(name, task, ranks, strategy)[0], base, rtol=1e-5)


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), *PLACES])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_twice(name: str, ranks: int, strategy: str) -> None:
    """Fails if a sum depends on time or on how ranks are scheduled, or one rank's losses on its threads."""
    losses, weights = curve(name, "numbers", ranks, strategy, epochs=5)
    again = curve(name, "numbers", ranks, strategy, 3 if ranks == 1 else 1, epochs=5)
    assert losses == again[0]
    assert all(torch.equal(again[1][key], value) for key, value in weights.items())


@pytest.mark.parametrize("strategy", ["halo", "delayed"])
def test_bytes_and_messages_are_as_planned(strategy: str) -> None:
    """Fails if a sum of statistics is not in the plan."""

    on_ranks(config_of(3, strategy=strategy, **BATCH), graph_of("classes"), assert_sent_as_planned)


STOPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plateau": (
        "balanced",
        3,
        {"schedule": "plateau", "schedule_patience": 0, "lr": 0.3, "clip_norm": 0.05, "warmup": 2},
    ),
    "patience": ("errors", 6, {"schedule": "plateau", "schedule_patience": 2, "lr": 1.0, "clip_norm": 0.2}),
    "cosine": ("labels", 1, {"schedule": "cosine", "optimizer": "adamw", "weight_decay": 0.1, "eval_every": 2}),
}
"""Task, lines of history after which a signal comes, and settings of the training."""


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (2, "slice"), (3, "halo"), (3, "delayed")])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_resumes_bit_for_bit(name: str, ranks: int, strategy: str, stop: str, tmp_path: Path) -> None:
    """Fails if running statistics, a moment or the plateau's state is not part of a checkpoint, or begins afresh."""
    task, stop_after, train = STOPS[stop]
    config = settled(name, task, ranks, strategy, epochs=10, **train)
    graph = graph_of(task, name == "rgcn")
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole = fit(config, graph, folders[0])
    assert any(key.endswith("running_var") for key in whole[1]) == (config.model.norm_layer == "batch")
    assert not fit(config, graph, folders[1], stop_after)[0]
    parts = fit(config, graph, folders[1])
    assert parts[2:] == whole[2:]
    assert all(torch.equal(parts[1][key], weight) for key, weight in whole[1].items())
    if stop == "plateau":
        loaded = load_checkpoint(folders[0] / "checkpoints")
        assert loaded is not None
        assert loaded[0].rate is not None, "the rate was never cut"


NORMED = {
    name: {"hidden": (12, 8), "norm_layer": "batch", "dropout": 0.3} | model
    for name, model in {
        "gcn": {"residual": "linear"},
        "sage": {"kind": "sage", "jumping": "concat"},
        "sage mean": {"kind": "sage", "aggregator": "mean"},
        "sage max": {"kind": "sage", "aggregator": "max"},
        "gin": {"kind": "gin", "activation": "elu"},
        "gat": {"kind": "gat", "heads": 4, "attention_dropout": 0.2},
        "gatv2": {"kind": "gatv2", "heads": 4},
        "appnp": {"kind": "appnp", "dense_before": (6,)},
        "rgcn": {"kind": "rgcn", "bases": 3},
        "mlp": {"kind": "mlp", "dense_between": True},
    }.items()
}


def normed(name: str, graph: Graph, ranks: int, strategy: str) -> list[Trained]:
    """What ranks have in float64 after an epoch whose gradient is kept: its gradients, then running statistics, logits."""
    config = config_of(ranks, strategy="broadcast" if ranks == 1 else strategy, **NORMED[name])
    return one_epoch(config, graph)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("which", ["random", "weighted", "few"])
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(3, "broadcast"), (3, "halo"), (3, "slice"), (3, "delayed"), (5, "halo")]
)
@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_of_ranks_is_that_of_one_process(name: str, ranks: int, strategy: str, which: str) -> None:
    """Fails if a copy of a vertex cut, or a rank's own rows alone, or a rank without rows, make statistics of their own."""
    strategy = "halo" if strategy == "slice" and name in ("sage max", "rgcn") else strategy
    graph = graph_of("balanced" if which == "weighted" else "classes", name == "rgcn")
    if which == "few":
        sizes: Any = {"num_features": 7, "num_classes": 4, "sparse": False, "weighted": False, "seed": 8}
        graph = typed(make_graph(pattern("path", 4, 6), **sizes), name == "rgcn")
    (alone,) = normed(name, graph, 1, strategy)
    largest = max(float(np.abs(gradient).max()) for gradient in alone.grads.values())
    statistics = [key for key in alone.weights if "running" in key]
    assert len(statistics) == 2 * len([key for key in alone.weights if key.startswith("norms") and "bias" in key]) > 0
    for rank in normed(name, graph, ranks, strategy):
        assert abs(rank.loss - alone.loss) < 1e-10 * alone.loss
        for key, gradient in alone.grads.items():
            # The gradient of a bias before a norm is zero but for rounding.
            scale = max(float(np.abs(gradient).max()), 1e-2 * largest)
            np.testing.assert_allclose(rank.grads[key], gradient, rtol=0, atol=1e-10 * scale, err_msg=key)
        for key in statistics:
            assert torch.count_nonzero(alone.weights[key] - float("var" in key))
            torch.testing.assert_close(rank.weights[key], alone.weights[key], rtol=1e-10, atol=1e-12)
        expected = alone.logits[np.argsort(alone.ids)][rank.ids]
        np.testing.assert_allclose(rank.logits, expected, rtol=0, atol=1e-10 * np.abs(alone.logits).max())


def test_nothing_is_pruned_before_a_batch_norm() -> None:
    """Fails if statistics are taken from some vertices, or the plan does not say why all rows are computed."""
    for norm_layer, said in (("batch", True), ("layer", False)):
        config = with_run(config_of(2, **BATCH | {"norm_layer": norm_layer}), prune="auto")
        plan, _ = plan_graph(config, graph_of("classes"))
        reasons = [rows.reason for rows in plan.ranks[0].rows]
        assert any("batch-norm 1 takes its statistics from all vertices" in reason for reason in reasons) == said
