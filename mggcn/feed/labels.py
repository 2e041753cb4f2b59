"""Labels and splits of a rank's rows, on the host. V rows, T columns of labels, N vertices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.config import DataConfig, TrainConfig
from mggcn.errors import GraphError
from mggcn.graph.check import known_labels
from mggcn.graph.csr import Graph
from mggcn.graph.splits import ROWS, SPLITS, check_split, split_name
from mggcn.partition.order import Owners


@dataclass(frozen=True, slots=True)
class RowLabels:
    """labels int32 (V,), or real (V, T), NaN where unknown; mask uint8 (V,): bits of splits, 0 for copies."""

    labels: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    sizes: tuple[int, int, int]
    """Vertices of each split, on all ranks."""


@dataclass(frozen=True, slots=True)
class SeedLabels:
    """What a step's loss reads: labels (T,) or (T, C) and mask uint8 (T,) of this rank's T seeds; inv_count: as of a
    LossTarget, over the seeds of all ranks.
    """

    labels: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    inv_count: float


def read_labels(
    graph: Graph, owners: Owners, rank: int, owned: npt.NDArray[np.bool_] | None, data: DataConfig, dtype: str
) -> RowLabels:
    """Read the labels and splits of a rank's rows.

    owned: bool (V,), rows that are no copies, None if all. dtype: of labels that are numbers. Cost: N bytes per split and
    chunks of 8 MiB. Raises: GraphError for missing splits or labels.
    """
    ids = owners.owned(rank)
    columns = () if graph.labels is None else graph.labels.shape[1:]
    labels = np.empty((ids.shape[0], *columns), dtype if columns else np.int32)
    if graph.labels is not None:
        span = owners.span(rank)
        for start in span[::ROWS]:
            chunk = slice(start, min(start + ROWS, span.stop))
            mine = owners.owner_of(chunk) == rank
            labels[owners.local_of(chunk)[mine]] = graph.labels.read(chunk.start, chunk.stop)[mine]
    if graph.task == "labels":
        labels[labels < 0] = np.nan
    mask, sizes = _split_mask(graph, ids, data)
    if owned is not None:
        mask[~owned] = 0
    _check_labels(graph, ids, labels, mask)
    return RowLabels(labels, mask, sizes)


def rows_of_labels(graph: Graph, ids: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[Any]:
    """Return the labels of any vertices: int32 (V,), or of type `dtype` (V, T), NaN where unknown.

    Cost: a random access for each. Raises: GraphError for a vertex of which nothing is known.
    """
    if graph.labels is None:
        raise GraphError(
            f"{graph.name} has no labels, so nothing can be trained; add labels when you prepare the graph"
        )
    labels: npt.NDArray[Any] = graph.labels.take(ids).astype(dtype if graph.task != "classes" else np.int32)
    if graph.task == "labels":
        labels[labels < 0] = np.nan
    if graph.task != "classes" or not ids.size or labels.min() < 0 or labels.max() >= graph.num_classes:
        _check_labels(graph, ids, labels, np.ones(ids.size, np.uint8))
    return labels


def class_weights(config: TrainConfig, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """Return the weight of each class, (C,), None if all are 1. counts (C,): its training vertices, 0 if ignored."""
    if config.class_weights == "none":
        return None
    if config.class_weights != "balanced":
        return np.array(config.weights_of_classes())
    # No loss contains a class without training vertices; under smoothing its weight must still be finite.
    share = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return np.where(counts > 0, share, 0.0)


def _split_mask(
    graph: Graph, ids: npt.NDArray[np.int64], data: DataConfig
) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Read the chosen split: this rank's mask and the global sizes."""
    mask = np.zeros(ids.shape[0], np.uint8)
    sizes = [0, 0, 0]
    check_split(graph, data.splits, data.split)
    for bit, short in enumerate(SPLITS):
        name = split_name(data.splits, short)
        if name not in graph.splits:
            continue
        rows = graph.splits[name]
        chosen = rows.read(data.split, data.split + 1)[0]
        sizes[bit] = int(chosen.sum())
        mask |= chosen[ids].astype(np.uint8) << bit
    if not sizes[0]:
        raise GraphError(f"split {data.split} of {graph.name} has no training vertices; choose another with data.split")
    return mask, (sizes[0], sizes[1], sizes[2])


def _check_labels(
    graph: Graph, ids: npt.NDArray[np.int64], labels: npt.NDArray[Any], mask: npt.NDArray[np.uint8]
) -> None:
    """Training vertices need a label within the classes; others without one leave the mask: no score counts them."""
    if graph.labels is None:
        raise GraphError(
            f"{graph.name} has no labels, so nothing can be trained; add labels when you prepare the graph"
        )
    unlabelled = ~known_labels(labels)
    if graph.task == "classes":
        unlabelled |= labels >= graph.num_classes
    wrong = np.flatnonzero((mask & 1 != 0) & unlabelled)
    if wrong.size and graph.task != "classes":
        raise GraphError(
            f"every training vertex needs a label, vertex {ids[wrong[0]]} has none ({wrong.size} such on this rank); take "
            "them out of the training mask"
        )
    if wrong.size:
        raise GraphError(
            f"every training vertex needs a label in 0 .. {graph.num_classes - 1}, vertex {ids[wrong[0]]} has "
            f"{labels[wrong[0]]} ({wrong.size} such on this rank); take them out of the training mask"
        )
    mask[unlabelled] = 0
