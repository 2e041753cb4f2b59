"""Lists of edges as columns that are read by ranges, as often as needed: from memory or from files of any size.

E edges, N vertices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, WINDOW, Array, ArrayRows, Rows


class Block(NamedTuple):
    """Some edges, in their order."""

    src: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64] | None
    types: Array | None


class Survey(NamedTuple):
    """Counts and extremes of all edges, from one pass over them."""

    lowest: int
    highest: int
    """Least and greatest id of a vertex, 0 and -1 without edges."""
    not_finite: int
    """Weights that are NaN or infinite."""
    lowest_type: int
    highest_type: int


@dataclass(frozen=True, slots=True)
class Edges:
    """Columns of equal length [E]: sources, targets, weights and types if there are any."""

    src: Rows
    dst: Rows
    weights: Rows | None = None
    types: Rows | None = None

    @property
    def count(self) -> int:
        """Number of edges, E."""
        return self.src.shape[0]

    def block(self, start: int, stop: int) -> Block:
        """Return edges [start, stop) with ids as int64 and weights as float64."""
        return Block(
            self.src.read(start, stop).astype(np.int64, copy=False),
            self.dst.read(start, stop).astype(np.int64, copy=False),
            None if self.weights is None else self.weights.read(start, stop).astype(np.float64, copy=False),
            None if self.types is None else self.types.read(start, stop),
        )

    def survey(self) -> Survey:
        """Look at every id, weight and type. Cost: one pass in windows of bounded size."""
        ids, types, bad = [], [], 0
        for start in range(0, self.count, WINDOW):
            for column in (self.src, self.dst):
                part = column.read(start, start + WINDOW)
                ids += [int(part.min()), int(part.max())]
            if self.weights is not None:
                bad += int(np.count_nonzero(~np.isfinite(self.weights.read(start, start + WINDOW))))
            if self.types is not None:
                part = self.types.read(start, start + WINDOW)
                types += [int(part.min()), int(part.max())]
        return Survey(min(ids, default=0), max(ids, default=-1), bad, min(types, default=0), max(types, default=-1))


class Entries(NamedTuple):
    """A square matrix that is too large for memory: entry (u, v) is the edge u -> v."""

    edges: Edges
    num_vertices: int


def from_array(edges: Array, weights: Array | None = None, types: Array | None = None) -> Edges:
    """Return the columns of arrays [2, E], [E] and [E]; nothing is copied."""
    more = (None if column is None else ArrayRows(column) for column in (weights, types))
    return Edges(ArrayRows(edges[0]), ArrayRows(edges[1]), *more)


def of_matrix(adj: CSR) -> Edges:
    """Return the entries of a matrix as edges in row order; nothing is held but the row pointers."""
    return Edges(RowIds(adj.indptr.array()), adj.indices, adj.values, adj.types)


@dataclass(frozen=True, slots=True)
class RowIds:
    """The row of every entry of a CSR."""

    indptr: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.indptr[-1]),)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64)

    def read(self, start: int, stop: int) -> Array:
        first, last, _ = slice(start, stop).indices(self.shape[0])
        low = int(np.searchsorted(self.indptr, first, side="right")) - 1
        high = max(low, int(np.searchsorted(self.indptr, last, side="left")))
        counts = np.diff(np.clip(self.indptr[low : high + 1], first, last))
        return np.repeat(np.arange(low, high, dtype=np.int64), counts)

    def array(self) -> Array:
        return self.read(0, self.shape[0])

    copied = True

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        return np.searchsorted(self.indptr, ids, side="right") - 1

    def in_place(self) -> RowIds:
        return self


@dataclass(frozen=True, slots=True)
class ColumnOf:
    """Column `number` of rows [E, columns]."""

    table: Rows
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape[:1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.table.dtype

    def read(self, start: int, stop: int) -> Array:
        return np.ascontiguousarray(self.table.read(start, stop)[:, self.number])

    def array(self) -> Array:
        return self.read(0, self.shape[0])

    copied = True

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        return np.ascontiguousarray(self.table.take(ids)[:, self.number])

    def in_place(self) -> ColumnOf:
        return ColumnOf(self.table.in_place(), self.number)
