"""Scores of each class and label of complete runs, against scikit-learn on what the runs predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics as oracle

import mggcn
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.train import class_scores, score_parts

EXACT = {"rel": 1e-12, "abs": 1e-12}
RUNS = (
    {"ranks": 1},
    {"ranks": 3, "transport": "threads"},
    {"ranks": 3, "transport": "threads", "strategy": "delayed", "order": "random"},
)


def trained(graph: Graph, **settings: Any) -> mggcn.Trainer:
    """A run whose best epoch is not its last."""
    common = {"hidden": (8,), "threads": 1, "lr": 0.3, "seed": 2, "epochs": 12}
    trainer = mggcn.Trainer(graph, **common | settings)
    trainer.fit()
    return trainer


def splits_of(graph: Graph) -> dict[str, np.ndarray]:
    return {name: split.array().reshape(-1, graph.num_vertices)[0] for name, split in graph.splits.items()}


@pytest.mark.parametrize("where", RUNS, ids=["1", "3", "cut"])
@pytest.mark.parametrize("metric", ["accuracy", "roc_auc"])
def test_classes_equal_scikit_learn(where: dict[str, Any], metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank or a copy is missing or counts twice, other weights than the best are scored, or rows are columns."""
    monkeypatch.setattr(score_parts, "SCORED_ROWS", 7)
    graph = community(150, 450, 6, 4, seed=31)
    trainer = trained(graph, metric=metric, **where)
    result, classes = trainer.result(), range(4)
    assert result["best"]["epoch"] < result["final"]["epoch"]
    assert graph.labels is not None
    labels, predicted = graph.labels.array(), trainer.predict(classes=True)
    assert not np.array_equal(predicted, trainer.predict(classes=True, weights="last"))
    for name, rows in splits_of(graph).items():
        came = result["per_class"][name]
        table = oracle.precision_recall_fscore_support(labels[rows], predicted[rows], labels=classes, zero_division=0)
        for key, expected in zip(("precision", "recall", "f1", "support"), table, strict=True):
            assert came[key] == pytest.approx(expected, **EXACT), (name, key)
        assert came["confusion"] == oracle.confusion_matrix(labels[rows], predicted[rows], labels=classes).tolist()
    if metric == "accuracy":
        matrix = np.array(result["per_class"]["test"]["confusion"])
        assert np.trace(matrix) / matrix.sum() == result["best"]["test"]


@pytest.mark.parametrize("where", RUNS[:2], ids=["1", "3"])
def test_labels_equal_scikit_learn(where: dict[str, Any]) -> None:
    """Fails if a label's scores are another's, unknown entries count, or a split that is not there has scores."""
    graph = community(120, 400, 6, 3, seed=32, task="labels", val=0.0)
    trainer = trained(graph, **where)
    assert graph.labels is not None
    labels, predicted = graph.labels.array(), trainer.predict(classes=True)
    scores = trainer.result()["per_class"]
    assert scores.keys() == {"train", "test"}
    for name, came in scores.items():
        rows = splits_of(graph)[name]
        for label in range(3):
            known = rows & (labels[:, label] >= 0)
            table = oracle.precision_recall_fscore_support(
                labels[known, label], predicted[known, label], labels=[1], zero_division=0
            )
            for key, expected in zip(("precision", "recall", "f1", "support"), table, strict=True):
                assert came[key][label] == pytest.approx(expected[0], **EXACT), (name, key)
        assert "confusion" not in came


def test_the_best_repeat_is_scored_and_numbers_are_not() -> None:
    """Fails if the last repeat's weights are scored for the best one's, or the trainer goes on with the best weights."""
    graph = community(150, 450, 6, 4, seed=31)
    trainer = trained(graph, repeat=3)
    result = trainer.result()
    assert result["best"] != result["runs"][-1]["best"]
    matrix = np.array(result["per_class"]["test"]["confusion"])
    assert np.trace(matrix) / matrix.sum() == result["best"]["test"]
    assert "per_class" not in trained(community(60, 200, 4, 2, seed=5, task="numbers")).result()


def test_many_classes_have_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a matrix is kept of more classes than one reads."""
    monkeypatch.setattr(class_scores, "MATRIX_CLASSES", 3)
    scores = trained(community(90, 300, 6, 4, seed=31)).result()["per_class"]["test"]
    assert "confusion" not in scores
    assert len(scores["f1"]) == 4
