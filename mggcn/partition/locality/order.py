"""The order `locality`: neighbours lie near each other in the rows of every rank, so that products find them in the caches.

N vertices, P ranks, M entries of A (and of A^T if it differs).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.partition.locality.chunks import both_directions, num_entries, row_chunks
from mggcn.partition.locality.clusters import ClusterOrder, cluster_order
from mggcn.partition.order import MAX_PARTS, Assignment
from mggcn.partition.statistics import balance, tile_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalitySettings:
    """Settings that determine an order: with the same graph, the same bits, whatever the number of threads."""

    parts: int
    """Number of parts P, in 1 .. 1024."""
    seed: int = 1
    """Seed of the batches of moves, of ties, and of the sample of edges by which clusters are clustered."""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_PARTS:
            raise ConfigError(f"a locality order has 1 to {MAX_PARTS} parts, got {self.parts}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed of a locality order must lie in 0 .. 2^63 - 1, got {self.seed}")

    @property
    def name(self) -> str:
        """Name of the order's folder."""
        return f"locality-{self.parts}-{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalityStatistics:
    """Statistics of an order. An undirected edge counts once; self-loops are not edges here."""

    num_edges: int
    num_inside: int
    """Edges inside the smallest clusters."""
    num_clusters: int
    """The smallest clusters, a vertex without edges being one."""
    largest_cluster: int
    num_levels: int
    """Levels of clusters of clusters."""
    gap: float
    """Places between the ends of an edge, on average: in this order, all ranks' rows one after another."""
    gap_before: float
    """The same in the order of the vertices' ids."""
    critical_path: float
    """Time of a staged broadcast's products over that of equal tiles: `TileStatistics.critical_path_over_ideal`."""
    rows_per_part: tuple[int, ...]
    nonzeros_per_part: tuple[int, ...]
    """Entries of the rows of A^T, and of A if it is another matrix."""

    @property
    def inside_share(self) -> float:
        """Edges inside the smallest clusters over all edges."""
        return self.num_inside / self.num_edges if self.num_edges else 1.0

    @property
    def nonzero_balance(self) -> float:
        """Nonzeros of the fullest part over the average."""
        return balance(self.nonzeros_per_part)

    @property
    def row_balance(self) -> float:
        """Vertices of the part with most of them over the average."""
        return balance(self.rows_per_part)


@dataclass(frozen=True, slots=True)
class LocalityOrder:
    """Consecutive ranges of the order, one for each rank. A part may be empty."""

    owners: Assignment
    statistics: LocalityStatistics


def locality(graph: Graph, settings: LocalitySettings, threads: int = 0) -> LocalityOrder:
    """Order the vertices by clusters of clusters and cut the order into P ranges of about equal work.

    Work is rows and nonzeros in equal shares: no part has more than twice the average of either, except for one vertex.
    threads: 0 for the cores that this process may use; the result does not depend on it.
    Cost: as `cluster_order`, one more sweep, and those of `tile_statistics` if P > 1; memory as `locality_nbytes`
    says (clusters.py).
    """
    threads = threads or len(os.sched_getaffinity(0))
    found = cluster_order(graph, settings.seed, threads)
    entries = num_entries(both_directions(graph))
    bounds = equal_ranges(entries[found.order], settings.parts)
    counts = np.diff(bounds)
    place = np.arange(graph.num_vertices, dtype=np.int32)
    position = np.empty_like(place)
    position[found.order] = place
    owner = np.empty(graph.num_vertices, np.uint16)
    owner[found.order] = np.repeat(np.arange(settings.parts, dtype=np.uint16), counts)
    local = position - bounds[owner].astype(np.int32)
    owners = Assignment(owner, local, tuple(int(count) for count in counts))
    nonzeros = np.bincount(owner, entries, settings.parts).astype(np.int64)
    return LocalityOrder(owners, _statistics(graph, found, owners, position, nonzeros, threads))


def equal_ranges(entries: npt.NDArray[np.int64], parts: int) -> npt.NDArray[np.int64]:
    """Cut rows with `entries` (N,) nonzeros into consecutive ranges [b[r], b[r + 1]), b int64 (P + 1,), of equal work.

    A row's work is its share of the rows plus its share of the nonzeros; it belongs to the range in which its middle
    falls.
    """
    num = entries.shape[0]
    work = entries / max(int(entries.sum()), 1)
    work += 1.0 / max(num, 1)
    middle = np.cumsum(work)
    total = middle[-1] if num else 0.0
    work *= 0.5
    middle -= work
    inner = np.searchsorted(middle, np.arange(1, parts) * (total / parts))
    return np.concatenate([[0], inner, [num]]).astype(np.int64)


def _statistics(
    graph: Graph,
    found: ClusterOrder,
    owners: Assignment,
    position: npt.NDArray[np.int32],
    nonzeros: npt.NDArray[np.int64],
    threads: int,
) -> LocalityStatistics:
    sums = np.zeros(3, np.int64)
    kernel = native.kernel("mggcn_locality_gaps")
    for chunk in row_chunks((graph.adj,), threads):
        kernel(chunk.pointer, position.ctypes.data, sums.ctypes.data)
    gaps, gaps_before, loops = (int(total) for total in sums)
    stored = graph.num_edges - loops
    num_edges = stored // 2 if graph.symmetric else stored
    path = 1.0
    if owners.num_ranks > 1:
        path = tile_statistics(graph, owners, self_loops=True).critical_path_over_ideal
    return LocalityStatistics(
        num_edges=num_edges,
        num_inside=num_edges - found.num_cut,
        num_clusters=found.num_clusters,
        largest_cluster=found.largest,
        num_levels=found.num_levels,
        gap=gaps / max(stored, 1),
        gap_before=gaps_before / max(stored, 1),
        critical_path=path,
        rows_per_part=owners.counts,
        nonzeros_per_part=tuple(int(count) for count in nonzeros),
    )
