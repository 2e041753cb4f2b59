"""The cost of a partition, before it is built: nonzeros and required rows of each tile, and the stages' critical path.

P ranks; tile (i, j) multiplies rows of rank j into rows of rank i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.graph.csr import CSR, Graph, Rows, rows_with_loops
from mggcn.graph.layout import is_own
from mggcn.graph.store import store_folder
from mggcn.graph.store_write import LOOPS
from mggcn.partition.order import Owners
from mggcn.partition.sweep import ROWS, sweep, sweep_nonzeros

COUNTED = 1 << 18
"""Edges counted at a time: NumPy needs some 40 bytes for each meanwhile."""


@dataclass(frozen=True, slots=True)
class TileStatistics:
    """nnz, rows_needed int64 (P, P) of the tiles of A^T; exact is False if they are expectations of a bare shape.

    rows_needed_t: rows of rank j that rank i needs for its rows of A; the same array if the graph is symmetric.
    """

    nnz: npt.NDArray[np.int64]
    rows_needed: npt.NDArray[np.int64]
    rows_needed_t: npt.NDArray[np.int64]
    exact: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        needed = {"rows_needed": self.rows_needed.tolist()}
        if self.rows_needed_t is not self.rows_needed:
            needed["rows_needed_t"] = self.rows_needed_t.tolist()
        return {
            "nnz": self.nnz.tolist(),
            **needed,
            "exact": self.exact,
            "critical_path_over_ideal": self.critical_path_over_ideal,
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TileStatistics:
        """Invert to_dict."""
        needed = np.array(content["rows_needed"], np.int64)
        needed_t = np.array(content["rows_needed_t"], np.int64) if "rows_needed_t" in content else needed
        return TileStatistics(np.array(content["nnz"], np.int64), needed, needed_t, bool(content["exact"]))

    @property
    def critical_path_over_ideal(self) -> float:
        """Time of the stages over nnz / P, if a multiply costs its nonzeros and messages cost nothing."""
        total = self.nnz.sum()
        return critical_path(self.nnz) * self.nnz.shape[0] / float(total) if total else 1.0


def balance(counts: tuple[int, ...]) -> float:
    """Return the largest count over the average, 1 if all are 0."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def critical_path(nnz: npt.NDArray[np.int64]) -> float:
    """Return the time at which the last rank ends: own tile first, then stage after stage from two slots.

    A broadcast is collective: it starts once every receiver has multiplied what its slot held before.
    """
    ranks = nnz.shape[0]
    end = np.diag(nnz).astype(float)
    ends: list[npt.NDArray[np.float64]] = []
    for stage in range(ranks):
        arrives = ends[stage - 2].max() if stage >= 2 else 0.0
        work = nnz[:, stage].astype(float)
        others = np.arange(ranks) != stage
        end = np.where(others, np.maximum(end, arrives) + work, end)
        ends.append(end)
    return float(end.max()) if ranks else 0.0


def _part_masks(matrix: CSR, owners: Owners, part: int) -> npt.NDArray[np.uint64]:
    """Bit i of entry u: a neighbour of u lies in rank part + i, for 64 ranks at a time."""
    masks = np.zeros(matrix.num_rows, np.uint64)
    for chunk in sweep(matrix, COUNTED):
        owner = owners.owner_of(chunk.indices).astype(np.int64) - part
        bits = np.where((owner >= 0) & (owner < 64), np.uint64(1) << owner.clip(0, 63).astype(np.uint64), np.uint64(0))
        filled = np.flatnonzero(np.diff(chunk.indptr))
        if filled.size:
            masks[chunk.first + filled] = np.bitwise_or.reduceat(bits, chunk.indptr[filled])
    return masks


def tile_statistics(graph: Graph, owners: Owners, *, self_loops: bool) -> TileStatistics:
    """Count the nonzeros and the distinct columns of every tile of A^T.

    Cost: two sweeps over the edges (one more per 64 ranks, and as many for a directed graph), 8 N bytes; on one rank none
    of a store that says how many vertices have a self-loop, else one. Inserted self-loops count, stored ones too.
    """
    ranks = owners.num_ranks
    nnz = np.zeros(ranks * ranks, np.int64)
    if ranks == 1:
        nnz[0] = graph.num_edges + (graph.num_vertices - _num_loops(graph) if self_loops else 0)
    for chunk in sweep(graph.adj_t, COUNTED) if ranks > 1 else ():
        of_row = owners.owner_of(slice(chunk.first, chunk.first + chunk.rows)).astype(np.int64)
        rows = np.repeat(of_row, np.diff(chunk.indptr))
        nnz += np.bincount(rows * ranks + owners.owner_of(chunk.indices), minlength=ranks * ranks)
        if self_loops:
            ids = np.repeat(np.arange(chunk.first, chunk.first + chunk.rows), np.diff(chunk.indptr))
            stored = np.zeros(chunk.rows, bool)
            stored[ids[ids == chunk.indices] - chunk.first] = True
            lacking = of_row[~stored]
            nnz += np.bincount(lacking * ranks + lacking, minlength=ranks * ranks)
    needed = _rows_needed(graph.adj, owners, self_loops)
    needed_t = needed if graph.symmetric else _rows_needed(graph.adj_t, owners, self_loops)
    return TileStatistics(nnz.reshape(ranks, ranks), needed, needed_t)


