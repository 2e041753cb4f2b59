"""The halo of a rank: the rows of other ranks that its own rows multiply, compacted, and its own rows that others need.

N vertices, V rows of this rank, K rows of its halo, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, Graph
from mggcn.partition.order import Assignment, Owners
from mggcn.partition.rows.shard import ShardOptions, cut_tiles
from mggcn.partition.rows.tiles import EVERYTHING, RowColumnMask, Tile
from mggcn.partition.statistics import COUNTED
from mggcn.partition.sweep import sweep


@dataclass(frozen=True, slots=True)
class Halo:
    """Tiles of a rank in one direction, A^T or A, and the rows that are exchanged for them.

    own (V, V): its tile; halo (V, K): all its other entries, the columns in order of owner and row there.
    received: rows of the halo by owner. rows int32: its own rows that others need, in order of the receiver, then of the
    row; sent: how many each receives.
    """

    own: Tile
    halo: Tile
    received: tuple[int, ...]
    rows: npt.NDArray[np.int32]
    sent: tuple[int, ...]


def build_halos(
    graph: Graph, owners: Owners, rank: int, options: ShardOptions, required: npt.NDArray[np.bool_] | None = None
) -> tuple[Halo, Halo]:
    """Return a rank's halo for A^T and for A; the same object if the graph is symmetric.

    required: bool (N,), of A^T the rows, and of A the columns, that are taken: two halos then, whatever the graph.

    No rank asks another: for A^T, rank q needs those rows u of this one that have an entry (u, v) of A with v on rank q.
    Cost: three sweeps per direction; besides the tiles N bytes and V for each rank, then 6 N while they are built.
    Raises: GraphError for a tile that is too large.
    """
    rows, cols = RowColumnMask(rows=required), RowColumnMask(cols=required)
    needed, toward = _neighbours(graph.adj_t, owners, rank, rows)
    if graph.symmetric and required is None:
        halo = _build(graph.adj_t, needed, toward, owners, rank, options)
        return halo, halo
    needed_t, toward_t = _neighbours(graph.adj, owners, rank, cols)
    return (
        _build(graph.adj_t, needed, toward_t, owners, rank, options, rows),
        _build(graph.adj, needed_t, toward, owners, rank, options, cols),
    )


@dataclass(frozen=True, slots=True)
class HaloIds:
    """The vertices of other ranks that a rank's rows have entries of A^T in, by owner, and its own ones that others have,
    by reader: ids int64, ascending. The place of a vertex among one rank's is the same on both sides.
    """

    received: tuple[npt.NDArray[np.int64], ...]
    sent: tuple[npt.NDArray[np.int64], ...]


def halo_ids(graph: Graph, owners: Owners, rank: int) -> HaloIds:
    """Return a rank's halo for A^T as ids. No rank asks another. Cost: a sweep over the edges, of a directed graph two."""
    needed, toward = _neighbours(graph.adj_t, owners, rank, EVERYTHING)
    if not graph.symmetric:
        _, toward = _neighbours(graph.adj, owners, rank, EVERYTHING)
    (readers, rows), owned, ranks = toward, owners.owned(rank), range(owners.num_ranks)
    everyone = np.flatnonzero(needed)
    whose = owners.owner_of(everyone)
    received = tuple(everyone[whose == owner] for owner in ranks)
    return HaloIds(received, tuple(np.sort(owned[rows[readers == reader]]) for reader in ranks))


def _neighbours(
    matrix: CSR, owners: Owners, rank: int, only: RowColumnMask
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """Whether the rank's rows have entries in a column (N,) of another rank; owner and row (2, ...) of such, once each."""
    needed = np.zeros(matrix.num_rows, bool)
    toward = np.zeros((owners.num_ranks, owners.counts[rank]), bool)
    for chunk in sweep(matrix, COUNTED, span=owners.span(rank)):
        rows = slice(chunk.first, chunk.first + chunk.rows)
        mine, lengths = owners.owner_of(rows) == rank, np.diff(chunk.indptr)
        if only.rows is not None:
            mine &= only.rows[rows]
        local = np.repeat(owners.local_of(rows)[mine], lengths[mine])
        columns = chunk.indices[np.repeat(mine, lengths)]
        if only.cols is not None:
            taken = only.cols[columns]
            columns, local = columns[taken], local[taken]
        needed[columns] = True
        toward[owners.owner_of(columns), local] = True
    needed[owners.owned(rank)] = False
    toward[rank] = False
    # In order of the receiver, then of the row.
    return needed, np.stack([part.astype(np.int32) for part in np.nonzero(toward)])


def _build(
    matrix: CSR,
    needed: npt.NDArray[np.bool_],
    toward: npt.NDArray[np.int32],
    owners: Owners,
    rank: int,
    options: ShardOptions,
    only: RowColumnMask = EVERYTHING,
) -> Halo:
    """Cut the rank's rows into the own tile and the halo, as those of two ranks: itself, and one with all others' rows."""
    everyone = slice(None)
    local, received = owners.local_of(everyone).copy(), list[int]()
    for owner in range(owners.num_ranks):
        ids = owners.owned(owner)
        ids = ids[needed[ids]]
        first = sum(received)
        local[ids] = np.arange(first, first + ids.size, dtype=np.int32)
        received.append(int(ids.size))
    # Other ranks' rows that are not needed have no entry here, so their numbers do not matter.
    two = Assignment((owners.owner_of(everyone) != rank).astype(np.uint16), local, (owners.counts[rank], sum(received)))
    own, halo = cut_tiles(matrix, two, 0, options, only, owners.span(rank))
    receivers, rows = toward
    sent = np.bincount(receivers, minlength=owners.num_ranks)
    return Halo(own, halo, tuple(received), rows, tuple(int(n) for n in sent))
