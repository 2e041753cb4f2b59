"""METIS: parts of the vertices with few edges between them and about equal work, for the strategies that partition rows.

N vertices, M entries of A + A^T, P parts, C constraints: what every part should have about as much of.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.errors import BackendError, ConfigError
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.splits import first_splits
from mggcn.partition.metis.edge_cut import EdgeCut, edge_cut
from mggcn.partition.metis.process import Problem, new_problem, solve
from mggcn.partition.order import MAX_PARTS

MetisKind = Literal["metis", "metis-balanced"]
SLACK = 10
"""Thousandths above the average that a part may have of the nonzeros, as Libra's parts do, or of the vertices."""
SLACK_OF_SPLITS = 50
"""The same of the vertices of a split; of a small one a part may have one vertex above the even number, rounded up."""
BLOCK = 1 << 20
"""Entries of the graph that are read at a time: SciPy needs some 40 bytes for each meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetisSettings:
    """Settings that determine a cut: with the same graph and the same METIS, the same bits."""

    parts: int
    """Number of parts P, in 1 .. 1024."""
    seed: int = 1
    """Seed of METIS."""
    kind: MetisKind = "metis"
    """What is even among the parts. metis: nonzeros; metis-balanced: nonzeros, vertices, and those of each split."""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_PARTS:
            raise ConfigError(f"METIS can make 1 to {MAX_PARTS} parts here, got {self.parts}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"the seed of METIS must lie in 0 .. 2^31 - 1, got {self.seed}")

    @property
    def name(self) -> str:
        """Name of the cut's folder."""
        return f"{self.kind}-{self.parts}-{self.seed}"


@dataclass(frozen=True, slots=True)
class MetisMemory:
    """Bytes that a cut needs: `own`, by purpose, and METIS's, which depend on how fast the graph coarsens."""

    own: dict[str, int]
    metis_least: int
    metis_most: int

    @property
    def least(self) -> int:
        return sum(self.own.values()) + self.metis_least

    @property
    def most(self) -> int:
        return sum(self.own.values()) + self.metis_most


