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
from mggcn.train.trainer import RankTrainer

MATRIX_CLASSES = 64
"""Most classes of a confusion matrix: above, three splits of C x C numbers are nothing that one reads."""
_ROWS = 1 << 16
"""Rows of scores that are looked at together: 17 MB at most of 64 classes."""


def class_scores(trainer: RankTrainer, comm: Communicator, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return precision, recall, F1 and support of each class or label of the splits that have any; of classes the matrix.

    confusion (C, C): row the class, column the prediction, up to MATRIX_CLASSES classes, as scikit-learn's. state: the
    weights; the trainer keeps its own. Cost: one forward pass, and two copies of the weights on the host. Collective.
    """
    with trainer.scoring_with(state):
        counts = trainer.count()
        # Several labels have no matrix of one against the other.
        matrix = _confusion(trainer, comm) if trainer.runtime.inputs.target.known is None else None
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


def _confusion(trainer: RankTrainer, comm: Communicator) -> Counts | None:
    """Return the vertices of each class and prediction by split (3, C, C), of all ranks; None of many classes."""
    runtime, logits = trainer.runtime, trainer.logits()
    classes, exact = logits.shape[1], runtime.weights.flat.dtype  # NumPy has no bf16
    if classes > MATRIX_CLASSES:
        return None
    # Allocated where messages come from; at most 96 KiB, behind the last epoch.
    sums = runtime.backend.allocate(8 * 3 * classes * classes).view(torch.int64).view(3, classes * classes)
    target, whole = runtime.inputs.target, np.zeros((3, classes * classes), np.int64)
    for start in range(0, logits.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        mask, labels = target.mask[rows].cpu().numpy(), target.labels[rows].cpu().numpy()
        pairs = labels.astype(np.int64) * classes + logits[rows].to(exact).cpu().numpy().argmax(1)
        for bit in range(3):
            whole[bit] += np.bincount(pairs[(mask >> bit & 1).astype(bool)], minlength=classes * classes)
    sums.copy_(torch.from_numpy(whole))
    if comm.size > 1:
        comm.all_reduce(sums, runtime.backend.record()).wait()
    counts: Counts = sums.cpu().numpy()
    return counts.reshape(3, classes, classes)
