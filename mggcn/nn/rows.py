"""A rank's rows of the graph's vertex data, as torch tensors on its device.

N vertices, V rows of this rank, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.errors import GraphError
from mggcn.feed.features import FeatureReader
from mggcn.graph.csr import Graph
from mggcn.graph.vertex_data import to_numpy
from mggcn.partition.base import Partition


class VertexRows:
    """Features, labels and splits of the vertices that a rank holds, read on demand."""

    def __init__(self, graph: Graph, partition: Partition, rank: int, backend: KernelBackend) -> None:
        self._graph = graph
        self._partition = partition
        self._rank = rank
        self._backend = backend
        self._ids = partition.local_index(rank).owned(rank)
        self.ids: Tensor = backend.upload(self._ids)
        """Original id of each row, int64 (V,)."""
        mine = partition.owned(rank)
        self.owned: Tensor = backend.upload(np.ones(self._ids.size, np.bool_) if mine is None else mine)
        """Rows that are no copies of another rank's, bool (V,)."""

    @property
    def count(self) -> int:
        return int(self._ids.size)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._graph.splits)

    def features(self) -> Tensor:
        """Return X (V, D) in the storage type, dense; one sweep over the features. Raises: GraphError without any."""
        reader = FeatureReader(self._graph, self._partition.local_index(self._rank), self._rank, row_normalize=False)
        dense = torch.zeros(self.count, reader.num_features, dtype=self._backend.dtype, device=self.ids.device)
        for local, block in reader.dense():
            dense[self._backend.upload(local).long()] = self._backend.upload(block).to(dense.dtype)
        return dense

    def labels(self) -> Tensor:
        """Return the classes, int64 (V,), -1 for none. Raises: GraphError without labels."""
        if self._graph.labels is None:
            raise GraphError(f"{self._graph.name} has no labels; add some when you prepare it, or take(your labels)")
        return self.take(self._graph.labels.array())

    def split(self, name: str, number: int) -> Tensor:
        """Return which rows belong to a split, bool (V,), False for copies. Raises: GraphError if it does not exist."""
        if name not in self._graph.splits:
            known = ", ".join(self._graph.splits) or "none"
            raise GraphError(f"{self._graph.name} has no split {name!r}; it has {known}, or take(your mask)")
        rows = self._graph.splits[name]
        if not 0 <= number < rows.shape[0]:
            raise GraphError(f"split {name!r} of {self._graph.name} has numbers 0 to {rows.shape[0] - 1}, got {number}")
        return self.take(rows.array()[number]) & self.owned

    def take(self, values: Any) -> Tensor:
        """Return this rank's rows (V, ...) of an array or tensor (N, ...) in original order."""
        array = values if isinstance(values, np.ndarray) else np.asarray(to_numpy(values))
        if array.ndim == 0 or array.shape[0] != self._graph.num_vertices:
            raise GraphError(
                f"expected one row for each of {self._graph.num_vertices} vertices, got shape {array.shape}; "
                "take() expects values of the whole graph in its own order"
            )
        return self._backend.upload(np.ascontiguousarray(array[self._ids]))
