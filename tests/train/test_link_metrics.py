"""Scores of links against scikit-learn and OGB's Evaluator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ogb.linkproppred import Evaluator
from sklearn import metrics as oracle

from mggcn.planning.task import HITS
from mggcn.train.link_metrics import LinkCounts


def found(positive: np.ndarray, negative: np.ndarray, pieces: int) -> dict[str, float | None]:
    counts = LinkCounts(np.sort(positive))
    for own, some in zip(np.array_split(positive, pieces), np.array_split(negative, pieces), strict=True):
        counts.add(own, some)
    return counts.scores()


def evaluator(metric: str, k: int = 0) -> Evaluator:
    """OGB's formulas without its data sets' names."""
    made = Evaluator("ogbl-collab")
    made.eval_metric, made.K = metric, k
    return made


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("links", "negatives"), [(1, 1), (3, 2), (57, 4), (200, 31)])
def test_scores_equal_scikit_learn_and_ogb(ties: bool, links: int, negatives: int) -> None:
    """Fails if a tie, a negative of another piece, or fewer negatives than k count otherwise than there."""
    rng = np.random.default_rng(links + negatives)
    positive, negative = rng.normal(0.5, 1, links), rng.normal(0, 1, (links, negatives))
    if ties:
        positive, negative = positive.round(1), negative.round(1)
    scores = found(positive, negative, 5)
    assert scores == pytest.approx(found(positive, negative, 1), rel=1e-12)
    flat = negative.ravel()
    labels = np.repeat([1, 0], [links, flat.size])
    assert scores["roc_auc"] == pytest.approx(oracle.roc_auc_score(labels, np.concatenate([positive, flat])), rel=1e-12)
    given = {"y_pred_pos": torch.from_numpy(positive), "y_pred_neg": torch.from_numpy(negative)}
    mrr = evaluator("mrr").eval(given)["mrr_list"].double().mean()
    assert scores["mrr"] == pytest.approx(float(mrr), rel=1e-6)  # OGB's list is float32
    ranks = 0.5 * ((negative > positive[:, None]).sum(1) + (negative >= positive[:, None]).sum(1)) + 1
    assert scores["mrr"] == pytest.approx((1 / ranks).mean(), rel=1e-12)
    for name, k in HITS.items():
        hits = evaluator(name, k).eval({**given, "y_pred_neg": torch.from_numpy(flat)})
        assert scores[name] == pytest.approx(hits[name], rel=1e-12)


def test_no_links_have_no_scores() -> None:
    """Fails if a split without links has a score."""
    assert set(LinkCounts(np.empty(0)).scores().values()) == {None}
