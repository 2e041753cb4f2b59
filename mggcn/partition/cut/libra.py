"""Libra (Xie et al. 2014; DistGNN, section 5.1): a vertex cut in one greedy pass over the edges.

N vertices, E stored edges, M cut edges, P parts, W = ceil(P / 64).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.partition import sweep as sweeping
from mggcn.partition.cut.vertex_cut import CutStatistics, VertexCut, num_words, part_dtype
from mggcn.partition.order import MAX_PARTS
from mggcn.partition.sweep import sweep

EdgeOrder = Literal["shuffled", "stored"]
PERCENT = 101
"""No part takes more edges than this share of the average, or the average rounded up."""
ROW_STEP = 16
"""Edges between two entries of `_CutEdges.row_at`: kRowStep of cpu/libra.cpp."""
BLOCK = 1 << 22
"""Edges between two checks for Ctrl-C: under a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraSettings:
    """Settings that determine a cut: with the same graph, the same bits."""

    parts: int
    """Number of parts P, in 1 .. 1024."""
    seed: int = 1
    """Seed of the order of the edges, of ties and of the owners."""
    edges: EdgeOrder = "shuffled"
    """The order in which edges are dealt: shuffled by the seed, or as stored."""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_PARTS:
            raise ConfigError(f"a vertex cut has 1 to {MAX_PARTS} parts, got {self.parts}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed of a vertex cut must lie in 0 .. 2^63 - 1, got {self.seed}")
        if self.edges not in get_args(EdgeOrder):
            raise ConfigError(f"the order of the edges must be shuffled or stored, got {self.edges!r}")

    @property
    def name(self) -> str:
        """Name of the cut's folder."""
        return f"libra-{self.parts}-{self.seed}-{self.edges}"


