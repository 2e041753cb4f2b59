"""A graph whose vertices have other row numbers; names of the vertices stay, so that results can be told apart.

N vertices, E edges, D features, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, Array, ArrayRows, Graph, Rows
from mggcn.graph.ids import ids_of

Ids = npt.NDArray[np.int64]
BLOCK = 1 << 20
"""Entries that are put in order at a time, unless a row has more."""


@dataclass(frozen=True, slots=True)
class ReorderedRows:
    """Rows of another array in an order, int64 (rows,), read from where they lie."""

    rows: Rows
    order: Ids

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.order.shape[0], *self.rows.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.rows.dtype

    def read(self, start: int, stop: int) -> Array:
        return self.rows.take(self.order[start:stop])

    def array(self) -> Array:
        return self.rows.take(self.order)

    copied = True

    def take(self, ids: Ids) -> Array:
        return self.rows.take(self.order[ids])

    def in_place(self) -> ReorderedRows:
        return ReorderedRows(self.rows.in_place(), self.order)


def relabelled(graph: Graph, order: Ids) -> Graph:
    """Return the graph in which row r is the vertex that was in row order[r]; order int64 (N,): a permutation.

    Its `ids` are those of the graph, or the rows that vertices had. Of joined graphs, meta["graphs"] is left out: their
    vertices are no longer together.
    Cost: the edges are read at random and sorted row by row, `relabel_nbytes`; features are read when they are needed, at
    random.
    """
    position = np.empty(graph.num_vertices, np.int32)
    position[order] = np.arange(graph.num_vertices, dtype=np.int32)
    adj = _matrix(graph.adj, order, position)
    features = graph.features
    if isinstance(features, CSR):
        features = _matrix(features, order, None)
    elif features is not None:
        features = ReorderedRows(features.in_place(), order)
    return replace(
        graph,
        adj=adj,
        adj_t=adj if graph.symmetric else _matrix(graph.adj_t, order, position),
        features=features,
        labels=None if graph.labels is None else ReorderedRows(graph.labels.in_place(), order),
        splits={name: ArrayRows(rows.array()[:, order]) for name, rows in graph.splits.items()},
        ids=ArrayRows(ids_of(graph)[order]),
        links={part: ArrayRows(position[rows.array()]) for part, rows in graph.links.items()},
        meta={key: value for key, value in graph.meta.items() if key != "graphs"},
    )


def relabel_nbytes(graph: Graph) -> dict[str, int]:
    """Return the memory of `relabelled`, by purpose."""
    matrices = (graph.adj,) if graph.symmetric else (graph.adj, graph.adj_t)
    matrices = (*matrices, graph.features) if isinstance(graph.features, CSR) else matrices
    arrays = [rows for m in matrices for rows in (m.indices, m.values, m.types, m.type_degrees) if rows is not None]
    edges = sum(int(np.prod(rows.shape)) * rows.dtype.itemsize for rows in arrays)
    vertices = (20 + 16 * len(matrices) + 24) * graph.num_vertices  # order, places, names; pointers; a matrix's rows
    splits = sum(int(np.prod(rows.shape)) for rows in graph.splits.values())
    return {"edges": edges, "vertices": vertices + splits, "blocks": 64 * BLOCK}


def _matrix(matrix: CSR, order: Ids, position: npt.NDArray[np.int32] | None) -> CSR:
    """Return the rows in an order, with columns v as position[v]; None: columns stay as they are."""
    pointers = matrix.read_pointers(0, matrix.num_rows + 1)
    lengths = np.diff(pointers)[order]
    ends = np.append(0, np.cumsum(lengths))
    arrays = {name: getattr(matrix, name) for name in ("indices", "values", "types", "type_degrees")}
    moved = {name: np.empty(rows.shape, rows.dtype) for name, rows in arrays.items() if rows is not None}
    low = 0
    while low < order.size:
        high = max(int(np.searchsorted(ends, ends[low] + BLOCK, side="right")) - 1, low + 1)
        rows, span = slice(low, high), slice(int(ends[low]), int(ends[high]))
        entries = np.arange(span.start, span.stop) + np.repeat(pointers[order[rows]] - ends[rows], lengths[rows])
        columns = arrays["indices"].take(entries)
        if position is not None:
            columns = position[columns]
            # Stable: of parallel edges, types ascend as they did.
            key = np.repeat(np.arange(high - low), lengths[rows]) * matrix.num_cols + columns
            places = np.argsort(key, kind="stable")
            entries, columns = entries[places], columns[places]
        for name, found in moved.items():
            found[span] = columns if name == "indices" else arrays[name].take(entries)
        low = high
    rest = {name: ArrayRows(moved[name]) if name in moved else None for name in ("values", "types", "type_degrees")}
    return CSR(
        ArrayRows(ends),
        ArrayRows(moved["indices"]),
        rest["values"],
        matrix.num_cols,
        types=rest["types"],
        type_degrees=rest["type_degrees"],
    )