def constraints(graph: Graph, settings: MetisSettings) -> dict[str, int]:
    """Return what a cut keeps even and its slack in thousandths: nonzeros, then vertices and the splits that are not empty.

    Splits are the first of train, val and test. Cost: those are read.
    """
    if settings.kind == "metis":
        return {"nonzeros": SLACK}
    counts = {name: int(np.count_nonzero(mask)) for name, mask in first_splits(graph).items()}
    # What cannot be met takes METIS from all that can.
    most = {name: settings.parts * (1 - count // -settings.parts) / count for name, count in counts.items()}
    slack = {name: max(SLACK_OF_SPLITS, math.ceil(1000 * (part - 1))) for name, part in most.items()}
    return {"nonzeros": SLACK, "vertices": SLACK, **slack}


def metis_memory(num_vertices: int, num_stored: int, symmetric: bool, num_constraints: int = 1) -> MetisMemory:
    """Return the memory of `metis` at its peak. METIS holds the graph again at each of its levels, in 8-byte integers.

    Its share was measured with pymetis 2025.2: 42 to 60 bytes per entry of meshes, citations and web pages,
    50 to 89 of social networks, 116 to 140 of R-MAT graphs, whose coarser graphs keep most of the edges.
    """
    entries = num_stored if symmetric else 2 * num_stored
    own = {
        "row pointers, weights and parts": (24 + 8 * num_constraints) * num_vertices,
        "adjacency": 8 * entries * (1 if symmetric else 2),
        "blocks": 48 * min(BLOCK, entries),
        "second process": 64 << 20,
    }
    beside = num_constraints - 1
    least, most = 50 + 8 * beside, 400 + 24 * beside  # the weights of coarser graphs, down to half and a third as large
    return MetisMemory(own, 32 * entries + least * num_vertices, 128 * entries + most * num_vertices)


def require_pymetis() -> None:
    """Check that pymetis is installed. Raises: BackendError that says how to install it."""
    if importlib.util.find_spec("pymetis") is None:
        raise BackendError('--kind metis needs pymetis, which is not installed; pip install "mggcn[metis]"')


def metis(graph: Graph, settings: MetisSettings) -> EdgeCut:
    """Cut a graph: parts of about equal nonzeros (and more, as settings.kind says) with few edges between them.

    METIS is given A + A^T without self-loops, an edge weighing the number of stored edges that it stands for, and a
    vertex the nonzeros of its rows of A^T and of A (once if they are the same), self-loops included. Parts differ in
    their number of rows, and also in work where a hub alone weighs more than a part; P >= N gives every vertex a part
    of its own. Cost: a sweep over adj (and adj_t), METIS in a process of its own, then the statistics; memory as
    `metis_memory` says. Raises: BackendError without pymetis; PlanError if METIS fails, which it does when memory runs
    out. Source: Karypis and Kumar 1998, k-way, and their "Multilevel algorithms for multi-constraint graph partitioning",
    SC 1998; constraints: Zheng et al., DistDGL, IA3 2020; why not the variants: docs/notes/0010-metis.md.
    """
    require_pymetis()
    return edge_cut(graph, _parts(graph, settings), settings.parts)


def halved(graph: Graph, settings: MetisSettings, halvings: int) -> npt.NDArray[np.int64]:
    """Return the number of every vertex's leaf (N,): METIS's parts, each cut into halves, and those again.

    There are parts times 2^halvings. Leaves with consecutive numbers are near each other, so that the parts of other
    numbers of ranks are ranges of them.
    Cost, errors: as `metis`, and METIS on every part for each halving.
    """
    require_pymetis()
    if settings.parts >= graph.num_vertices:
        return np.arange(graph.num_vertices) << halvings
    return _solved(graph, settings, halvings)


def _parts(graph: Graph, settings: MetisSettings) -> npt.NDArray[np.uint16]:
    """Return the part of every vertex (N,)."""
    if settings.parts == 1:
        return np.zeros(graph.num_vertices, np.uint16)
    if settings.parts >= graph.num_vertices:
        return np.arange(graph.num_vertices, dtype=np.uint16)
    return _solved(graph, settings, 0).astype(np.uint16)


def _solved(graph: Graph, settings: MetisSettings, halvings: int) -> npt.NDArray[np.int64]:
    entries = graph.adj.nnz if graph.symmetric else graph.adj.nnz + graph.adj_t.nnz
    even = constraints(graph, settings)
    problem = new_problem(graph.num_vertices, entries, tuple(even.values()), weighted=not graph.symmetric)
    try:
        fill(problem, graph)
        problem.vertex_weights[:, 1:2] = 1
        for place, mask in enumerate(first_splits(graph).values() if len(even) > 1 else (), start=2):
            problem.vertex_weights[:, place] = mask
        solve(problem, settings.parts, settings.seed, halvings)
    finally:
        os.close(problem.descriptor)
    return problem.part


def fill(problem: Problem, graph: Graph) -> None:
    """Write A + A^T without self-loops, its weights and the nonzeros of the vertices, their first weight."""
    filled = 0
    for first, block in _blocks(graph):
        rows = np.repeat(np.arange(block.shape[0]), np.diff(block.indptr))
        kept = block.indices != rows + first
        rows, count = rows[kept], int(kept.sum())
        stop = first + block.shape[0]
        degree = np.bincount(rows, minlength=block.shape[0])
        problem.indptr[first + 1 : stop + 1] = filled + np.cumsum(degree)
        problem.indices[filled : filled + count] = block.indices[kept]
        if problem.edge_weights is None:
            problem.vertex_weights[first:stop, 0] = degree + 1
        else:
            weights = block.data[kept]
            problem.edge_weights[filled : filled + count] = weights
            problem.vertex_weights[first:stop, 0] = np.bincount(rows, weights, block.shape[0]) + 2
        filled += count


def _blocks(graph: Graph) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows of A + A^T as SciPy CSR with small integers), some BLOCK entries at a time, or one row."""
    ends = graph.adj.read_pointers(0, graph.num_vertices + 1)
    if not graph.symmetric:
        ends += graph.adj_t.read_pointers(0, graph.num_vertices + 1)
    low = 0
    while low < graph.num_vertices:
        # A row of zero entries costs a pointer.
        high = int(np.searchsorted(ends, ends[low] + BLOCK, side="right")) - 1
        high = min(max(high, low + 1), low + BLOCK, graph.num_vertices)
        block = _pattern(graph.adj, low, high)
        yield low, block if graph.symmetric else block + _pattern(graph.adj_t, low, high)
        low = high


def _pattern(matrix: CSR, low: int, high: int) -> Any:
    """Return rows [low, high) as SciPy CSR of ones."""
    indptr = matrix.read_pointers(low, high + 1)
    indices = matrix.read_columns(int(indptr[0]), int(indptr[-1]))
    return sp.csr_matrix(
        (np.ones(indices.shape[0], np.int8), indices, indptr - indptr[0]), (high - low, matrix.num_cols)
    )