def libra_nbytes(num_vertices: int, num_stored: int, symmetric: bool, num_parts: int) -> dict[str, int]:
    """Return the bytes that `libra` holds at its peak, by purpose; a row of more than 2 M entries comes on top.

    The peak lies where edges are dealt or where the part of every stored edge is written out.
    """
    num_cut = num_stored // 2 if symmetric else num_stored
    size = np.dtype(part_dtype(num_parts)).itemsize
    # glibc keeps the buffers of a sweep when it is over.
    buffers = 4 * min(2 * sweeping.EDGES, num_stored) + 16 * min(sweeping.ROWS, num_vertices)
    always = {"row pointers": 8 * (num_vertices + 1), "sweep buffers": buffers}
    cut = {"cut edges": 4 * num_cut + 4 * (num_cut // ROW_STEP + 2), "degrees": 4 * num_vertices}
    result = {"part sets": 8 * num_words(num_parts) * num_vertices, "parts of cut edges": size * num_cut}
    written = {"owners": 2 * num_vertices, "parts of stored edges": size * num_stored * (1 if symmetric else 2)}
    return always | result | max(cut, written, key=lambda phase: sum(phase.values()))


def libra(graph: Graph, settings: LibraSettings) -> VertexCut:
    """Cut a graph: each {u, v} once if it is symmetric, else every stored edge; self-loops are not cut.

    An edge goes to the least loaded of the parts that its ends share; else of the parts of the end with fewer edges;
    else of the parts of the one end that has any; else of all. A part that has PERCENT of the average takes no more and
    counts nowhere, so without that limit at work this is plain Libra. Parallel edges, of several relations, go where the
    first of them goes, whatever the limit. The seed decides ties of loads and degrees, and which of a vertex's parts owns
    it. Isolated vertices even out the rows of the parts. Cost: a sweep over adj, a random pass over its edges, a sweep
    over adj (and adj_t); memory as `libra_nbytes` says. Raises: GraphError if a graph without a transpose is not
    symmetric.
    """
    adj = replace(graph.adj, values=None)
    cut = _cut_edges(adj, graph.symmetric)
    parts, edge_part, load = _deal(cut, settings, typed=graph.num_relations > 0)
    start = cut.start
    del cut
    owner, statistics = _owners(parts, load, settings)

    def store_order(matrix: CSR, kind: _Matrix) -> ArrayRows:
        return ArrayRows(_edge_parts(matrix, kind, start, edge_part, owner))

    if graph.symmetric:
        forward = backward = store_order(adj, _Matrix.SYMMETRIC)
    else:
        forward = store_order(adj, _Matrix.ROWS)
        backward = store_order(replace(graph.adj_t, values=None), _Matrix.TRANSPOSED)
    return VertexCut(
        num_parts=settings.parts,
        parts=parts,
        owner=owner,
        edge_part=forward,
        edge_part_t=backward,
        statistics=statistics,
    )


class _Matrix(IntEnum):
    """`Matrix` of cpu/vertex_cut.cpp."""

    ROWS = 0
    SYMMETRIC = 1
    TRANSPOSED = 2


@dataclass(frozen=True, slots=True)
class _CutEdges:
    """Edges by row: start int64 (N + 1,), dst int32 (M,), row_at int32: row of edge 16 j, degree uint32 (N,)."""

    start: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int32]
    row_at: npt.NDArray[np.int32]
    degree: npt.NDArray[np.uint32]
    num_edges: int


def _cut_edges(adj: CSR, symmetric: bool) -> _CutEdges:
    """Read the edges. What is allocated beyond M entries is never touched, so it costs no memory."""
    start = np.zeros(adj.num_rows + 1, np.int64)
    dst = np.empty(adj.nnz, np.int32)
    row_at = np.empty(adj.nnz // ROW_STEP + 2, np.int32)
    degree = np.zeros(adj.num_rows, np.uint32)
    addresses = (a.ctypes.data for a in (start, dst, row_at, degree))
    found = native.CutEdgesArgs(*addresses, 0, 0)
    kernel = native.kernel("mggcn_libra_edges")
    for chunk in sweep(adj):
        pointers = (chunk.indptr.ctypes.data, chunk.indices.ctypes.data)
        kernel(*pointers, chunk.first, chunk.rows, int(symmetric), ctypes.byref(found))
    if symmetric and 2 * found.num_edges + found.num_loops != adj.nnz:
        raise GraphError("the graph has no transpose but is not symmetric; prepare it again")
    row_at[-(-found.num_edges // ROW_STEP)] = max(adj.num_rows - 1, 0)
    return _CutEdges(start, dst, row_at, degree, found.num_edges)


def _deal(
    cut: _CutEdges, settings: LibraSettings, *, typed: bool
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[Any], list[int]]:
    """Return the part sets of the vertices, the part of each cut edge, and the edges of each part."""
    num_edges, num_parts = cut.num_edges, settings.parts
    words = num_words(num_parts)
    parts = np.zeros((cut.degree.shape[0], words), np.uint64)
    edge_part = np.empty(num_edges, part_dtype(num_parts))
    load = np.zeros(num_parts, np.int64)
    opened = np.array([min(2**64, 1 << num_parts - 64 * word) - 1 for word in range(words)], np.uint64)
    arrays = (cut.start, cut.dst, cut.row_at, cut.degree, parts, edge_part, load, opened)
    arguments = native.LibraArgs(
        *(a.ctypes.data for a in arrays),
        num_edges,
        edge_limit(num_edges, num_parts),
        settings.seed,
        words,
        int(edge_part.itemsize == 2),
        int(settings.edges == "shuffled"),
        int(typed),
    )
    kernel = native.kernel("mggcn_libra_assign")
    # A shuffled order is a permutation of the first power of two from M on.
    shuffled = settings.edges == "shuffled" and num_edges
    positions = 1 << max(1, (num_edges - 1).bit_length()) if shuffled else num_edges
    for first in range(0, positions, BLOCK):
        kernel(ctypes.byref(arguments), first, min(first + BLOCK, positions))
    return parts, edge_part, [int(count) for count in load]


def edge_limit(num_edges: int, num_parts: int) -> int:
    """Return the most edges that a part may take."""
    return max(-(-num_edges // num_parts), PERCENT * num_edges // (100 * num_parts))


def _owners(
    parts: npt.NDArray[np.uint64], load: list[int], settings: LibraSettings
) -> tuple[npt.NDArray[np.uint16], CutStatistics]:
    """Draw the owner of every vertex; isolated vertices join the parts with the fewest rows."""
    num_vertices, words = parts.shape
    owner = np.empty(num_vertices, np.uint16)
    rows = np.zeros(settings.parts, np.int64)
    totals = np.zeros(3, np.int64)
    pointers = (parts.ctypes.data, num_vertices, words)
    native.kernel("mggcn_cut_roots")(*pointers, settings.seed, owner.ctypes.data, rows.ctypes.data, totals.ctypes.data)
    connected, copies, split = (int(total) for total in totals)
    more = fill_up(rows, num_vertices - connected)
    if connected < num_vertices:
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(more)])
        native.kernel("mggcn_cut_isolated")(
            *pointers, bounds.ctypes.data, settings.parts, settings.seed, owner.ctypes.data
        )
    held = tuple(int(count) for count in rows + more)
    return owner, CutStatistics(connected, copies, split, tuple(load), held)


def fill_up(rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return how many of `count` further rows each part takes, so that the smallest parts have as many as possible."""
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    # Rows that raise the first k + 1 parts to the level of the last of them; beyond `count` that level is too high.
    needed = np.arange(1, rows.shape[0] + 1) * ascending - np.cumsum(ascending)
    filled = int((needed <= count).sum())
    level, rest = divmod(int(ascending[:filled].sum()) + count, filled)
    more = np.zeros_like(rows)
    more[order[:filled]] = level - ascending[:filled]
    more[order[:rest]] += 1
    return more


def _edge_parts(
    matrix: CSR, kind: _Matrix, start: npt.NDArray[np.int64], edge_part: npt.NDArray[Any], owner: npt.NDArray[np.uint16]
) -> npt.NDArray[Any]:
    """Return the part of every entry of a matrix, in its order; `start` is overwritten unless `kind` is ROWS."""
    out = np.empty(matrix.nnz, edge_part.dtype)
    kernel = native.kernel("mggcn_cut_edge_parts")
    wide, done = int(out.itemsize == 2), 0
    for chunk in sweep(matrix):
        pointers = (chunk.indptr.ctypes.data, chunk.indices.ctypes.data)
        target = out.ctypes.data + done * out.itemsize
        places = (start.ctypes.data, edge_part.ctypes.data, wide, owner.ctypes.data, target)
        kernel(*pointers, chunk.first, chunk.rows, int(kind), *places)
        done += chunk.indices.shape[0]
    return out
