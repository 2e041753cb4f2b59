"""Scores against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as oracle

from mggcn.train.metrics import accuracy, counted, macro_f1, multiclass_auc, roc_auc


def counts_of(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    return np.stack([np.bincount(x, minlength=classes) for x in (labels[labels == predicted], predicted, labels)])


@pytest.mark.parametrize("seed", range(300, 312))
def test_counted_scores_equal_scikit_learn(seed: int) -> None:
    """Fails if a class that is absent, never predicted or never right counts wrongly."""
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 8))
    labels = rng.choice(rng.integers(0, classes, 3), 60)
    predicted = np.where(rng.random(60) < 0.5, labels, rng.integers(0, classes, 60))
    if seed % 3 == 0:
        predicted[:] = labels[0]
    counts = counts_of(labels, predicted, classes)
    assert accuracy(counts) == pytest.approx(oracle.accuracy_score(labels, predicted))
    assert macro_f1(counts) == pytest.approx(oracle.f1_score(labels, predicted, average="macro", zero_division=0))


def test_empty_splits_have_no_score() -> None:
    """Fails if a split without vertices divides by zero or counts as 0."""
    counts = np.stack([np.zeros((3, 4), np.int64), counts_of(np.array([1, 2]), np.array([1, 3]), 4)]).take([0, 1, 0], 0)
    assert counted("accuracy", counts) == {"train": None, "val": 0.5, "test": None}
    assert counted("macro_f1", counts)["train"] is None
    assert counted("macro_f1", counts)["val"] == pytest.approx(1 / 3)
    assert multiclass_auc(np.zeros((0, 2)), np.zeros(0, np.int64)) is None


@pytest.mark.parametrize("ties", [False, True])
def test_roc_auc_equals_scikit_learn(ties: bool) -> None:
    """Fails if ties are counted for one side, or ranks are off by one."""
    rng = np.random.default_rng(88)
    for _ in range(10):
        scores = rng.normal(size=80)
        scores = np.round(scores * 2) if ties else scores
        positive = rng.random(80) < 0.3
        positive[:2] = True, False
        assert roc_auc(scores, positive) == pytest.approx(oracle.roc_auc_score(positive, scores))
    assert roc_auc(np.zeros(9), np.arange(9) < 4) == 0.5
    assert roc_auc(scores, np.ones(80, bool)) is None
    assert roc_auc(scores, np.zeros(80, bool)) is None


def test_multiclass_auc_ranks_probabilities() -> None:
    """Fails if logits of different vertices are compared as they are, or large ones overflow."""
    rng = np.random.default_rng(89)
    logits = rng.normal(size=(200, 4)) + 3 * rng.normal(size=(200, 1))
    labels = rng.integers(0, 4, 200)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = oracle.roc_auc_score(labels, probability, multi_class="ovr")
    assert multiclass_auc(logits, labels) == pytest.approx(expected)
    assert multiclass_auc(logits + 1e5, labels) == pytest.approx(expected)
    one = logits[:, 1:2] - logits[:, :1]
    assert multiclass_auc(one, labels % 2) == pytest.approx(oracle.roc_auc_score(labels % 2, one[:, 0]))
    some = labels % 3  # class 3 is absent: it is left out of the mean
    known = [oracle.roc_auc_score(some == c, probability[:, c]) for c in range(3)]
    assert multiclass_auc(logits, some) == pytest.approx(np.mean(known))
