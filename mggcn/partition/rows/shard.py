"""The shard: one rank's part of the graph, as host arrays with local ids.

V rows of this rank, P ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, Graph
from mggcn.partition.base import Partition
from mggcn.partition.order import Owners
from mggcn.partition.rows.tiles import EVERYTHING, MakeArray, RowColumnMask, Tile, build_tiles, degrees, scales
from mggcn.partition.rows.typed import typed_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part of the graph.

    global_ids int64 (V,): original id of each row; owned bool (V,): rows whose vertex is this rank's own, None if all.
    row_scale, col_scale (V,) or None: S_r and S_c.
    """

    rank: int
    global_ids: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_] | None
    row_scale: npt.NDArray[Any] | None
    col_scale: npt.NDArray[Any] | None

    @property
    def rows(self) -> int:
        return int(self.global_ids.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """The settings of a run on which a shard depends. array: makes the arrays of its edges, in memory by default."""

    aggregates: bool
    norm: str
    self_loops: bool
    dtype: str
    threads: int
    array: MakeArray = np.empty


def build_shard(
    graph: Graph, partition: Partition, rank: int, options: ShardOptions, local_index: Owners | None = None
) -> Shard:
    """Build a rank's rows; its strategy builds the matrices. local_index: the partition's, if known.

    Cost: one sweep over the rank's edges for the degrees; memory is the shard and 6 N bytes of the assignment. Raises:
    GraphError for negative in-degrees.
    """
    owners, owned = local_index or partition.local_index(rank), partition.owned(rank)
    ids = owners.owned(rank)
    row_scale = col_scale = None
    if options.aggregates:
        degree = degrees(graph.adj_t, owners, rank, self_loops=options.self_loops, threads=options.threads)
        row_scale, col_scale = scales(degree, options.norm)
        row_scale = row_scale.astype(options.dtype)
        col_scale = None if col_scale is None else row_scale
    return Shard(
        rank=rank,
        global_ids=ids,
        owned=owned,
        row_scale=row_scale,
        col_scale=col_scale,
    )


def row_tiles(
    graph: Graph, owners: Owners, rank: int, options: ShardOptions, required: npt.NDArray[np.bool_] | None = None
) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return a rank's rows of A^T, and of A, cut by the owners of the columns; the same tuple if the graph is symmetric.

    required: bool (N,), of A^T the rows, and of A the columns, that are taken: two matrices then, whatever the graph.
    Cost: two sweeps per direction. Raises: GraphError for a tile that is too large.
    """
    if required is not None:
        rows, cols = RowColumnMask(rows=required), RowColumnMask(cols=required)
        return cut_tiles(graph.adj_t, owners, rank, options, rows), cut_tiles(graph.adj, owners, rank, options, cols)
    tiles = cut_tiles(graph.adj_t, owners, rank, options)
    return tiles, tiles if graph.symmetric else cut_tiles(graph.adj, owners, rank, options)


def cut_tiles(
    matrix: CSR,
    owners: Owners,
    rank: int,
    options: ShardOptions,
    only: RowColumnMask = EVERYTHING,
    among: range | None = None,
) -> tuple[Tile, ...]:
    """Return a rank's rows of a matrix, by the owners of the columns. among: as for `build_tiles`.

    Cost: two sweeps. Raises: GraphError.
    """
    build = functools.partial(
        build_tiles,
        owners=owners,
        rank=rank,
        self_loops=options.self_loops,
        dtype=options.dtype,
        threads=options.threads,
        only=only,
        among=among,
        array=options.array,
    )
    return typed_tiles(build, matrix)
