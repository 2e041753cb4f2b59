"""Scores against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as oracle

from mggcn.train.metrics import (
    accuracy,
    average_precision,
    balanced_accuracy,
    counted,
    gathered_score,
    label_score,
    macro_f1,
    micro_f1,
    multiclass_auc,
    per_class,
    roc_auc,
)

EXACT = {"rel": 1e-12, "abs": 1e-12}


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
    assert accuracy(counts) == pytest.approx(oracle.accuracy_score(labels, predicted), **EXACT)
    assert macro_f1(counts) == pytest.approx(
        oracle.f1_score(labels, predicted, average="macro", zero_division=0), **EXACT
    )
    assert micro_f1(counts) == pytest.approx(oracle.f1_score(labels, predicted, average="micro"), **EXACT)
    present = np.isin(predicted, labels)  # scikit-learn warns of predictions of a class that no vertex has
    counts = counts_of(labels[present], predicted[present], classes)
    if 1 < np.unique(labels[present]).size == np.unique(labels).size:
        expected = oracle.balanced_accuracy_score(labels[present], predicted[present])
        assert balanced_accuracy(counts) == pytest.approx(expected, **EXACT)
    table = oracle.precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=0)
    for name, expected in zip(("precision", "recall", "f1", "support"), table, strict=True):
        assert per_class(counts_of(labels, predicted, classes))[name] == pytest.approx(expected, **EXACT)


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
        assert roc_auc(scores, positive) == pytest.approx(oracle.roc_auc_score(positive, scores), **EXACT)
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
    assert multiclass_auc(logits, labels) == pytest.approx(expected, **EXACT)
    assert multiclass_auc(logits + 1e5, labels) == pytest.approx(expected, **EXACT)
    one = logits[:, 1:2] - logits[:, :1]
    assert multiclass_auc(one, labels % 2) == pytest.approx(oracle.roc_auc_score(labels % 2, one[:, 0]), **EXACT)
    some = labels % 3  # class 3 is absent: it is left out of the mean
    known = [oracle.roc_auc_score(some == c, probability[:, c]) for c in range(3)]
    assert multiclass_auc(logits, some) == pytest.approx(np.mean(known), **EXACT)


@pytest.mark.parametrize("seed", range(40, 44))
def test_scores_of_several_labels_equal_scikit_learn(seed: int) -> None:
    """Fails if an unknown entry counts, or a label without positives does, or does not, where it should."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, (70, 5))
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, 1 - truth)
    if seed == 41:
        truth[:, 2] = predicted[:, 2] = 0
    positive, known = truth == 1, np.full(5, 70)
    counts = np.stack([(positive & (predicted == 1)).sum(0), predicted.sum(0), truth.sum(0)])
    of = {"micro_f1": "micro", "macro_f1": "macro"}
    for metric, average in of.items():
        expected = oracle.f1_score(truth, predicted, average=average, zero_division=0)
        assert label_score(metric, counts, known) == pytest.approx(expected, **EXACT)
    assert label_score("accuracy", counts, known) == pytest.approx((truth == predicted).mean(), **EXACT)
    if seed != 41:
        each = [oracle.balanced_accuracy_score(truth[:, c], predicted[:, c]) for c in range(5)]
        assert label_score("balanced_accuracy", counts, known) == pytest.approx(np.mean(each), **EXACT)
    unused = np.concatenate([counts, np.zeros((3, 1), np.int64)], 1)
    for metric in ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1"):
        assert label_score(metric, unused, np.append(known, 0)) == label_score(metric, counts, known)
        assert label_score(metric, counts * 0, known * 0) is None


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_equals_scikit_learn(ties: bool) -> None:
    """Fails if equal scores come one after the other, or the curve is interpolated."""
    rng = np.random.default_rng(91)
    scores = rng.normal(size=90)
    scores = np.round(scores * 2) if ties else scores
    positive = rng.random(90) < 0.3
    expected = oracle.average_precision_score(positive, scores)
    assert average_precision(scores, positive) == pytest.approx(expected, **EXACT)
    assert average_precision(scores, np.zeros(90, bool)) is None


def test_gathered_scores_of_entries_equal_scikit_learn() -> None:
    """Fails if an unknown entry or a column without a score takes part in the mean over columns."""
    rng = np.random.default_rng(92)
    scores, unknown = rng.normal(size=(60, 4)), rng.random((60, 4)) < 0.2
    labels = np.where(unknown, np.nan, rng.integers(0, 2, (60, 4)))
    labels[:, 3] = np.nan
    numbers = np.where(unknown, np.nan, rng.normal(size=(60, 4)) + scores)
    numbers[:, 3] = np.nan
    of = {
        "roc_auc": (labels, oracle.roc_auc_score),
        "average_precision": (labels, oracle.average_precision_score),
        "mae": (numbers, oracle.mean_absolute_error),
        "rmse": (numbers, oracle.root_mean_squared_error),
        "r2": (numbers, oracle.r2_score),
    }
    for metric, (truth, expected) in of.items():
        each = [expected(truth[~unknown[:, c], c], scores[~unknown[:, c], c]) for c in range(3)]
        assert gathered_score(metric, scores, truth) == pytest.approx(np.mean(each), **EXACT)
        assert gathered_score(metric, scores[:0], truth[:0]) is None
    same = np.ones((9, 1))
    assert gathered_score("r2", same, same) == 1.0
    assert gathered_score("r2", same + 1, same) == 0.0
    assert gathered_score("r2", same[:1], same[:1]) is None


def test_average_precision_of_classes() -> None:
    """Fails if classes are not compared one against the rest by probability."""
    rng = np.random.default_rng(93)
    logits, labels = rng.normal(size=(200, 4)), rng.integers(0, 4, 200)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = oracle.average_precision_score(labels, probability)
    assert gathered_score("average_precision", logits, labels) == pytest.approx(expected, **EXACT)
