"""Scores of each class or label, or all scores of links, with the weights that speak for a run, once, when it is complete.

V rows of this rank, C classes or labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mggcn.comm.base import Communicator
from mggcn.train.metrics import SPLITS, Counts, per_class
from mggcn.train.runtime import RankRuntime
from mggcn.train.trainer import RankTrainer

MATRIX_CLASSES = 64
"""Most classes of a confusion matrix: above, three splits of C x C numbers are nothing that one reads."""


def class_scores(trainer: RankTrainer, comm: Communicator, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return precision, recall, F1 and support of each class or label of the splits that have any; of classes the matrix.

    confusion (C, C): row the class, column the prediction, up to MATRIX_CLASSES classes, as scikit-learn's. state: the
    weights; the trainer keeps its own. Cost: one forward pass, and two copies of the weights on the host. Collective.
    """
    with trainer.scoring_with(state):
        confusion = _Confusion(trainer.runtime) if _has_matrix(trainer.runtime) else None
        counts = trainer.count(None if confusion is None else confusion.add)
        matrix = None if confusion is None else confusion.of_all(trainer.runtime, comm)
    found: dict[str, Any] = {}
    for bit, split in enumerate(SPLITS):
        if counts[bit, 1:].any():
            found[split] = per_class(counts[bit])
            if matrix is not None:
                found[split]["confusion"] = matrix[bit].tolist()
    return found


def link_scores(trainer: RankTrainer, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return every score of the validation and test links. state, cost: as `class_scores`. Collective."""
    with trainer.scoring_with(state):
        return dict(trainer.links())


def _has_matrix(runtime: RankRuntime) -> bool:
    """Return whether a matrix shows classes and predictions: several labels have none, and of many classes none is read."""
    return runtime.inputs.target.known is None and runtime.counts.shape[2] <= MATRIX_CLASSES


class _Confusion:
    """The vertices of each class and prediction by split (3, C, C), added up from some rows at a time."""

    def __init__(self, runtime: RankRuntime) -> None:
        self._target, self._exact = runtime.inputs.target, runtime.weights.flat.dtype  # NumPy has no bf16
        self._classes: int = runtime.counts.shape[2]
        self._whole = np.zeros((3, self._classes**2), np.int64)

    def add(self, first: int, logits: torch.Tensor) -> None:
        """Count rows from number `first` on."""
        rows, classes = slice(first, first + len(logits)), self._classes
        mask, labels = self._target.mask[rows].cpu().numpy(), self._target.labels[rows].cpu().numpy()
        pairs = labels.astype(np.int64) * classes + logits.to(self._exact).cpu().numpy().argmax(1)
        for bit in range(3):
            self._whole[bit] += np.bincount(pairs[(mask >> bit & 1).astype(bool)], minlength=classes**2)

    def of_all(self, runtime: RankRuntime, comm: Communicator) -> Counts:
        """Return the matrices of all ranks. Collective."""
        # Allocated where messages come from; at most 96 KiB, behind the last epoch.
        sums = runtime.backend.allocate(self._whole.nbytes).view(torch.int64).view(self._whole.shape)
        sums.copy_(torch.from_numpy(self._whole))
        if comm.size > 1:
            comm.all_reduce(sums, runtime.backend.record()).wait()
        counts: Counts = sums.cpu().numpy()
        return counts.reshape(3, self._classes, self._classes)
