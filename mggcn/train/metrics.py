"""Scores as fractions in [0, 1]: accuracy and macro-F1 from counts, ROC AUC from ranks.

C classes; counts int64 (3, 3, C): per split, right predictions, predictions and vertices of each class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SPLITS = ("train", "val", "test")


def accuracy(counts: npt.NDArray[np.int64]) -> float | None:
    """Return the share of right predictions of one split (3, C); None if the split is empty."""
    total = counts[2].sum()
    return float(counts[0].sum() / total) if total else None


def macro_f1(counts: npt.NDArray[np.int64]) -> float | None:
    """Return the mean F1 over the classes that occur as label or prediction; None if the split is empty."""
    if not counts[2].sum():
        return None
    right, total = counts[0], counts[1] + counts[2]
    return float((2 * right[total > 0] / total[total > 0]).mean())


def roc_auc(scores: npt.NDArray[Any], positive: npt.NDArray[np.bool_]) -> float | None:
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


def multiclass_auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float | None:
    """Return ROC AUC: of class 1 for one score per vertex, else the mean over classes of one against the rest.

    Shapes: scores (n, 1), or logits (n, C) float64; classes are ranked by probability. Absent classes are left out.
    """
    if scores.shape[1] == 1:
        return roc_auc(scores[:, 0], labels == 1)
    # Logits of different vertices compare only after the softmax; its logarithm keeps apart what would round to 1.
    shifted = scores - scores.max(1, keepdims=True)
    ranked = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    areas = [roc_auc(ranked[:, c], labels == c) for c in range(scores.shape[1])]
    known = [a for a in areas if a is not None]
    return float(np.mean(known)) if known else None


def counted(metric: str, counts: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """Return a counted metric of the three splits."""
    function = {"accuracy": accuracy, "macro_f1": macro_f1}[metric]
    return {name: function(counts[s]) for s, name in enumerate(SPLITS)}
