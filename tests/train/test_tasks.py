"""Tasks on generated graphs on which the graph helps, and what does not fit a graph's labels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import resolve
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from mggcn.feed.labels import class_weights
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.tasks import labelled


@functools.cache
def graph_of(task: str) -> Graph:
    graph = make_graph(pattern("directed", 37, 6), num_features=11, num_classes=4, seed=8)
    return labelled(graph, task)


def test_balanced_weights_are_scikit_learns() -> None:
    """Fails if balanced weights are other than n / (classes * count), or a class without training vertices gets one."""
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat(np.arange(4), [5, 1, 12, 7])
    found = class_weights(TrainConfig(class_weights="balanced"), np.bincount(labels, minlength=6))
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    assert found is not None
    np.testing.assert_allclose(found, [*expected, 0.0, 0.0], rtol=1e-12)


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
        ("mse", {"class_weights": "balanced"}, "train.class_weights belongs to classes, .* leave it out"),
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
