"""Figures of a graph that take a pass over its edges: degrees, components, homophily.

Shapes: N vertices, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from mggcn.graph.csr import CSR, WINDOW, Array, Graph, windows

EDGES = 1 << 24
"""Edges that are joined into components at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphProfile:
    """Result of `profile`."""

    out_degrees: tuple[int, ...]
    """Vertices by degree: of degree 0, of 1, of 2 and 3, of 4 to 7, and so on."""
    in_degrees: tuple[int, ...]
    """Likewise; the same for symmetric graphs."""
    max_out_degree: int
    max_in_degree: int
    num_components: int
    """Weakly connected components, a vertex without edges being one."""
    largest_component: int
    """Vertices of the largest one."""
    homophily: float | None
    """Share of edges that join vertices of one class, among those whose ends are labelled; None without such edges."""
    adjusted_homophily: float | None
    """The same less what chance gives, over the most that is possible (Platonov et al. 2023, eq. 2); 0 by chance."""


def profile(graph: Graph) -> GraphProfile:
    """Look at all edges. Cost: two passes over the edges in windows of bounded size; 16 N bytes and some windows."""
    out_degrees, max_out = _degrees(graph.adj)
    in_degrees, max_in = (out_degrees, max_out) if graph.symmetric else _degrees(graph.adj_t)
    sizes = np.bincount(_components(graph.adj)) if graph.num_vertices else np.zeros(1, np.int64)
    edge, adjusted = _homophily(graph)
    return GraphProfile(
        out_degrees=out_degrees,
        in_degrees=in_degrees,
        max_out_degree=max_out,
        max_in_degree=max_in,
        num_components=int(np.count_nonzero(sizes)),
        largest_component=int(sizes.max()),
        homophily=edge,
        adjusted_homophily=adjusted,
    )


def _degrees(adj: CSR) -> tuple[tuple[int, ...], int]:
    """Count vertices by the number of bits of their degree; return the largest degree, too."""
    counts, highest = np.zeros(65, np.int64), 0
    for start in range(0, adj.num_rows, WINDOW):
        degrees = np.diff(adj.read_pointers(start, min(start + WINDOW, adj.num_rows) + 1))
        # The exponent of d = m 2^e with 0.5 <= m < 1 is the number of bits of d, exactly: degrees stay below 2^53.
        counts += np.bincount(np.frexp(degrees.astype(np.float64))[1], minlength=65)
        highest = max(highest, int(degrees.max()))
    used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    return tuple(counts[:used].tolist()), highest


def _components(adj: CSR) -> Array:
    """Return the number of each vertex's weakly connected component, int32 (N,): windows of edges join those found."""
    found = np.arange(adj.num_rows, dtype=np.int32)
    for rows, cols, _, _ in windows(adj, EDGES):
        size = int(found.max()) + 1
        joined = sp.coo_array((np.ones(rows.size, np.int8), (found[rows], found[cols])), shape=(size, size))
        found = connected_components(joined, directed=False)[1][found]
    return found


def _homophily(graph: Graph) -> tuple[float | None, float | None]:
    if graph.labels is None or graph.task != "classes":
        return None, None
    labels = graph.labels.read(0, graph.num_vertices)
    same, sources, targets = 0, np.zeros(graph.num_classes, np.int64), np.zeros(graph.num_classes, np.int64)
    for rows, cols, _, _ in windows(graph.adj):
        left, right = labels[rows], labels[cols]
        known = (left >= 0) & (right >= 0)
        left, right = left[known], right[known]
        same += int(np.count_nonzero(left == right))
        sources += np.bincount(left, minlength=graph.num_classes)
        targets += np.bincount(right, minlength=graph.num_classes)
    count = int(sources.sum())
    if not count:
        return None, None
    chance = float((sources / count) @ (targets / count))
    edge = same / count
    return edge, (edge - chance) / (1 - chance) if chance < 1 else None
