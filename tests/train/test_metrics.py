"""Scores against scikit-learn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax
from sklearn import metrics as oracle

from mggcn.assemble.rank import Rank
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.train.metrics import (
    accuracy,
    average_precision,
    balanced_accuracy,
    counted,
    gathered_score,
    label_score,
    macro_f1,
    micro_f1,
    multiclass,
    per_class,
    roc_auc,
)
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_exact import config_of

EXACT = {"rel": 1e-12, "abs": 1e-12}


def counts_of(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    return np.stack([np.bincount(x, minlength=classes) for x in (labels[labels == predicted], predicted, labels)])


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
@pytest.mark.parametrize("size", [1, 2, 3, 60])
def test_counted_scores_equal_scikit_learn(size: int) -> None:
    """Fails if a class that is absent, never predicted or never right counts wrongly, or one vertex or class is special."""
    rng = np.random.default_rng(300 + size)
    for number in range(24):
        classes = int(rng.integers(2, 8))
        labels = rng.choice(rng.integers(0, classes, rng.integers(1, 4)), size)
        predicted = np.where(rng.random(size) < 0.5, labels, rng.integers(0, classes, size))
        if number % 3 == 0:
            predicted[:] = labels[0]
        counts = counts_of(labels, predicted, classes)
        for metric, expected in (
            (accuracy, oracle.accuracy_score(labels, predicted)),
            (balanced_accuracy, oracle.balanced_accuracy_score(labels, predicted)),
            (macro_f1, oracle.f1_score(labels, predicted, average="macro", zero_division=0)),
            (micro_f1, oracle.f1_score(labels, predicted, average="micro")),
        ):
            assert metric(counts) == pytest.approx(expected, **EXACT), metric.__name__
        table = oracle.precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=0)
        for name, expected in zip(("precision", "recall", "f1", "support"), table, strict=True):
            assert per_class(counts)[name] == pytest.approx(expected, **EXACT)


def test_empty_splits_have_no_score() -> None:
    """Fails if a split without vertices divides by zero or counts as 0."""
    counts = np.stack([np.zeros((3, 4), np.int64), counts_of(np.array([1, 2]), np.array([1, 3]), 4)]).take([0, 1, 0], 0)
    assert counted("accuracy", counts) == {"train": None, "val": 0.5, "test": None}
    assert counted("macro_f1", counts)["train"] is None
    assert counted("macro_f1", counts)["val"] == pytest.approx(1 / 3)
    assert multiclass(roc_auc, np.zeros((0, 2)), np.zeros(0, np.int64)) is None


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
    assert multiclass(roc_auc, logits, labels) == pytest.approx(expected, **EXACT)
    assert multiclass(roc_auc, logits + 1e5, labels) == pytest.approx(expected, **EXACT)
    one = logits[:, 1:2] - logits[:, :1]
    assert multiclass(roc_auc, one, labels % 2) == pytest.approx(oracle.roc_auc_score(labels % 2, one[:, 0]), **EXACT)
    some = labels % 3  # class 3 is absent: it is left out of the mean
    known = [oracle.roc_auc_score(some == c, probability[:, c]) for c in range(3)]
    assert multiclass(roc_auc, logits, some) == pytest.approx(np.mean(known), **EXACT)


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


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3e7])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_constant_targets_equal_scikit_learn(value: float, size: int) -> None:
    """Fails if R2 of targets that are all equal, which have no spread but rounding, or of one target is another."""
    targets = np.full((size, 1), value)
    for scores in (targets, targets + 1, targets + np.linspace(0, 1e-3, size)[:, None]):
        for metric, expected in (("mae", oracle.mean_absolute_error), ("rmse", oracle.root_mean_squared_error)):
            assert gathered_score(metric, scores, targets) == pytest.approx(expected(targets, scores), **EXACT)
        expected_r2 = None if size == 1 else pytest.approx(oracle.r2_score(targets, scores), **EXACT)
        assert gathered_score("r2", scores, targets) == expected_r2


def test_average_precision_of_classes() -> None:
    """Fails if classes are not compared one against the rest by probability."""
    rng = np.random.default_rng(93)
    logits, labels = rng.normal(size=(200, 4)), rng.integers(0, 4, 200)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = oracle.average_precision_score(labels, probability)
    assert gathered_score("average_precision", logits, labels) == pytest.approx(expected, **EXACT)


def of_classes(metric: str, logits: np.ndarray, labels: np.ndarray) -> float | None:
    """The metric by scikit-learn; of several classes the mean over those that have a score."""
    predicted = logits.argmax(1)
    if metric == "accuracy":
        return float(oracle.accuracy_score(labels, predicted))
    if metric == "balanced_accuracy":
        return float(oracle.balanced_accuracy_score(labels, predicted))
    if metric.endswith("f1"):
        return float(oracle.f1_score(labels, predicted, average=metric.removesuffix("_f1"), zero_division=0))
    ranked = log_softmax(logits, axis=1)
    scored = {1: logits[:, 1] - logits[:, 0]} if logits.shape[1] == 2 else dict(enumerate(ranked.T))
    return mean_of(metric, [((labels == c).astype(int), scores) for c, scores in scored.items()])


def of_entries(metric: str, logits: np.ndarray, labels: np.ndarray) -> float | None:
    """The metric by scikit-learn of known entries: of each column, or of all entries for accuracy and micro F1."""
    known = ~np.isnan(labels)
    columns = [(labels[rows, d], logits[rows, d]) for d, rows in enumerate(known.T)]
    if metric in ("accuracy", "micro_f1"):
        truth, predicted = labels[known], logits[known] > 0
        score = oracle.accuracy_score if metric == "accuracy" else functools.partial(oracle.f1_score, zero_division=0)
        return float(score(truth, predicted)) if known.any() else None
    if metric in ("balanced_accuracy", "macro_f1"):
        columns = [(truth, scores > 0) for truth, scores in columns]
    return mean_of(metric, columns)


def mean_of(metric: str, columns: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The mean over the columns that have a score at all: scikit-learn warns of others, or says that they have none."""
    least = {"roc_auc": lambda truth: np.unique(truth).size > 1, "average_precision": lambda truth: (truth > 0).any()}
    least["r2"] = lambda truth: truth.size > 1
    score = {
        "roc_auc": oracle.roc_auc_score,
        "average_precision": oracle.average_precision_score,
        "balanced_accuracy": oracle.balanced_accuracy_score,
        "macro_f1": functools.partial(oracle.f1_score, zero_division=0),
        "mae": oracle.mean_absolute_error,
        "rmse": oracle.root_mean_squared_error,
        "r2": oracle.r2_score,
    }[metric]
    found = [score(truth, scores) for truth, scores in columns if least.get(metric, lambda truth: truth.size)(truth)]
    return float(np.mean(found)) if found else None


