"""The rows that a training epoch needs: those that the loss reads and, layer by layer downwards, the rows that these
read.

R(L) are the training vertices, R(l - 1) is R(l) with its in-neighbours. The aggregation of layer l need compute rows R(l)
of A^T alone, and backwards columns R(l) of A, since no other row has a gradient. N vertices, P ranks, L layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.graph.csr import Graph
from mggcn.partition.order import Owners, whole_graph
from mggcn.partition.rows.tiles import RowColumnMask, sweep_arguments
from mggcn.partition.statistics import TileStatistics, expected_statistics
from mggcn.partition.sweep import sweep

LEAST_SAVED: Final = 0.25
"""Least share of a layer's nonzeros that pruning must save: the remaining entries are stored once more in each
direction, and every row is still written. Measured by bench/cpu/epochs.py."""
THREADED_RANKS: Final = 256
"""Ranks up to which threads count tiles, each in 16 P^2 bytes of its own."""


@dataclass(frozen=True, slots=True)
class RequiredRows:
    """The rows that an aggregation computes, per rank, and the tiles of A^T with no other rows."""

    rows: tuple[int, ...]
    tiles: TileStatistics

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    @property
    def num_entries(self) -> int:
        return int(self.tiles.nnz.sum())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"rows": list(self.rows)} | self.tiles.to_dict()

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> RequiredRows:
        """Invert to_dict."""
        return RequiredRows(tuple(int(n) for n in content["rows"]), TileStatistics.from_dict(content))


def worth_pruning(kept: int, total: int) -> bool:
    """Return whether aggregating only `kept` nonzeros saves enough to be worth separate matrices."""
    return kept <= (1 - LEAST_SAVED) * total


def required_sets(
    graph: Graph, training: npt.NDArray[np.bool_], count: int, threads: int
) -> tuple[npt.NDArray[np.bool_], ...]:
    """Return R(L), R(L - 1), ..., `count` of them, each bool (N,). Cost: a sweep over the edges for each but the first."""
    sets = [training]
    while len(sets) < count:
        sets.append(_with_neighbours(graph, sets[-1], threads))
    return tuple(sets)


def _with_neighbours(graph: Graph, required: npt.NDArray[np.bool_], threads: int) -> npt.NDArray[np.bool_]:
    """Return the required vertices and their in-neighbours."""
    found = required.copy()
    kernel, nobody = native.kernel("mggcn_required_reads"), whole_graph(0)
    for chunk in sweep(graph.adj_t):
        arguments = sweep_arguments(chunk, nobody, 0, False, RowColumnMask(rows=required))
        kernel(ctypes.byref(arguments), found.ctypes.data, threads)
    return found


def count_required(
    graph: Graph, owners: Owners, required: npt.NDArray[np.bool_], *, self_loops: bool, threads: int
) -> RequiredRows:
    """Count rows and tiles of A^T with the rows `required` (N,) alone; inserted self-loops count.

    Cost: one sweep over the edges; 8 N bytes for every 64 ranks, 16 P^2 for every thread.
    """
    ranks = owners.num_ranks
    nnz, needed, needed_t = (np.zeros((ranks, ranks), np.int64) for _ in range(3))
    readers = np.zeros((required.shape[0], -(-ranks // 64)), np.uint64)
    kernel = native.kernel("mggcn_required_tiles")
    for chunk in sweep(graph.adj_t):
        arguments = sweep_arguments(chunk, owners, 0, self_loops, RowColumnMask(rows=required))
        counts = (array.ctypes.data for array in (nnz, needed_t, readers))
        kernel(ctypes.byref(arguments), ranks, *counts, threads if ranks <= THREADED_RANKS else 1)
    for rank in range(ranks):
        reads = (readers[:, rank // 64] >> np.uint64(rank % 64)) & np.uint64(1) != 0
        needed[rank] = owners.count(reads)
    rows = owners.count(required)
    return RequiredRows(tuple(int(n) for n in rows), TileStatistics(nnz, needed, needed_t))


def required_stats(
    graph: Graph,
    owners: Owners,
    training: npt.NDArray[np.bool_],
    depth: int,
    num_entries: int,
    *,
    self_loops: bool,
    threads: int,
) -> tuple[RequiredRows, ...]:
    """Return the statistics of R(L), R(L - 1), ...: at most `depth`, fewer where those below are equal or save too little.

    They end with the first that does not pay (num_entries: nonzeros of all rows), or whose neighbours are all in it: layers
    further down read as much or more. Cost: two sweeps over the edges for each, one for the last.
    """
    found, required = list[RequiredRows](), training
    while len(found) < depth:
        found.append(count_required(graph, owners, required, self_loops=self_loops, threads=threads))
        if len(found) == depth or not worth_pruning(found[-1].num_entries, num_entries):
            break
        below = _with_neighbours(graph, required, threads)
        if np.array_equal(below, required):
            break
        required = below
    return tuple(found)


def expected_shares(share: float, degree: float, depth: int) -> list[tuple[float, float]]:
    """Return the expected shares of rows and of nonzeros of R(L), R(L - 1), ..., as far as `required_stats` goes.

    share: of the vertices that train, at random; degree: edges per vertex, so a vertex is in the next set unless neither
    itself nor any end of its edges is in this one: 1 - (1 - share)^(degree + 1), an upper estimate for skewed graphs.
    """
    shares = list[tuple[float, float]]()
    while len(shares) < depth:
        shares.append((share, share))
        if share > 1 - LEAST_SAVED:
            break
        share = 1.0 - (1.0 - share) ** (degree + 1)
    return shares


def expected_required(
    num_vertices: int,
    num_edges: int,
    counts: tuple[int, ...],
    shares: Sequence[tuple[float, float]],
    *,
    self_loops: bool,
) -> tuple[RequiredRows, ...]:
    """Return the expectation under a random assignment of sets of which only the shares of rows and nonzeros are known."""
    full = expected_statistics(num_vertices, num_edges, counts, self_loops=self_loops)
    rows, degree = np.array(counts), num_edges / max(num_vertices, 1)
    part = rows / max(num_vertices, 1)
    found = []
    for share, entries in shares:
        # As `expected_statistics`: a row is needed unless none of its edges goes to a required row of the rank, or from it.
        needed = np.outer(1.0 - (1.0 - part * share) ** degree, rows)
        needed_t = np.outer(1.0 - (1.0 - part) ** degree, rows * share)
        if self_loops:
            own = np.diag_indices(len(counts))
            needed[own] = rows * (1.0 - (1.0 - share) * (1.0 - part * share) ** degree)
            needed_t[own] = rows * share
        nnz, reads, reads_t = (np.rint(array).astype(np.int64) for array in (full.nnz * entries, needed, needed_t))
        tiles = TileStatistics(nnz, reads, reads_t, exact=False)
        found.append(RequiredRows(tuple(int(n) for n in np.rint(rows * share)), tiles))
    return tuple(found)