def _num_loops(graph: Graph) -> int:
    """Return how many vertices have a self-loop, as the graph's store says, or counted in a sweep."""
    known = graph.meta.get(LOOPS)
    sealed = is_own(graph.meta) and store_folder(graph) is not None
    if sealed and type(known) is int and 0 <= known <= graph.num_vertices:
        return known
    return rows_with_loops(graph.adj_t)


def _rows_needed(matrix: CSR, owners: Owners, self_loops: bool) -> npt.NDArray[np.int64]:
    """Entry (i, j): rows u of rank j with an entry (u, v) of the matrix whose v lies on rank i."""
    ranks = owners.num_ranks
    needed = np.zeros((ranks, ranks), np.int64)
    if ranks == 1:  # which row pointers tell: every column is the rank's own
        starts = range(0, matrix.num_rows, ROWS)
        pointers = (matrix.read_pointers(start, min(start + ROWS, matrix.num_rows) + 1) for start in starts)
        filled = (int(np.count_nonzero(np.diff(some))) for some in pointers)
        needed[0, 0] = matrix.num_rows if self_loops else sum(filled)
        return needed
    for part in range(0, ranks, 64):
        masks = _part_masks(matrix, owners, part)
        for i in range(part, min(part + 64, ranks)):
            required = (masks >> np.uint64(i - part)) & np.uint64(1) != 0
            if self_loops:
                required[owners.owned(i)] = True
            needed[i] = owners.count(required)
    return needed


def expected_statistics(
    num_vertices: int, num_edges: int, counts: tuple[int, ...], *, self_loops: bool
) -> TileStatistics:
    """Return the expected statistics of a random assignment for a graph of which only the shape is known.

    Self-loops are added for every vertex. Rows needed: a rank needs a row unless none of its E / N edges, on average,
    goes there: V_j (1 - (1 - V_i / N)^(E / N)), exact for regular graphs and an upper estimate for skewed ones.
    """
    share = np.array(counts) / max(num_vertices, 1)
    nnz = np.rint(np.outer(share, share) * num_edges).astype(np.int64)
    if self_loops:
        nnz[np.diag_indices(len(counts))] += np.array(counts)
    degree = num_edges / max(num_vertices, 1)
    needed = np.rint(np.outer(1.0 - (1.0 - share) ** degree, np.array(counts))).astype(np.int64)
    if self_loops:
        needed[np.diag_indices(len(counts))] = np.array(counts)
    return TileStatistics(nnz, needed, needed, exact=False)


SAMPLED_ROWS = 2048
"""Rows whose aggregate is counted to estimate the nonzeros of A_hat X."""


def estimate_aggregated_nnz(graph: Graph, *, self_loops: bool) -> int:
    """Estimate the nonzeros of A^T X for sparse X, a CSR or not, from SAMPLED_ROWS evenly spaced rows; 0 without X.

    Cost: the pattern of X is held in memory meanwhile. Exact for graphs of at most SAMPLED_ROWS vertices.
    """
    if graph.features is None or not graph.num_vertices:
        return 0
    pattern = _pattern(graph.features)
    count = min(SAMPLED_ROWS, graph.num_vertices)
    chosen = np.linspace(0, graph.num_vertices - 1, count).astype(np.int64)
    parts = []
    for chunk in sweep(graph.adj_t, COUNTED):
        mine = chosen[(chosen >= chunk.first) & (chosen < chunk.first + chunk.rows)]
        ones = np.ones(chunk.indices.shape[0], np.float32)
        adj = sp.csr_matrix((ones, chunk.indices, chunk.indptr), (chunk.rows, graph.num_vertices))[mine - chunk.first]
        if self_loops:
            loops = sp.csr_matrix((np.ones(mine.size, np.float32), (np.arange(mine.size), mine)), adj.shape)
            adj = adj + loops
        parts.append((adj @ pattern).nnz)
    return round(float(sum(parts)) * graph.num_vertices / count)


def _pattern(features: Rows | CSR) -> sp.csr_matrix:
    """Return a matrix of ones where features are not zero."""
    cols = features.num_cols if isinstance(features, CSR) else features.shape[1]
    chunks = list(sweep_nonzeros(features))
    indices = np.concatenate([chunk.indices for chunk in chunks])
    counts = np.concatenate([np.diff(chunk.indptr) for chunk in chunks])
    return sp.csr_matrix(
        (np.ones(indices.size, np.float32), indices, np.append(0, np.cumsum(counts))), (counts.size, cols)
    )