COUNTED, RANKED = ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1"), ("roc_auc", "average_precision")
TASKS = {
    "two": COUNTED + RANKED,
    "classes": COUNTED + RANKED,
    "labels": COUNTED + RANKED,
    "numbers": ("mae", "rmse", "r2"),
}


@functools.cache
def graph_of(task: str) -> Graph:
    """47 vertices; validation without the last class and with a column of one value, test of one vertex."""
    rng = np.random.default_rng(94)
    sizes: Any = {"num_features": 6, "num_classes": 2 if task == "two" else 4, "sparse": False, "weighted": False}
    graph = make_graph(pattern("random", 47, 3), **sizes, seed=6)
    val, test = np.arange(47) % 3 == 1, np.arange(47) == 3
    labels: Any = rng.integers(0, graph.num_classes, 47)
    labels[val] = np.minimum(labels[val], graph.num_classes - 2)
    if task == "labels":
        labels = rng.integers(-1, 2, (47, 4)).astype(np.int8)
        labels[:, 0] = np.abs(labels[:, 0])
        labels[val, 1], labels[val, 2] = 1, -1
    elif task == "numbers":
        labels = rng.normal(size=(47, 4)).astype(np.float32)
        labels[:, 1:][rng.random((47, 3)) < 0.3] = np.nan
        labels[val, 1], labels[val, 2] = 0.1, np.nan
    splits = {"train": ~val & ~test, "val": val, "test": test}
    masks = {name: ArrayRows(mask[None]) for name, mask in splits.items()}
    return dataclasses.replace(graph, labels=ArrayRows(labels), splits=masks)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
@pytest.mark.covering(1)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "halo"), (3, "delayed")])
@pytest.mark.parametrize("task", TASKS)
def test_scores_of_ranks_equal_scikit_learn(task: str, ranks: int, strategy: str) -> None:
    """Fails if a vertex is missing or counts twice, scores meet other labels, or ties of logits are broken otherwise."""
    graph = graph_of(task)
    assert graph.labels is not None
    labels = graph.labels.array()
    truth = np.where(labels < 0, np.nan, labels) if task == "labels" else labels
    expected_of = of_classes if labels.ndim == 1 else of_entries
    for metric in TASKS[task]:
        config = config_of(ranks, strategy=strategy, hidden=(5,))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, metric=metric))

        def body(rank: Rank) -> Any:
            weights, found = rank.trainer.runtime.weights, []
            for state in (weights.state_dict(), {name: 0 * w for name, w in weights.state_dict().items()}):
                weights.load_state_dict(state)
                scores = rank.trainer.evaluate()
                found.append(
                    (scores, rank.trainer.runtime.inputs.owned.ids.numpy(), rank.trainer.logits().clone().numpy())
                )
            return found

        for parts in zip(*on_ranks(config, graph, body), strict=True):
            logits = np.zeros((47, graph.num_classes))
            for _, ids, rows in parts:
                logits[ids] = rows
            for name, mask in graph.splits.items():
                rows = mask.array()[0]
                expected = expected_of(metric, logits[rows], truth[rows])
                for scores, _, _ in parts:
                    found = scores[name]
                    assert found == (expected if expected is None else pytest.approx(expected, **EXACT)), (metric, name)
