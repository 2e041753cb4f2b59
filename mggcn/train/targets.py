"""The targets that a run's scores are compared with: classes, or entries that are labels or numbers.

V rows of this rank, C classes, T columns of entries.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mggcn.backend.base import EntryLoss, KernelBackend, LossTarget
from mggcn.config import Config, TrainConfig
from mggcn.errors import ConfigError, GraphError
from mggcn.feed.labels import RowLabels, SeedLabels, class_weights, rows_of_labels
from mggcn.graph.csr import Graph
from mggcn.graph.splits import count_labels
from mggcn.model.runtime import Target


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """The target of one class per vertex: softmax cross-entropy, weighted and smoothed."""

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

    def rows(self, index: Tensor | slice) -> ClassTarget:
        return ClassTarget(_rows(self.target, index))


@dataclass(frozen=True, slots=True)
class EntryTarget:
    """The target of several labels or numbers per vertex, compared one by one."""

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

    def rows(self, index: Tensor | slice) -> EntryTarget:
        return dataclasses.replace(self, target=_rows(self.target, index))


def _rows(target: LossTarget, index: Tensor | slice) -> LossTarget:
    return dataclasses.replace(target, labels=target.labels[index], mask=target.mask[index])


def make_target(
    backend: KernelBackend, graph: Graph, rows: RowLabels, of: Config, dtype: str
) -> tuple[Target, tuple[int, int, int]]:
    """Return a rank's target, and how many vertices or entries count in each split, on all ranks.

    of: with its loss resolved. dtype: of weights. Cost: one pass over the labels where more than their number matters.
    Raises: ConfigError, GraphError if nothing is left to train on.
    """
    labels, config, data = backend.upload(rows.labels), of.train, of.data
    loss = config.loss
    if loss == "bce" or loss == "mse" or loss == "mae":
        known = count_labels(graph, data.splits, data.split)
        sizes = known.sum(1)
        if not sizes[0]:
            raise GraphError(f"{graph.name} has no known entry in a training vertex; check its labels and masks")
        entries = LossTarget(labels, backend.upload(rows.mask), 1.0 / int(sizes[0]))
        return EntryTarget(loss, entries, known), (int(sizes[0]), int(sizes[1]), int(sizes[2]))
    if config.class_weights == "none" and not config.ignored_labels:
        plain = LossTarget(labels, backend.upload(rows.mask), 1.0 / rows.sizes[0], None, config.label_smoothing)
        return ClassTarget(plain), rows.sizes
    counts = count_labels(graph, data.splits, data.split)
    ignored = [label for label in config.ignored_labels if label < counts.shape[1]]
    counts[:, ignored] = 0
    sizes = counts.sum(1)
    if not sizes[0]:
        raise ConfigError("train.ignored_labels leaves no training vertex; name fewer classes")
    mask = np.where(np.isin(rows.labels, ignored), 0, rows.mask).astype(np.uint8)
    weights = class_weights(config, counts[0])
    total = float(sizes[0] if weights is None else weights @ counts[0])
    uploaded = None if weights is None else backend.upload(weights.astype(dtype))
    target = LossTarget(labels, backend.upload(mask), 1.0 / total, uploaded, config.label_smoothing)
    return ClassTarget(target), (int(sizes[0]), int(sizes[1]), int(sizes[2]))


class StepTargets:
    """Makes the targets of steps on batches. whole: that of the whole graph; dtype: of weights.

    The loss is the mean over what is known of all seeds, weighted by class, as the whole graph's over all that train.
    """

    def __init__(self, graph: Graph, whole: Target, config: TrainConfig, dtype: str) -> None:
        self._graph, self._whole, self._config, self._dtype = graph, whole, config, dtype
        weights = whole.target.weights if isinstance(whole, ClassTarget) else None
        self._weights = None if weights is None else weights.cpu().numpy()

    def read(self, ids: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64]) -> SeedLabels:
        """Return the labels of this rank's seeds `ids`, of all ranks' `seeds`.

        Cost: a random access for each seed of all ranks. Raises: GraphError for a seed without a label.
        """
        everyone = labels = rows_of_labels(self._graph, ids, self._dtype)
        if not np.array_equal(seeds, ids):  # of other ranks, too
            everyone = rows_of_labels(self._graph, seeds, self._dtype)
        mask, ignored = np.ones(ids.size, np.uint8), self._config.ignored_labels
        if isinstance(self._whole, EntryTarget):
            known = int(np.count_nonzero(~np.isnan(everyone)))
            return SeedLabels(labels, mask, 1.0 / max(known, 1))
        if ignored:
            everyone = everyone[~np.isin(everyone, ignored)]
            mask[np.isin(labels, ignored)] = 0
        total: float = everyone.size if self._weights is None else self._weights[everyone].sum().item()
        return SeedLabels(labels, mask, 1.0 / total if total else 0.0)

    def target(self, labels: Tensor, mask: Tensor, inv_count: float, changing: Tensor | None = None) -> Target:
        """Return the target of seeds from what lies on the device. changing: as of a LossTarget."""
        whole = self._whole
        if isinstance(whole, EntryTarget):
            return EntryTarget(whole.kind, LossTarget(labels, mask, inv_count, changing=changing), whole.known)
        weights = whole.target.weights if isinstance(whole, ClassTarget) else None
        return ClassTarget(LossTarget(labels, mask, inv_count, weights, self._config.label_smoothing, changing))


def unweighted(target: Target) -> Target:
    """Return the target with all classes counted alike: of vertices that are drawn by the weights of their classes."""
    if not isinstance(target, ClassTarget):
        return target
    return ClassTarget(dataclasses.replace(target.target, weights=None))
