"""A rank's features, read in one forward sweep with bounded buffers.

V rows of this rank, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, ArrayRows, Graph, Rows
from mggcn.graph.file_rows import read_ahead
from mggcn.graph.vertex_data import MappedRows
from mggcn.partition.order import Owners, whole_graph
from mggcn.partition.rows.tiles import MAX_TILE_NNZ, Tile
from mggcn.partition.sweep import sweep, sweep_nonzeros

BLOCK_BYTES = 8 << 20
"""Bytes of features read at a time."""


CHUNK_NNZ = 1 << 18
"""Entries of sparse features read at a time; NumPy temporaries take about 50 bytes per entry."""
T = TypeVar("T")


def present(value: T | None) -> T:
    """Return values that must exist according to the plan. Raises: GraphError if they are None."""
    if value is None:
        raise GraphError("the sparse features have no values where the plan expects them; plan the run again")
    return value


@dataclass(frozen=True, slots=True)
class VertexFeatures:
    """The features of any vertices; sparse ones are given as dense rows."""

    graph: Graph
    row_normalize: bool

    @property
    def rows(self) -> Rows | CSR:
        """The features as the graph has them. Raises: GraphError if it has none."""
        if self.graph.features is None:
            raise GraphError(f"{self.graph.name} has no features; give it some when you prepare it")
        return self.graph.features

    @property
    def num_features(self) -> int:
        features = self.rows
        return features.num_cols if isinstance(features, CSR) else features.shape[1]

    def gather(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return (len(ids), D), as `in_single`. Cost: a random access for each; of files, a map (`Rows.in_place`)."""
        features = self.rows
        if isinstance(features, CSR):
            starts, stops = (features.indptr.array()[ids + end] for end in (0, 1))
            counts = stops - starts
            places = np.arange(int(counts.sum())) + np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts)
            rows = np.zeros((ids.size, self.num_features), np.float32)
            values = 1.0 if features.values is None else features.values.array()[places]
            rows[np.repeat(np.arange(ids.size), counts), features.indices.array()[places]] = values
        else:
            rows = in_single(features.take(ids))
        return self.normalized(rows)

    def read_ahead(self, span: range) -> None:
        """Have the system read the rows of a span from their file, if one is mapped, before they are read in order."""
        rows = self.rows
        while isinstance(rows, MappedRows):
            rows = rows.rows
        if isinstance(rows, ArrayRows):
            read_ahead(rows.data, span.start, span.stop)

    def normalized(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Divide rows by the sums of their absolute values, if the run asks for it."""
        if not self.row_normalize:
            return rows
        sums = np.abs(rows).sum(1, keepdims=True)
        return rows / np.where(sums == 0, 1, sums)


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """The features of the vertices that a rank owns, read as dense rows or as CSR."""

    graph: Graph
    owners: Owners
    rank: int
    row_normalize: bool

    @property
    def anywhere(self) -> VertexFeatures:
        """The features of any vertices."""
        return VertexFeatures(self.graph, self.row_normalize)

    @property
    def num_features(self) -> int:
        return self.anywhere.num_features

    @property
    def _features(self) -> Rows | CSR:
        return self.anywhere.rows

    def dense(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]:
        """Yield (local ids, (rows, D)) of the owned rows as `in_single`, in the order of the file, some 8 MiB at a time."""
        features, span = self._features, self.owners.span(self.rank)
        step = max(1, BLOCK_BYTES // (4 * max(self.num_features, 1)))
        if isinstance(features, CSR):
            for chunk in sweep(features, rows=step, span=span):
                block = np.zeros((chunk.rows, self.num_features), np.float32)
                rows = np.repeat(np.arange(chunk.rows), np.diff(chunk.indptr))
                block[rows, chunk.indices] = 1.0 if chunk.values is None else chunk.values
                yield self._owned(chunk.first, block)
        else:
            for start in span[::step]:
                yield self._owned(start, features.read(start, min(start + step, span.stop)))

    def _owned(self, start: int, block: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        vertices = slice(start, start + block.shape[0])
        mine = self.owners.owner_of(vertices) == self.rank
        return self.owners.local_of(vertices)[mine], self.anywhere.normalized(in_single(block[mine]))

    def sparse(self, dtype: npt.DTypeLike, scale: npt.NDArray[Any] | None) -> Tile:
        """Return the owned rows as CSR (V, D), by local id, times `scale` (V,) if given; of dense features, the nonzeros.

        Cost: two sweeps over the features.
        """
        features = self._features
        lengths = np.zeros(self.owners.counts[self.rank] + 1, np.int64)
        for chunk in sweep_nonzeros(features, CHUNK_NNZ):
            vertices = slice(chunk.first, chunk.first + chunk.rows)
            mine = self.owners.owner_of(vertices) == self.rank
            lengths[1 + self.owners.local_of(vertices)[mine]] = np.diff(chunk.indptr)[mine]
        indptr = np.cumsum(lengths)
        indices = np.empty(int(indptr[-1]), np.int32)
        values = np.empty(int(indptr[-1]), dtype)
        for chunk in sweep_nonzeros(features, CHUNK_NNZ):
            vertices = slice(chunk.first, chunk.first + chunk.rows)
            mine, local = self.owners.owner_of(vertices) == self.rank, self.owners.local_of(vertices)
            counts = np.diff(chunk.indptr)
            chosen = np.repeat(mine, counts)
            row = np.repeat(local, counts)[chosen]
            # Position of an entry: start of its local row plus its place in the row.
            place = (np.arange(chunk.indices.shape[0]) - np.repeat(chunk.indptr[:-1], counts))[chosen]
            data = np.ones(chosen.sum(), dtype) if chunk.values is None else chunk.values[chosen].astype(dtype)
            place += indptr[row]
            indices[place] = chunk.indices[chosen]
            values[place] = data
        if self.row_normalize:
            sums = np.add.reduceat(np.abs(np.append(values, 0)), indptr[:-1]) if indptr.shape[0] > 1 else np.zeros(0)
            sums[np.diff(indptr) == 0] = 1
            sums[sums == 0] = 1
            values /= np.repeat(sums, np.diff(indptr)).astype(dtype)
        if scale is not None:
            values *= np.repeat(scale, np.diff(indptr)).astype(dtype)
        return Tile(indptr, indices, values)


def in_single(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows of features in float32; rows that a run in float64 has learned stay as they are."""
    return rows if rows.dtype == np.float64 else rows.astype(np.float32, copy=False)


def transposed(matrix: Tile, num_cols: int) -> tuple[Tile, npt.NDArray[np.int32]]:
    """Return the transpose (D, V) and, for each of its entries, the position in `matrix`, as int32.

    Cost: one counting sort of nnz entries. Raises: GraphError for 2^31 nonzeros or more.
    """
    rows = matrix.indptr.shape[0] - 1
    if matrix.nnz > MAX_TILE_NNZ:
        raise GraphError(f"{matrix.nnz:,} nonzeros of features on one rank exceed {MAX_TILE_NNZ:,}; use more ranks")
    order = sp.csr_matrix(
        (np.arange(matrix.nnz, dtype=np.int32), matrix.indices, matrix.indptr), (rows, num_cols)
    ).tocsc()
    position = order.data
    return Tile(
        order.indptr.astype(np.int64), order.indices.astype(np.int32, copy=False), present(matrix.values)[position]
    ), position


def aggregated(reader: FeatureReader, shard_scale: tuple[Any, Any], *, self_loops: bool, dtype: npt.DTypeLike) -> Tile:
    """Return S_r A^T S_c X of the owned rows as CSR; `shard_scale` is S_r of the owned rows and S_c of all vertices.

    Cost: the sparse product of the owned rows of A^T with all of X, which is in memory during the call.
    """
    graph, owners, rank = reader.graph, reader.owners, reader.rank
    row_scale, col_scale = shard_scale
    whole = FeatureReader(graph, whole_graph(graph.num_vertices), 0, reader.row_normalize)
    x = whole.sparse(np.float64, col_scale)
    features = sp.csr_matrix((present(x.values), x.indices, x.indptr), (graph.num_vertices, reader.num_features))
    parts, locals_ = [], []
    for chunk in sweep(graph.adj_t):
        vertices = slice(chunk.first, chunk.first + chunk.rows)
        mine = owners.owner_of(vertices) == rank
        data = np.ones(chunk.indices.shape[0]) if chunk.values is None else chunk.values.astype(np.float64)
        adj = sp.csr_matrix((data, chunk.indices, chunk.indptr), (chunk.rows, graph.num_vertices))
        if self_loops:
            ids = np.arange(chunk.first, chunk.first + chunk.rows)
            stored = np.repeat(ids, np.diff(chunk.indptr))
            lacking = np.setdiff1d(ids, stored[stored == chunk.indices])
            loops = sp.csr_matrix((np.ones(lacking.size), (lacking - chunk.first, lacking)), adj.shape)
            adj = adj + loops
        parts.append(adj[mine] @ features)
        locals_.append(owners.local_of(vertices)[mine])
    product = sp.vstack(parts, format="csr")[np.argsort(np.concatenate(locals_))]
    product = (sp.diags(row_scale) @ product).tocsr()
    product.sort_indices()
    return Tile(product.indptr.astype(np.int64), product.indices.astype(np.int32), product.data.astype(dtype))
