"""Makes a partition of any kind from a graph, and the statistics from which a run is planned.

N vertices, P ranks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import Graph
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.cache.cuts import EDGE_CUTS, LOCALITY_ORDERS, STREAM_CUTS, VERTEX_CUTS, is_kept
from mggcn.partition.cut.libra import LibraSettings
from mggcn.partition.cut.partition import CutPartition, CutStats, cut_partition, cut_stats
from mggcn.partition.locality.order import LocalitySettings
from mggcn.partition.locality.reuse import UNKNOWN, estimate_part_reuse, estimate_reuse
from mggcn.partition.metis.run import MetisKind, MetisSettings
from mggcn.partition.order import Ranges, assign, whole_graph
from mggcn.partition.ranges import range_bounds
from mggcn.partition.rows.partition import RowPartition, RowStats
from mggcn.partition.rows.required import required_stats
from mggcn.partition.statistics import tile_statistics
from mggcn.partition.stream import StreamSettings


def make_partition(
    kind: Literal["rows", "cut"], graph: Graph, *, ranks: int, order: str, seed: int, bins: int
) -> Partition:
    """Divide a graph among ranks: its rows in some order, or its edges by Libra, with split vertices spread over `bins`.

    Cost: O(N) for rows, as `range_bounds` for ranges; a cut, of vertices or METIS's of edges, or an order by locality is
    read from beside the store or the user's cache folder, or made once and kept in the latter.
    Raises: ConfigError, StoreError, BackendError without pymetis.
    """
    if kind == "cut":
        return CutPartition(VERTEX_CUTS.for_run(graph, LibraSettings(parts=ranks, seed=seed)), bins)
    if order == "locality":
        return RowPartition(LOCALITY_ORDERS.for_run(graph, LocalitySettings(parts=ranks, seed=seed)).owners)
    if order in ("metis", "metis-balanced", "stream", "ranges") and ranks == 1:
        return RowPartition(whole_graph(graph.num_vertices))
    if order == "ranges":
        return RowPartition(Ranges(range_bounds(graph, ranks)))
    if order == "stream":
        return RowPartition(STREAM_CUTS.for_run(graph, StreamSettings(parts=ranks)).assignment())
    if order in ("metis", "metis-balanced"):
        even: MetisKind = "metis" if order == "metis" else "metis-balanced"
        settings = MetisSettings(parts=ranks, seed=seed % 2**31, kind=even)
        return RowPartition(EDGE_CUTS.for_run(graph, settings).assignment())
    return RowPartition(assign(graph.num_vertices, ranks, order, seed))


def is_cached(graph: Graph, *, ranks: int, seed: int) -> bool:
    """Return whether the vertex cut of a run is cached."""
    return is_kept(graph, LibraSettings(parts=ranks, seed=seed).name)


def stats_of(
    graph: Graph,
    partition: Partition,
    *,
    self_loops: bool,
    training: npt.NDArray[np.bool_] | None = None,
    depth: int = 0,
    reuse: bool = True,
) -> PartitionStats:
    """Return the sizes of every rank's part of a partition.

    training: vertices that the loss reads, bool (N,), to count the rows that the last `depth` layers need in a
    partition of rows. reuse: whether the locality of its gathers is estimated.
    Cost: two to five sweeps over the edges; two for each layer that needs little of them.
    """
    threads = len(os.sched_getaffinity(0))
    if isinstance(partition, RowPartition):
        owners = partition.owners
        tiles = tile_statistics(graph, owners, self_loops=self_loops)
        near = estimate_reuse(graph, owners, threads) if reuse else UNKNOWN
        stats = RowStats(owners.counts, tiles, reuse=near, ranges=isinstance(owners, Ranges))
        if training is None:
            return stats
        total = stats.num_entries
        required = required_stats(graph, owners, training, depth, total, self_loops=self_loops, threads=threads)
        return dataclasses.replace(stats, required=required)
    counted = cut_stats(graph, cut_partition(partition), self_loops=self_loops)
    return dataclasses.replace(counted, reuse=estimate_part_reuse(graph, partition.local_index(0), 0, threads))


def stats_from_dict(content: Mapping[str, Any]) -> PartitionStats:
    """Invert PartitionStats.to_dict."""
    return CutStats.from_dict(content) if content["kind"] == "cut" else RowStats.from_dict(content)
