"""Every task with its settings, labels for a graph, and torch's own loss of them in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from mggcn.config import TrainConfig
from mggcn.graph.csr import ArrayRows, Graph

CLASS_WEIGHTS = (0.5, 2.0, 1.25, 3.0)
TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"class_weights": CLASS_WEIGHTS},
    "balanced": {"class_weights": "balanced", "label_smoothing": 0.2},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignored_labels": (1,)},
    "bce": {"loss": "bce"},
    "mse": {"loss": "mse"},
    "mae": {"loss": "mae"},
}
ENTRY_LOSSES = {
    "bce": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
}


def labelled(graph: Graph, task: str) -> Graph:
    """The graph with labels of the task: 4 classes, 4 labels or 4 numbers; some are unknown, never all of a vertex."""
    rng = np.random.default_rng(77)
    n = graph.num_vertices
    if task == "bce":
        labels: Any = rng.integers(-1, 2, (n, 4)).astype(np.int8)
        labels[:, 0] = np.abs(labels[:, 0])
    elif task in ("mse", "mae"):
        labels = rng.normal(size=(n, 4)).astype(np.float32)
        labels[:, 1:][rng.random((n, 3)) < 0.3] = np.nan
    else:
        return graph
    return dataclasses.replace(graph, labels=ArrayRows(labels))


def dense_loss(graph: Graph, settings: TrainConfig, z: torch.Tensor) -> torch.Tensor:
    """The loss of scores z (N, C) over the training vertices."""
    train = torch.from_numpy(graph.splits["train"].array()[0])
    assert graph.labels is not None
    if graph.task != "classes":
        targets = torch.from_numpy(graph.labels.array().astype(np.float64))
        counts = train[:, None] & ((targets >= 0) if graph.task == "labels" else ~targets.isnan())
        return ENTRY_LOSSES[settings.loss](z[counts], targets[counts])
    labels = torch.from_numpy(graph.labels.array().astype(np.int64))
    for ignored in settings.ignored_labels:
        train = train & (labels != ignored)
    known = None if settings.class_weights == "none" else torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
    if settings.class_weights == "balanced":
        found = torch.bincount(labels[train], minlength=4).double()
        known = torch.where(found > 0, found.sum() / ((found > 0).sum() * found.clamp(min=1)), 0.0)
    return functional.cross_entropy(z[train], labels[train], weight=known, label_smoothing=settings.label_smoothing)
