"""Scores that need all vertices in one place, such as ROC AUC: every rank's are gathered, in float64.

N vertices, V rows of this rank, C classes, T columns of entries.
"""

from __future__ import annotations

import numpy as np
import torch

from mggcn.backend.base import KernelBackend
from mggcn.comm.base import Communicator
from mggcn.model.runtime import Inputs
from mggcn.train.metrics import SPLITS, gathered_score


class RankingScores:
    """Gathers scores by original id and scores the three splits; the buffers are planned (8 N per column of scores).

    Two classes need one column, the difference of their logits; more need C, and entries T.
    """

    def __init__(
        self,
        metric: str,
        inputs: Inputs,
        num_vertices: int,
        num_classes: int,
        comm: Communicator,
        backend: KernelBackend,
    ) -> None:
        self._metric = metric
        self._comm = comm
        self._owned = slice(None) if inputs.owned.owned is None else inputs.owned.owned
        self._ids = inputs.owned.ids[self._owned]
        labels = inputs.target.labels
        columns = 1 if num_classes == 2 and labels.dim() == 1 else num_classes
        self._scores = backend.allocate(8 * num_vertices * columns).view(torch.float64).view(num_vertices, columns)
        self._labels = self._gather(labels.to(torch.float64))
        self._mask = self._gather(inputs.target.mask.to(torch.float64)).astype(np.uint8)

        self._difference = columns < num_classes

    def _gather(self, values: torch.Tensor) -> np.ndarray:
        whole = self._scores.new_zeros(self._scores.shape[0], *values.shape[1:])
        whole[self._ids] = values[self._owned]
        if self._comm.size > 1:
            self._comm.all_reduce(whole).wait()
            self._comm.synchronize()
        return whole.cpu().numpy()

    def scores(self, logits: torch.Tensor) -> dict[str, float | None]:
        """Return the metric of each split from this rank's scores (V, C). Collective."""
        z = logits[self._owned].to(torch.float64)
        self._scores.zero_()
        self._scores[self._ids] = z[:, 1:2] - z[:, 0:1] if self._difference else z
        if self._comm.size > 1:
            self._comm.all_reduce(self._scores).wait()
            self._comm.synchronize()
        scores = self._scores.cpu().numpy()
        result: dict[str, float | None] = {}
        for bit, name in enumerate(SPLITS):
            rows = (self._mask >> bit & 1).astype(bool)
            result[name] = gathered_score(self._metric, scores[rows], self._labels[rows]) if rows.any() else None
        return result
