"""Splits of a graph: which vertices train, validate and test, and how many of each class there are.

N vertices, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import Graph

SPLITS = ("train", "val", "test")
"""Bit s of a vertex's mask says whether it belongs to split SPLITS[s]."""
ROWS = 1 << 20
"""Vertices whose labels are read at a time: 8 MiB."""


def split_name(splits: str, name: str) -> str:
    """Return the store's name of a split: "val" of the main family, "alt_val" of the second."""
    return name if splits == "main" else f"alt_{name}"


def training_rows(graph: Graph, splits: str, split: int) -> npt.NDArray[np.bool_] | None:
    """Return which vertices train, bool (N,); None if the graph has no such split. Cost: reads N bytes."""
    rows = graph.splits.get(split_name(splits, "train"))
    if rows is None or split >= rows.shape[0]:
        return None
    return np.ascontiguousarray(rows.read(split, split + 1)[0], np.bool_)


def first_splits(graph: Graph) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the first train, val and test split of the main family, bool (N,) each, without those that are empty.

    Cost: reads N bytes for each.
    """
    found = {name: np.asarray(graph.splits[name].read(0, 1), np.bool_) for name in SPLITS if name in graph.splits}
    return {name: rows[0] for name, rows in found.items() if rows.any()}


def evaluated_rows(graph: Graph, splits: str, split: int) -> npt.NDArray[np.bool_]:
    """Return which vertices are in any split, bool (N,). Cost: reads N bytes for each."""
    found = np.zeros(graph.num_vertices, np.bool_)
    for rows in (graph.splits.get(split_name(splits, short)) for short in SPLITS):
        if rows is not None and split < rows.shape[0]:
            found |= rows.read(split, split + 1)[0]
    return found


def check_split(graph: Graph, splits: str, split: int) -> None:
    """Refuse a family without training vertices, or a split that it does not have. Raises: GraphError. Cost: none.

    Links are of one split, which its graph was made for.
    """
    if graph.links:
        if splits != "main" or split:
            raise GraphError(f"{graph.name} has one split of its links; leave data.split out")
        return
    train = split_name(splits, "train")
    if train not in graph.splits:
        raise GraphError(
            f"{graph.name} has no split {train!r}; it has {', '.join(graph.splits) or 'no splits at all'}; add the masks "
            "when you prepare the graph"
        )
    for name in (split_name(splits, short) for short in SPLITS):
        if name in graph.splits and split >= graph.splits[name].shape[0]:
            raise GraphError(
                f"data.split must be below {graph.splits[name].shape[0]}, the number of {name!r} splits, got {split}"
            )


def count_labels(graph: Graph, splits: str, split: int) -> npt.NDArray[np.int64]:
    """Return int64 (3, C): how many vertices of each split (train, val, test) have each class.

    For several labels or numbers per vertex, how many vertices have a known value in each column.

    Cost: one pass over labels and splits.
    """
    counts, labels = np.zeros((3, graph.num_classes), np.int64), graph.labels
    if labels is None:
        return counts
    masks = [graph.splits.get(split_name(splits, name)) for name in SPLITS]
    chosen = [None if rows is None else rows.read(split, split + 1)[0] for rows in masks]
    for start in range(0, graph.num_vertices, ROWS):
        part = labels.read(start, start + ROWS)
        for count, rows in zip(counts, chosen, strict=True):
            if rows is None:
                continue
            mine = part[rows[start : start + ROWS]]
            if graph.task == "classes":
                count += np.bincount(mine[(mine >= 0) & (mine < graph.num_classes)], minlength=graph.num_classes)
            else:
                count += (mine >= 0 if graph.task == "labels" else ~np.isnan(mine)).sum(0)
    return counts
