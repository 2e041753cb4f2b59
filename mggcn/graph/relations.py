"""From a list of edges with types to sorted adjacencies: an edge is (source, target, type).

Shapes: N vertices, E edges, R relations. Types tell parallel edges apart. The reverse that `symmetrize` adds to an edge has
the edge's type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, Array, ArrayRows
from mggcn.graph.structure import Adjacency, GraphOptions, check_edges

MAX_RELATIONS = 1 << 16


def check_types(types: Any, num_edges: int, num_relations: int | None) -> tuple[Array, int]:
    """Return the types [E] as the least unsigned integers that hold them, and R.

    Raises: GraphError for types of another length, other numbers than whole ones in 0 .. R - 1, or R beyond 65,536.
    """
    array = np.asarray(types)
    if array.shape != (num_edges,) or array.dtype.kind not in "iu":
        raise GraphError(
            f"edge types must be whole numbers of shape [{num_edges}], one for each edge, got {array.dtype} of shape "
            f"{array.shape}; number relations first (numpy.unique(names, return_inverse=True) does)"
        )
    lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, -1)
    relations = highest + 1 if num_relations is None else num_relations
    if lowest < 0 or highest >= relations or not 1 <= relations <= MAX_RELATIONS:
        raise GraphError(
            f"edge types must lie in 0 .. num_relations - 1, at most {MAX_RELATIONS:,} of them, got {lowest} to {highest} "
            f"for {relations} relations; number them from 0 without gaps"
        )
    return array.astype(np.uint8 if relations <= 256 else np.uint16), relations


def typed_adjacency(
    edges: Array, types: Array, weights: Array | None, num_vertices: int, options: GraphOptions, origin: str = ""
) -> Adjacency:
    """Sort edges with types into both adjacencies, as `build_adjacency` does without: duplicates agree in their type, too.

    Shapes: edges integers [2, E]; types [E] as `check_types` returns them; weights [E] or None. Both directions are stored,
    since degrees are those of destinations. Cost: three sorts of E edges.
    Raises: GraphError as `build_adjacency`; for added self-loops, which would have no type.
    """
    check_edges(edges, weights, num_vertices, origin)
    if options.self_loops == "add":
        raise GraphError(
            "self-loops that are added to typed edges would have no type; leave them out (a model of relations has a "
            "weight for the vertex itself), or list them with a type of their own"
        )
    src, dst = edges[0].astype(np.int64), edges[1].astype(np.int64)
    values = None if weights is None else weights.astype(np.float64)
    if options.self_loops == "drop":
        proper = src != dst
        src, dst, types = src[proper], dst[proper], types[proper]
        values = None if values is None else values[proper]
    num_listed = src.size
    if options.duplicates == "error":
        _reduced(src, dst, types, values, "error")
    if options.symmetrize:
        # Reduced on one triangle and then mirrored, as without types.
        src, dst, types, values = _reduced(
            np.minimum(src, dst), np.maximum(src, dst), types, values, options.duplicates
        )
        num_merged, proper = num_listed - src.size, src != dst
        src, dst = np.concatenate([src, dst[proper]]), np.concatenate([dst, src[proper]])
        types = np.concatenate([types, types[proper]])
        values = None if values is None else np.concatenate([values, values[proper]])
        src, dst, types, values = _reduced(src, dst, types, values, "sum")
    else:
        src, dst, types, values = _reduced(src, dst, types, values, options.duplicates)
        num_merged = num_listed - src.size
    degrees = _type_degrees(dst, types, values)
    if values is not None and (values == 1.0).all():
        values = None
    single = None if values is None else _single(values)
    adj = _csr(src, dst, types, single, degrees, num_vertices)
    order = np.lexsort((types, src, dst))
    single_t = None if single is None else single[order]
    adj_t = _csr(dst[order], src[order], types[order], single_t, degrees[order], num_vertices)
    return Adjacency(adj, adj_t, num_merged)


def _reduced(
    src: Array, dst: Array, types: Array, values: Array | None, duplicates: str
) -> tuple[Array, Array, Array, Array | None]:
    """Sort by source, target and type, and make one edge of equal ones."""
    order = np.lexsort((types, dst, src))
    src, dst, types = src[order], dst[order], types[order]
    values = None if values is None else values[order]
    fresh = np.ones(src.size, bool)
    fresh[1:] = (np.diff(src) != 0) | (np.diff(dst) != 0) | (types[1:] != types[:-1])
    if fresh.all():
        return src, dst, types, values
    starts, again = np.flatnonzero(fresh), np.flatnonzero(~fresh)
    differing = again if values is None else again[values[again] != values[again - 1]]
    if duplicates == "error" or (duplicates == "merge" and values is not None and differing.size):
        at = int((again if duplicates == "error" else differing)[0])
        what = "repeats" if duplicates == "error" else "is listed with different weights"
        raise GraphError(
            f"edge {src[at]} -> {dst[at]} of type {types[at]} {what}; "
            'choose duplicates="sum" (--duplicates sum), which adds up weights, or list it once'
        )
    if duplicates == "sum":
        counts = np.diff(starts, append=src.size).astype(np.float64)
        values = counts if values is None else np.add.reduceat(values, starts)
    elif values is not None:
        values = values[starts]
    return src[starts], dst[starts], types[starts], values


def _type_degrees(dst: Array, types: Array, values: Array | None) -> npt.NDArray[np.float32]:
    """For every edge the weights of its destination's in-edges of its type, summed."""
    order = np.lexsort((types, dst))
    v, t = dst[order], types[order]
    fresh = np.ones(v.size, bool)
    fresh[1:] = (np.diff(v) != 0) | (t[1:] != t[:-1])
    group = np.cumsum(fresh) - 1
    sums = np.bincount(group, None if values is None else values[order])
    degrees = np.empty(v.size, np.float32)
    degrees[order] = sums[group]
    return degrees


def _single(values: Array) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if not np.isfinite(single).all():
        raise GraphError(f"edge weights up to {np.abs(values).max():g} overflow float32 (3.4e38); scale them down")
    return single


def _csr(rows: Array, cols: Array, types: Array, values: Array | None, degrees: Array, num_vertices: int) -> CSR:
    indptr = np.zeros(num_vertices + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_vertices), out=indptr[1:])
    return CSR(
        ArrayRows(indptr),
        ArrayRows(cols.astype(np.int32)),
        None if values is None else ArrayRows(values),
        num_vertices,
        types=ArrayRows(types),
        type_degrees=ArrayRows(degrees),
    )
