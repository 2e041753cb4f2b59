"""Scores of links against fixed negatives, some at a time: AUC, MRR, hits@k.

M links, K negatives of each. AUC is scikit-learn's roc_auc_score of all links against all negatives. MRR and hits@k are the
formulas of OGB's Evaluator (ogb.linkproppred): MRR ranks a link among its own negatives, where ties count half; hits@k is
the share of links that score above the k-th best of all negatives, 1 if there are fewer than k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.planning.links import MOST, SUMS
from mggcn.planning.task import HITS, METRICS

Scores = npt.NDArray[np.float64]


@dataclass(slots=True)
class LinkCounts:
    """What scores need of negatives, some links at a time. positives (M,): scores of all links of a split, ascending.

    sums: negatives, those below a link, ties, and reciprocal ranks, exact below 2^53 but for the last; best: the MOST
    highest scores of negatives so far, -inf for none.
    Memory: 16 bytes a link, and what is added.
    """

    positives: Scores
    sums: Scores = field(default_factory=lambda: np.zeros(SUMS))
    best: Scores = field(default_factory=lambda: np.full(MOST, -np.inf))

    def add(self, own: Scores, negatives: Scores) -> None:
        """Count some links (m,) with their negatives (m, K). Cost: a binary search among the links for each negative."""
        flat = negatives.ravel()
        places = np.searchsorted(self.positives, flat)
        # Few negatives, if any, score exactly as a link does: only these are looked up again.
        ties = np.flatnonzero(self.positives[np.minimum(places, self.positives.size - 1)] == flat)
        equal = np.searchsorted(self.positives, flat[ties], side="right") - places[ties]
        below = flat.size * self.positives.size - places.sum() - equal.sum()
        above = (negatives > own[:, None]).sum(1)
        tied = (negatives == own[:, None]).sum(1)
        self.sums += flat.size, below, equal.sum(), (1 / (above + 0.5 * tied + 1)).sum()
        both = np.concatenate([self.best, flat])
        self.best = np.partition(both, both.size - MOST)[-MOST:]

    def scores(self) -> dict[str, float | None]:
        """Return every score; None without links."""
        count = self.positives.size
        if not count:
            return dict.fromkeys(METRICS["links"])
        drawn, below, tied, reciprocal = self.sums.tolist()
        ranked = np.sort(self.best)[::-1]
        found: dict[str, Any] = {"roc_auc": (below + tied / 2) / (count * drawn), "mrr": reciprocal / count}
        for name, k in HITS.items():
            hits = count if drawn < k else int((self.positives > ranked[k - 1]).sum())
            found[name] = hits / count
        return found
