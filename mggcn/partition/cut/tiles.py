"""The matrix of one part of a vertex cut: its edges as CSR over the rank's rows, copies included.

V rows of this rank, E entries of the whole matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, Rows
from mggcn.partition.cut.partition import CutPartition, damaged_cut, read_parts
from mggcn.partition.order import Owners
from mggcn.partition.rows.tiles import Tile, check_tile_nnz
from mggcn.partition.rows.typed import typed_tiles
from mggcn.partition.sweep import sweep

Ids = npt.NDArray[np.int64]
Columns = npt.NDArray[np.int32]


def cut_tile(
    matrix: CSR,
    edge_part: Rows,
    partition: CutPartition,
    held: Owners,
    rank: int,
    *,
    self_loops: bool,
    dtype: npt.DTypeLike,
) -> Tile:
    """Return the entries of `matrix` in a rank's part (V, V); missing diagonals are added where the vertex is owned.

    edge_part: part of every entry, in the order of the matrix. A row keeps its order; an added diagonal comes last.
    Cost: two sweeps over the matrix, six with types; besides the tile chunks of some 60 MiB.
    Raises: GraphError for 2^31 entries or more; StoreError for parts that the cut or an edge's ends do not have.
    """

    def cut(one: CSR) -> tuple[Tile, ...]:
        return (_cut(one, edge_part, partition, held, rank, self_loops=self_loops, dtype=dtype),)

    return typed_tiles(cut, matrix)[0]


def _cut(
    matrix: CSR,
    edge_part: Rows,
    partition: CutPartition,
    held: Owners,
    rank: int,
    *,
    self_loops: bool,
    dtype: npt.DTypeLike,
) -> Tile:
    """As cut_tile, without types."""
    rows = partition.counts[rank]
    lengths = np.zeros(rows, np.int64)
    lacking = np.zeros(rows, bool)
    if self_loops:
        owned = partition.owned(rank)
        lacking[:] = True if owned is None else owned
    for row, column, _ in _own_entries(matrix, edge_part, held, rank):
        lengths += np.bincount(row, minlength=rows)
        lacking[row[row == column]] = False
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths + lacking)])
    check_tile_nnz(int(indptr[-1]), held.num_ranks)
    indices = np.empty(int(indptr[-1]), np.int32)
    values = None if matrix.values is None else np.empty(indices.shape, dtype)
    for row, column, value in _own_entries(matrix, edge_part, held, rank):
        # All entries of a row come in one chunk, next to each other.
        first = np.concatenate([np.zeros(min(row.size, 1), np.int64), np.flatnonzero(np.diff(row)) + 1])
        within = np.arange(row.size) - np.repeat(first, np.diff(np.append(first, row.size)))
        at = indptr[row] + within
        indices[at] = column
        if values is not None and value is not None:
            values[at] = value
    ends = indptr[1:][lacking] - 1
    indices[ends] = np.flatnonzero(lacking)
    if values is not None:
        values[ends] = 1.0
    return Tile(indptr, indices, values)


def _own_entries(matrix: CSR, edge_part: Rows, held: Owners, rank: int) -> Iterator[tuple[Ids, Columns, Any]]:
    """Yield (row, column, value or None) of the part's entries, in local ids, some at a time. Raises: StoreError."""
    done = 0
    for chunk in sweep(matrix):
        count = chunk.indices.shape[0]
        mine = np.flatnonzero(read_parts(edge_part, done, done + count, held.num_ranks) == rank)
        done += count
        row = np.searchsorted(chunk.indptr, mine, side="right") - 1 + chunk.first
        value = None if chunk.values is None else chunk.values[mine]
        rows, columns = held.local_of(row), held.local_of(chunk.indices[mine])
        if mine.size and min(rows.min(), columns.min()) < 0:
            raise damaged_cut(f"has an edge in part {rank} with an endpoint outside the part")
        yield rows.astype(np.int64), columns, value


def row_slices(tile: Tile, bounds: tuple[int, ...]) -> tuple[Tile, ...]:
    """Return the rows between successive bounds as tiles that share their entries with the whole."""
    result = []
    for first, last in itertools.pairwise(bounds):
        a, b = int(tile.indptr[first]), int(tile.indptr[last])
        values, types = (None if part is None else part[a:b] for part in (tile.values, tile.types))
        result.append(Tile(tile.indptr[first : last + 1] - a, tile.indices[a:b], values, types))
    return tuple(result)
