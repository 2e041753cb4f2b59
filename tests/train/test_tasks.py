"""Losses of every task: gradients of the whole graph, and generated graphs on which the graph helps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble import resolve
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.generate import community
from mggcn.train.targets import ClassTarget, EntryTarget
from tests.graphs import make_graph, on_ranks, one_epoch, pattern
from tests.reference import dense_features, normalized

SEED = 20011
CLASS_WEIGHTS = (0.5, 2.0, 1.25, 3.0)
TASKS: dict[str, dict[str, Any]] = {
    "weights": {"class_weights": CLASS_WEIGHTS},
    "balanced": {"class_weights": "balanced", "label_smoothing": 0.2},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignored_labels": (1,)},
    "bce": {"loss": "bce"},
    "mse": {"loss": "mse"},
    "mae": {"loss": "mae"},
}


@functools.cache
def graph_of(task: str) -> Graph:
    graph = make_graph(pattern("directed", 37, 6), num_features=11, num_classes=4, sparse=False, weighted=False, seed=8)
    rng = np.random.default_rng(77)
    if task == "bce":
        labels = rng.integers(-1, 2, (37, 4)).astype(np.int8)
        labels[:, 0] = np.abs(labels[:, 0])
    elif task in ("mse", "mae"):
        labels = rng.normal(size=(37, 4)).astype(np.float32)
        labels[:, 1:][rng.random((37, 3)) < 0.3] = np.nan
    else:
        return graph
    return dataclasses.replace(graph, labels=ArrayRows(labels))


def reference(graph: Graph, config: Config, weights: dict[str, torch.Tensor]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by torch's own losses on dense matrices in float64."""
    params = {n: w.to(torch.float64).clone().requires_grad_(True) for n, w in weights.items()}
    a_hat, h = torch.from_numpy(normalized(graph, config.model)), torch.from_numpy(dense_features(graph))
    train = torch.from_numpy(graph.splits["train"].array()[0])
    settings, functional = config.train, torch.nn.functional
    assert graph.labels is not None
    with torch.enable_grad():
        for layer in (1, 2):
            h = a_hat @ (h @ params[f"layers.{layer}.weight"]) + params[f"layers.{layer}.bias"]
            h = torch.relu(h) if layer == 1 else h
        if graph.task == "classes":
            labels = torch.from_numpy(graph.labels.array().astype(np.int64))
            for ignored in settings.ignored_labels:
                train = train & (labels != ignored)
            known = None if settings.class_weights == "none" else torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
            if settings.class_weights == "balanced":
                known = balanced(labels[train])
            smoothing = settings.label_smoothing
            loss = functional.cross_entropy(h[train], labels[train], weight=known, label_smoothing=smoothing)
        else:
            targets = torch.from_numpy(graph.labels.array().astype(np.float64))
            counts = train[:, None] & ((targets >= 0) if graph.task == "labels" else ~targets.isnan())
            of = {
                "bce": functional.binary_cross_entropy_with_logits,
                "mse": functional.mse_loss,
                "mae": functional.l1_loss,
            }
            loss = of[settings.loss](h[counts], targets[counts])
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {n: p.grad.numpy() for n, p in params.items()}  # type: ignore[union-attr]


def balanced(labels: torch.Tensor) -> torch.Tensor:
    from sklearn.utils.class_weight import compute_class_weight

    found = compute_class_weight("balanced", classes=np.arange(4), y=labels.numpy())
    return torch.from_numpy(found)


def relative_error(task: str, ranks: int, strategy: str) -> float:
    graph = graph_of(task)
    transport = "threads" if ranks > 1 else "single"
    run: dict[str, Any] = {"ranks": ranks, "strategy": strategy, "transport": transport}
    config = Config(
        model=ModelConfig(hidden=(7,)),
        train=TrainConfig(seed=SEED, **TASKS[task]),
        run=RunConfig(threads=1, precision="fp64", **run),
    )
    found = one_epoch(config, graph)
    loss, grads = reference(graph, config, found[0].weights)
    errors = [abs(rank.loss - loss) / abs(loss) for rank in found]
    for rank, (name, expected) in itertools.product(found, grads.items()):
        errors.append(float(np.abs(rank.grads[name] - expected).max() / np.abs(expected).max()))
    return max(errors)


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "delayed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_gradients_of_every_task_equal_autograd(task: str, ranks: int, strategy: str) -> None:
    """Fails if a rank divides by its own count, or weights, smoothing, unknown entries or ignored classes go astray."""
    assert relative_error(task, ranks, strategy) < 1e-10


