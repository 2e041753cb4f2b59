"""The splits of a store by the names that a run gives them. N vertices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import Graph


def split_name(splits: str, name: str) -> str:
    """Return the store's name of a split: "val" of the main family, "alt_val" of the second."""
    return name if splits == "main" else f"alt_{name}"


def training_rows(graph: Graph, splits: str, split: int) -> npt.NDArray[np.bool_] | None:
    """Return which vertices train, bool (N,); None if the graph has no such split. Cost: reads N bytes."""
    rows = graph.splits.get(split_name(splits, "train"))
    if rows is None or split >= rows.shape[0]:
        return None
    return np.ascontiguousarray(rows.read(split, split + 1)[0], np.bool_)
