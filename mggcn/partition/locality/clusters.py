"""A locality order: clusters by Louvain's local moves, clusters of clusters, and the vertices sorted by them.

Source: Blondel et al., "Fast unfolding of communities in large networks", 2008; the moves of a batch are made together, as
in Lu, Halappanavar and Kalyanaraman, "Parallel heuristics for scalable community detection", 2015. N vertices, K clusters,
L pairs of clusters.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.partition.locality.chunks import both_directions, num_entries, row_chunks
from mggcn.partition.sweep import EDGES, ROWS

SWEEPS = 5
"""Sweeps over the vertices of a level, at most; later ones move few."""
SETTLED = 100
"""A sweep that moves less than one vertex in so many is the last of its level."""
SHRUNK = 0.99
"""A level that leaves more than this share of the clusters below is not worth another."""
PAIRS = 1 << 16
"""Pairs of clusters by which clusters are clustered: at most so many, or N; beyond, a sample."""
ALL = 2**64 - 1

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClusterOrder:
    """order int32 (N,): the vertices, cluster after cluster. The statistics are those of the smallest clusters.

    num_cut: edges between clusters; an undirected one counts once.
    """

    order: Ids
    num_clusters: int
    largest: int
    num_levels: int
    num_cut: int


def locality_nbytes(num_vertices: int, num_stored: int, symmetric: bool) -> dict[str, int]:
    """Return the bytes that `cluster_order` holds at most, by purpose; a row of more than EDGES entries comes on top.

    Most bytes of clusters are needed only if there are about as many clusters as vertices.
    """
    directions = 1 if symmetric else 2
    pairs = min(max(num_vertices, PAIRS), num_stored)
    return {
        "chunks of rows": 4 * min(2 * EDGES, directions * num_stored) + 40 * min(ROWS, num_vertices),
        "clusters of vertices": 13 * num_vertices,
        "clusters of clusters": 33 * num_vertices,
        "pairs of clusters": 24 * pairs,
    }


def cluster_order(graph: Graph, seed: int, threads: int) -> ClusterOrder:
    """Return an order in which neighbours lie near each other, the same bits for any number of threads.

    Clusters that are joined by many edges follow each other, and inside a cluster vertices keep their order.
    Cost: 4 to 8 sweeps over the entries; memory as `locality_nbytes` says.
    """
    matrices = both_directions(graph)
    level = _clustered(matrices, num_entries(matrices), None, 1, (seed, 0), threads)
    lowest, maps = level, [level.ids]
    pairs, scale, num_cut = _pairs(graph, level.ids, seed, threads)
    while pairs.shape[0]:
        above = _clustered(
            (_csr(pairs, level.volume.shape[0]),), level.volume.copy(), level.volume, scale, (seed, len(maps)), threads
        )
        # A level that joins hardly any clusters costs a pass over the pairs and moves few vertices: the levels end here.
        if above.volume.shape[0] > SHRUNK * level.volume.shape[0]:
            break
        maps.append(above.ids)
        pairs = above.ids[pairs]
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        level = above
    sizes = np.bincount(lowest.ids, minlength=1)
    return ClusterOrder(_sorted(maps), lowest.volume.shape[0], int(sizes.max()), len(maps), num_cut)


@dataclass(frozen=True, slots=True)
class _Level:
    """Clusters of a level: ids (N,) of the vertices, or of the clusters below; volume (K,): entries of their rows."""

    ids: Ids
    volume: Counts


def _clustered(
    matrices: tuple[CSR, ...], volume: Counts, own: Counts | None, scale: int, draw: tuple[int, int], threads: int
) -> _Level:
    """Move vertices until few move. volume (N,): that of each single vertex, overwritten; own: the same where it does
    not follow from the rows.
    """
    num = volume.shape[0]
    ids, active = np.arange(num, dtype=np.int32), np.ones(num, np.uint8)
    required, batch = np.empty(min(num, ROWS), np.int32), np.empty(min(num, ROWS), np.uint8)
    addresses = (ids, volume, own, active, required, batch)
    arguments = native.ClustersArgs(
        *(None if array is None else array.ctypes.data for array in addresses), int(volume.sum()), scale, 0, 0
    )
    kernel = native.kernel("mggcn_locality_move")
    for number in range(SWEEPS):
        arguments.key, arguments.moved = _key(*draw, number), 0
        for chunk in row_chunks(matrices, threads):
            kernel(chunk.pointer, ctypes.byref(arguments))
        if arguments.moved * SETTLED < num:
            break
    return _numbered(ids, volume)


def _numbered(ids: Ids, volume: Counts) -> _Level:
    """Number the clusters that have members from 0 on, in the order of their numbers so far."""
    used = np.zeros(volume.shape[0], bool)
    used[ids] = True
    number = np.cumsum(used, dtype=np.int32)
    number -= 1
    return _Level(number[ids], volume[used])


def _pairs(graph: Graph, ids: Ids, seed: int, threads: int) -> tuple[Ids, int, int]:
    """Return the clusters (L, 2) of edges between clusters, how many edges each pair stands for, and how many there are."""
    kernel, most = native.kernel("mggcn_locality_cut"), max(graph.num_vertices, PAIRS)

    def walk(threshold: int, pairs: Ids | None) -> int:
        filled = ctypes.c_int64(0)
        target = None if pairs is None else pairs.ctypes.data
        for chunk in row_chunks((graph.adj,), threads):
            where = (ids.ctypes.data, int(graph.symmetric), threshold, _key(seed, 0, SWEEPS))
            kernel(chunk.pointer, *where, ctypes.byref(filled), target)
        return filled.value

    # Pairs are drawn by a hash of the edge, so that any number of threads draws the same. Each halving of the threshold
    # draws about half of them; `scale` makes up for it in the volumes that they are compared with.
    num_cut = count = walk(ALL, None)
    shift = 0
    while count > most:
        shift += 1
        count = num_cut >> shift
    if shift:
        count = walk(ALL >> shift, None)
    pairs = np.empty((count, 2), np.int32)
    walk(ALL >> shift, pairs)
    return pairs, 1 << shift, num_cut


def _csr(pairs: Ids, num_rows: int) -> CSR:
    """Return rows of both ends of all pairs; a column may come more than once."""
    indptr, indices = np.empty(num_rows + 1, np.int64), np.empty(pairs.size, np.int32)
    native.kernel("mggcn_locality_csr")(
        pairs.ctypes.data, pairs.shape[0], num_rows, indptr.ctypes.data, indices.ctypes.data
    )
    return CSR(ArrayRows(indptr), ArrayRows(indices), None, num_rows)


def _sorted(maps: list[Ids]) -> Ids:
    """Return the vertices sorted by the clusters of all levels, the highest first. maps: cluster of each id, by level."""
    rank = np.arange(int(maps[-1].max(initial=-1)) + 1, dtype=np.int32)
    for number, ids in reversed(list(enumerate(maps))):
        key, order = rank[ids], np.empty(ids.shape[0], np.int32)
        ends = np.empty(rank.shape[0] + 1, np.int64)
        native.kernel("mggcn_locality_group")(
            key.ctypes.data, key.shape[0], rank.shape[0], ends.ctypes.data, order.ctypes.data
        )
        if number == 0:
            return order
        rank = np.empty_like(order)
        rank[order] = np.arange(order.shape[0], dtype=np.int32)
    raise ValueError("an order needs at least one level of clusters")


def _key(seed: int, level: int, number: int) -> int:
    """Draw the key of a sweep."""
    return int(np.random.SeedSequence((seed, level, number)).generate_state(1, np.uint64)[0])