@pytest.mark.parametrize("task", ["weights", "mse"])
def test_planted_local_count_is_caught(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exactness test itself fails where a rank's mean is over its own vertices."""

    def local(self, backend, z, row_scale, loss, partials):  # type: ignore[no-untyped-def]
        target = dataclasses.replace(self.target, inv_count=1 / max(int((self.mask & 1).sum()), 1))
        if task == "mse":
            backend.entry_loss(self.kind, z, target, row_scale, loss, partials)
        else:
            backend.softmax_xent(z, target, row_scale, loss, partials)

    monkeypatch.setattr(EntryTarget if task == "mse" else ClassTarget, "loss", local)
    assert relative_error(task, 3, "broadcast") > 1e-6


@pytest.mark.parametrize(("kind", "metric"), [("labels", "micro_f1"), ("numbers", "rmse"), ("classes", "accuracy")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_graph_helps_on_generated_tasks(kind: Any, metric: str, ranks: int) -> None:
    """Fails if a task does not learn, does so differently on several ranks, or an error counts as better when higher."""
    graph = community(500, 4000, 16, 4, seed=5, train=0.3, val=0.2, task=kind)
    scores = {}
    for model in ("gcn", "mlp") if ranks == 1 else ("gcn",):
        config = Config(
            model=ModelConfig(kind=model, hidden=(16,)),  # type: ignore[arg-type]
            train=TrainConfig(seed=7, epochs=60, lr=0.02),
            run=RunConfig(ranks=ranks, threads=1, transport="threads" if ranks > 1 else "single"),
        )
        assert resolve(config, graph).train.metric == metric

        def body(rank: Any) -> float:
            losses = [rank.trainer.step(epoch) for epoch in range(60)]
            assert losses[-1] < 0.8 * losses[0]
            score = rank.trainer.evaluate()["test"]
            assert score is not None
            return float(score)

        scores[model] = on_ranks(config, graph, body)[0]
    best = {"labels": 0.8, "classes": 0.9, "numbers": 0.6}[kind]
    if metric == "rmse":
        assert scores["gcn"] < best
        assert scores["gcn"] < 0.8 * scores.get("mlp", np.inf)
    else:
        assert scores["gcn"] > best
        assert scores["gcn"] > scores.get("mlp", 0) + 0.1


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("bce", {"loss": "mse"}, "does not fit"),
        ("weights", {"loss": "bce"}, "does not fit"),
        ("mse", {"metric": "accuracy"}, "rmse, mae, r2"),
        ("bce", {"metric": "rmse"}, "micro_f1"),
        ("mse", {"class_weights": "balanced"}, "belong to classes"),
        ("weights", {"class_weights": "1,2"}, "each of 4 classes, got 2"),
        ("weights", {"ignored_labels": (4,)}, "classes 0 .. 3"),
        ("weights", {"ignored_labels": (0, 1, 2, 3)}, "no training vertex"),
    ],
)
def test_what_does_not_fit_the_labels_is_refused(task: str, settings: dict[str, Any], words: str) -> None:
    """Fails if a loss, a score or a setting of classes is taken for labels that it does not mean anything for."""
    config = Config(train=TrainConfig(**settings), run=RunConfig(threads=1))
    with pytest.raises(ConfigError, match=words):
        on_ranks(config, graph_of(task), lambda rank: None)


@pytest.mark.parametrize("settings", [{"class_weights": "0,1"}, {"class_weights": "much"}, {"label_smoothing": 1.0},
                                      {"ignored_labels": (-1,)}, {"loss": "mse", "label_smoothing": 0.1}])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    """Fails if a weight of zero, a whole share of smoothing, or a setting of another loss is taken."""
    with pytest.raises(ConfigError, match=r"train\."):
        TrainConfig(**settings)
    assert TrainConfig(class_weights=[1, 2.5]).weights_of_classes() == (1.0, 2.5)  # type: ignore[arg-type]
