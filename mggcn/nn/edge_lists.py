"""Edges on the host, by destination: from a Graph, an edge list in its own order, or rows of an adjacency.

Shapes: N vertices, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.csr import Array, Graph, falls
from mggcn.graph.options import DEFAULT_OPTIONS
from mggcn.graph.structure import check_job, edges_of
from mggcn.graph.vertex_data import to_numpy

MAX_IDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EdgeLists:
    """Sources by destination, ascending; repeated edges keep their order.

    indptr int64 (N + 1,), sources int32 (E,), given int32 (E,): the original position of each edge, or None if the
    order is the original one; weights float32 (E,) or None; symmetric: the edges are their own reverses, each once.
    """

    indptr: Array
    sources: Array
    given: Array | None = None
    weights: Array | None = None
    symmetric: bool = False


def of_graph(graph: Any) -> EdgeLists:
    """Return the edges of a Graph, parallel ones as often as they were listed. Cost: a copy.

    Raises: GraphError if `graph` is not a Graph, or is damaged.
    """
    if not isinstance(graph, Graph):
        raise GraphError(
            f"expected a graph from mggcn.load(...), got {type(graph).__name__}; for edges of shape (2, E) use "
            "DeviceGraph.from_edges, for CSR row pointers and columns DeviceGraph.from_csr"
        )
    adj = graph.adj_t
    weights = None if adj.values is None else adj.values.read(0, adj.nnz)
    indptr, sources = adj.read_pointers(0, adj.num_rows + 1), adj.read_columns(0, adj.nnz)
    if graph.repeats == "counted" and weights is not None:
        counts = weights.astype(np.int64)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        indptr, sources, weights = ends[indptr], np.repeat(sources, counts), None
    return EdgeLists(indptr, sources, None, weights, graph.symmetric)


def of_edges(edges: Any, num_vertices: int | None) -> EdgeLists:
    """Return the edges of a list (2, E), row 0 the sources. Cost: a sort of E keys of 8 bytes. Raises: GraphError."""
    pairs = np.asarray(to_numpy(edges))
    pairs = pairs if pairs.size else np.empty((2, 0), np.int64)
    columns = edges_of(pairs)
    survey = columns.survey()
    num_vertices = survey.highest + 1 if num_vertices is None else num_vertices
    check_job(columns, survey, num_vertices, None, DEFAULT_OPTIONS)
    if pairs.shape[1] > MAX_IDS:
        raise GraphError(f"an edge list may have at most {MAX_IDS} edges, got {pairs.shape[1]}; use mggcn.load")
    source, destination = (row.astype(np.int64) for row in pairs)
    order = np.argsort(destination * num_vertices + source, kind="stable")
    indptr = np.zeros(num_vertices + 1, np.int64)
    np.cumsum(np.bincount(destination, minlength=num_vertices), out=indptr[1:])
    return EdgeLists(indptr, source[order].astype(np.int32), order.astype(np.int32))


def of_csr(indptr: Any, indices: Any) -> EdgeLists:
    """Return the edges u -> indices[k] for k in indptr[u] ... indptr[u + 1]. Cost, raises: as `of_edges`."""
    starts, ends = np.asarray(to_numpy(indptr)), np.asarray(to_numpy(indices))
    ends = ends if ends.size else np.empty(0, np.int64)
    for name, array in (("indptr", starts), ("indices", ends)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise GraphError(f"{name} must be integers of one dimension, got {array.dtype} of shape {array.shape}")
    starts = starts.astype(np.int64)
    if starts.size == 0 or starts[0] != 0 or starts[-1] != ends.size or falls(starts).any():
        raise GraphError(
            f"indptr must rise from 0 to the number of indices, {ends.size}; got {starts.size} numbers from "
            f"{starts[:1]} to {starts[-1:]}; give where each row begins, and the end"
        )
    sources = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    return of_edges(np.stack([sources, ends.astype(np.int64)]), starts.size - 1)


def by_source(indptr: Array, sources: Array) -> tuple[Array, Array, Array]:
    """Return row pointers, destinations and places in the destinations' rows of the same edges grouped by source.

    Shapes: indptr int64 (N + 1,), sources int32 (E,); int64 (N + 1,), int32 (E,), int32 (E,). In a row destinations
    ascend, repeated edges in their order. Cost: a counting sort, 24 E bytes.
    """
    num_vertices = indptr.size - 1
    place = np.arange(sources.size, dtype=np.int64) - np.repeat(indptr[:-1], np.diff(indptr))
    # SciPy moves entries column by column in order of rows: stable, and repeated edges stay apart.
    rows = sp.csr_array((place.astype(np.int32), sources, indptr), shape=(num_vertices, num_vertices)).tocsc()
    return rows.indptr.astype(np.int64), rows.indices.astype(np.int32), rows.data
