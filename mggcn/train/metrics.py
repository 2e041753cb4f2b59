"""Scores: from counts, accuracy and F1; from the scores of all vertices, areas under curves and errors.

C classes, T columns of labels or numbers, n vertices or entries of a split. They equal scikit-learn's; None
where a split has nothing to score. Counts int64 (3, 3, C): per split, right predictions, predictions and vertices of
each class, or right positive predictions, positive predictions and positives of each label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "val", "test")
Counts = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def accuracy(counts: Counts) -> float | None:
    """Return the share of right predictions of one split (3, C); None if the split is empty."""
    total = counts[2].sum()
    return float(counts[0].sum() / total) if total else None


def balanced_accuracy(counts: Counts) -> float | None:
    """Return the mean recall of the classes that have vertices."""
    some = counts[2] > 0
    return float((counts[0][some] / counts[2][some]).mean()) if some.any() else None


def macro_f1(counts: Counts) -> float | None:
    """Return the mean F1 over the classes that occur as label or prediction; None if the split is empty."""
    if not counts[2].sum():
        return None
    right, total = counts[0], counts[1] + counts[2]
    return float((2 * right[total > 0] / total[total > 0]).mean())


def micro_f1(counts: Counts) -> float | None:
    """Return the F1 of all predictions together, which for classes equals the accuracy; None if the split is empty."""
    total = counts[1].sum() + counts[2].sum()
    return float(2 * counts[0].sum() / total) if counts[2].sum() else None


_COUNTED = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
}


def label_score(metric: str, counts: Counts, known: Counts) -> float | None:
    """Return a counted metric of several labels: counts (3, T), known entries (T,), both of one split.

    accuracy: share of right entries; balanced_accuracy: mean over labels of the mean recall of the values that occur;
    macro_f1: mean F1 of the labels, 0 where none is positive or predicted so; micro_f1: F1 of all entries together.
    """
    used = known > 0
    right, predicted, positive = counts[:, used]
    total, known = predicted + positive, known[used]
    if not used.any():
        return None
    if metric == "accuracy":
        return float((known - total + 2 * right).sum() / known.sum())
    if metric == "micro_f1":
        return float(2 * right.sum() / max(total.sum(), 1))
    if metric == "macro_f1":
        return float((2 * right / np.maximum(total, 1)).mean())
    negative = known - positive
    recalls = right / np.maximum(positive, 1) + (negative - predicted + right) / np.maximum(negative, 1)
    return float((recalls / ((positive > 0).astype(int) + (negative > 0))).mean())


def counted(metric: str, counts: Counts, known: Counts | None = None) -> dict[str, float | None]:
    """Return a counted metric of the three splits; known (3, T): of several labels."""
    if known is not None:
        return {name: label_score(metric, counts[s], known[s]) for s, name in enumerate(SPLITS)}
    return {name: _COUNTED[metric](counts[s]) for s, name in enumerate(SPLITS)}


def per_class(counts: Counts) -> dict[str, list[float]]:
    """Return precision, recall and F1 of each class or label, 0 where it never occurs, and its support; counts (3, C)."""
    right, predicted, positive = counts
    return {
        "precision": (right / np.maximum(predicted, 1)).tolist(),
        "recall": (right / np.maximum(positive, 1)).tolist(),
        "f1": (2 * right / np.maximum(predicted + positive, 1)).tolist(),
        "support": positive.tolist(),
    }


def roc_auc(scores: Array, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the probability that a positive scores above a negative, ties counted half; None if one kind is absent.

    Shapes: scores, positive (n,). Cost: one sort. Source: Mann and Whitney 1947.
    """
    num_positive = int(positive.sum())
    num_negative = positive.shape[0] - num_positive
    if not num_positive or not num_negative:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def average_precision(scores: Array, positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the mean precision over the positives, each at its own score; None without any.

    Shapes: scores, positive (n,). Cost: one sort. Equal scores come together: sum_k (R_k - R_k-1) P_k over distinct ones.
    """
    total = int(positive.sum())
    if not total:
        return None
    _, inverse, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    found = np.bincount(inverse, weights=positive, minlength=counts.size)
    return float((found / total * (np.cumsum(found) / np.cumsum(counts))).sum())


Ranked = Callable[[Array, npt.NDArray[np.bool_]], float | None]
_RANKED: Mapping[str, Ranked] = {"roc_auc": roc_auc, "average_precision": average_precision}


def multiclass(metric: Ranked, scores: Array, labels: Array) -> float | None:
    """Return a ranked metric: of class 1 for one score per vertex, else the mean over classes of one against the rest.

    Shapes: scores (n, 1), or logits (n, C) float64; classes are ranked by probability. Absent classes are left out.
    """
    if scores.shape[1] == 1:
        return metric(scores[:, 0], labels == 1)
    # Logits of different vertices compare only after the softmax; its logarithm keeps apart what would round to 1.
    shifted = scores - scores.max(1, keepdims=True)
    ranked = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return _mean(metric(ranked[:, c], labels == c) for c in range(scores.shape[1]))


def mae(scores: Array, targets: Array) -> float | None:
    """Return the mean absolute error; arrays (n,)."""
    return float(np.abs(scores - targets).mean()) if targets.size else None


def rmse(scores: Array, targets: Array) -> float | None:
    """Return the root of the mean squared error; arrays (n,)."""
    return float(np.sqrt(np.square(scores - targets).mean())) if targets.size else None


def r2(scores: Array, targets: Array) -> float | None:
    """Return 1 - squared error / squared distance from the mean; None below two targets.

    Where all targets are equal: 1 if all scores are right, else 0.
    """
    if targets.size < 2:
        return None
    error, spread = float(np.square(targets - scores).sum()), float(np.square(targets - targets.mean()).sum())
    if not spread:
        return 0.0 if error else 1.0
    return 1.0 - error / spread


_ERRORS: Mapping[str, Callable[[Array, Array], float | None]] = {"mae": mae, "rmse": rmse, "r2": r2}


def gathered_score(metric: str, scores: Array, labels: Array) -> float | None:
    """Return a metric that needs all scores of a split, (n, C) or (n, 1); targets: classes (n,), or entries (n, T).

    Of entries it is the mean over columns, each of its known entries; columns that have no score are left out.
    """
    if labels.ndim == 1:
        return multiclass(_RANKED[metric], scores, labels)
    known = ~np.isnan(labels)

    def of_column(d: int) -> float | None:
        rows = known[:, d]
        if metric in _RANKED:
            return _RANKED[metric](scores[rows, d], labels[rows, d] > 0.5)
        return _ERRORS[metric](scores[rows, d], labels[rows, d])

    return _mean(of_column(d) for d in range(labels.shape[1]))


def _mean(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None
