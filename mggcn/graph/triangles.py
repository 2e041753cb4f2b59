"""Degrees and clustering of a graph, taken as undirected: how many triangles every vertex is in, counted exactly.

N vertices, E undirected edges, K distinct degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.csr import CSR, Array, Graph, rows_with_loops, windows
from mggcn.graph.edges import Edges, of_matrix
from mggcn.graph.options import GraphOptions
from mggcn.graph.structure import build_adjacency

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DegreeProfile:
    """Vertices and mean clustering coefficient by degree: the input of BTER.

    degrees int64 (K,), rising; counts int64 (K,), vertices of each; clustering float64 (K,): the share of the pairs of
    neighbours of a vertex that an edge joins, on average over the vertices of a degree; 0 below degree 2.
    """

    degrees: Ints
    counts: Ints
    clustering: npt.NDArray[np.float64]

    @property
    def num_vertices(self) -> int:
        return int(self.counts.sum())


def degree_profile(graph: Graph, room: Room = IN_MEMORY) -> DegreeProfile:
    """Return the degrees of a graph and the clustering by degree, of its edges without direction. Cost: as `triangles`."""
    adj = undirected(graph, room)
    found = np.diff(adj.indptr.array())
    degrees, which, counts = np.unique(found, return_inverse=True, return_counts=True)
    closed = np.bincount(which, weights=triangles(adj), minlength=degrees.size)
    pairs = counts * (degrees * (degrees - 1) / 2)
    return DegreeProfile(degrees, counts, np.divide(closed, pairs, out=np.zeros(degrees.size), where=pairs > 0))


def is_undirected(graph: Graph) -> bool:
    """Return whether `undirected` takes a graph's edges as they are. Cost: a read of the edges at most."""
    return graph.symmetric and not graph.num_relations and not rows_with_loops(graph.adj)


def undirected(graph: Graph, room: Room = IN_MEMORY) -> CSR:
    """Return the pattern of a graph as of an undirected one: an entry where there is an edge in either direction.

    Self-loops, weights, relations and parallel edges are left out. Cost: a read of the edges if the graph is symmetric and
    has no self-loops and relations, else that of `build_adjacency` in the room.
    """
    if is_undirected(graph):
        return CSR(graph.adj.indptr, graph.adj.indices, None, graph.num_vertices)
    edges = of_matrix(graph.adj)
    options = GraphOptions(symmetrize=True, self_loops="drop", duplicates="merge")
    built, _ = build_adjacency(Edges(edges.src, edges.dst), graph.num_vertices, options, room=room)
    return built.adj


def triangles(adj: CSR) -> Ints:
    """Count the triangles that each vertex is in, int64 (N,).

    adj: as `undirected` returns it. Cost: E sqrt(2 E) reads at most, on one thread; `triangle_nbytes`.
    Source: Schank and Wagner 2005, the forward algorithm.
    """
    num_vertices, pointers = adj.num_rows, adj.read_pointers(0, adj.num_rows + 1)
    degrees = np.diff(pointers)
    # Half of it is filled, and only that is resident; all of it if a damaged store is not as symmetric as it says.
    later = np.empty(adj.nnz, np.int32)
    counts, filled = np.zeros(num_vertices, np.int64), 0
    for rows, _, first, stop in windows(adj):
        cols = adj.read_columns(first, stop).astype(np.int64)
        of_rows, of_cols = degrees[rows], degrees[cols]
        keep = (of_cols > of_rows) | ((of_cols == of_rows) & (cols > rows))
        rows, cols = rows[keep], cols[keep]
        later[filled : filled + cols.size] = cols
        if rows.size:
            counts[rows[0] : rows[-1] + 1] += np.bincount(rows - rows[0])
        filled += cols.size
    starts: Array = np.zeros(num_vertices + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    mark, found = np.full(num_vertices, -1, np.int32), np.zeros(num_vertices, np.int64)
    native.kernel("mggcn_triangles")(
        starts.ctypes.data, later.ctypes.data, num_vertices, mark.ctypes.data, found.ctypes.data
    )
    return found


def triangle_nbytes(num_vertices: int, num_entries: int) -> int:
    """Return the memory of `triangles`, beside the graph and a window: entries in both directions."""
    return 2 * num_entries + 44 * num_vertices
