"""The targets that a run's scores are compared with: classes, or entries that are labels or numbers.

V rows of this rank, C classes, T columns of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mggcn.backend.base import EntryLoss, KernelBackend, LossTarget
from mggcn.config import TrainConfig
from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import Graph
from mggcn.model.runtime import Target
from mggcn.partition.rows.shard import Shard, ShardOptions, count_labels


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """One class a vertex: cross-entropy, weighted and smoothed, of a softmax."""

    target: LossTarget
    known: None = None

    @property
    def labels(self) -> Tensor:
        return self.target.labels

    @property
    def mask(self) -> Tensor:
        return self.target.mask

    def loss(
        self, backend: KernelBackend, z: Tensor, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        backend.softmax_xent(z, self.target, row_scale, loss, partials)

    def count(self, backend: KernelBackend, z: Tensor, counts: Tensor) -> None:
        backend.confusion(z, self.labels, self.mask, counts)


@dataclass(frozen=True, slots=True)
class EntryTarget:
    """Several labels or numbers a vertex, compared one by one."""

    kind: EntryLoss
    target: LossTarget
    known: npt.NDArray[np.int64]

    @property
    def labels(self) -> Tensor:
        return self.target.labels

    @property
    def mask(self) -> Tensor:
        return self.target.mask

    def loss(
        self, backend: KernelBackend, z: Tensor, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        backend.entry_loss(self.kind, z, self.target, row_scale, loss, partials)

    def count(self, backend: KernelBackend, z: Tensor, counts: Tensor) -> None:
        backend.entry_counts(z, self.labels, self.mask, counts)


def make_target(
    backend: KernelBackend, graph: Graph, shard: Shard, options: ShardOptions, config: TrainConfig
) -> tuple[Target, tuple[int, int, int]]:
    """Return a rank's target, and how many vertices or entries count in each split, on all ranks.

    config: with its loss resolved. Cost: one pass over the labels where more than their number matters.
    Raises: ConfigError, GraphError if nothing is left to train on.
    """
    labels = backend.upload(shard.labels)
    loss = config.loss
    if loss == "bce" or loss == "mse" or loss == "mae":
        known = count_labels(graph, options)
        sizes = known.sum(1)
        if not sizes[0]:
            raise GraphError(f"{graph.name} has no known entry in a training vertex; check its labels and masks")
        entries = LossTarget(labels, backend.upload(shard.mask), 1.0 / int(sizes[0]))
        return EntryTarget(loss, entries, known), (int(sizes[0]), int(sizes[1]), int(sizes[2]))
    if config.class_weights == "none" and not config.ignored_labels:
        plain = LossTarget(labels, backend.upload(shard.mask), 1.0 / shard.split_sizes[0], None, config.label_smoothing)
        return ClassTarget(plain), shard.split_sizes
    counts = count_labels(graph, options)
    ignored = [label for label in config.ignored_labels if label < counts.shape[1]]
    counts[:, ignored] = 0
    sizes = counts.sum(1)
    if not sizes[0]:
        raise ConfigError("train.ignored_labels leaves no training vertex; name fewer classes")
    mask = np.where(np.isin(shard.labels, ignored), 0, shard.mask).astype(np.uint8)
    weights = class_weights(config, counts[0])
    total = float(sizes[0] if weights is None else weights @ counts[0])
    uploaded = None if weights is None else backend.upload(weights.astype(options.dtype))
    target = LossTarget(labels, backend.upload(mask), 1.0 / total, uploaded, config.label_smoothing)
    return ClassTarget(target), (int(sizes[0]), int(sizes[1]), int(sizes[2]))


def class_weights(config: TrainConfig, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """Return the weight of each class, (C,), None if all are 1. counts (C,): its training vertices, 0 if ignored."""
    if config.class_weights == "none":
        return None
    if config.class_weights != "balanced":
        return np.array(config.weights_of_classes())
    # No loss contains a class without training vertices; under smoothing its weight must still be finite.
    share = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return np.where(counts > 0, share, 0.0)
