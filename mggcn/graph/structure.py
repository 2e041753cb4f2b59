"""From a list of edges to sorted adjacencies: symmetrize, merge duplicates, treat self-loops, in this order.

An edge (u, v) is the key u * N + v, so sorting keys sorts by row, then by column. Shapes: N vertices, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError, GraphError
from mggcn.graph.check import MAX_VERTICES
from mggcn.graph.csr import CSR, Array, ArrayRows, windows
from mggcn.graph.pairs import Keys, csr_from_keys

Weights = npt.NDArray[np.float64]
Duplicates = Literal["auto", "merge", "sum", "error"]
SelfLoops = Literal["keep", "drop", "add"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOptions:
    """How a source becomes a graph: the `options` of `load`."""

    symmetrize: bool = False
    """Add the reverse of every edge. Off: the graph stays directed, unless the source lists both directions."""
    duplicates: Duplicates = "auto"
    """Repeated edges: "merge" keeps one (their weights must agree), "sum" adds up their weights (1 each if unweighted),
    "error" refuses them. "auto" sums in PyG's and DGL's graphs, which count them, and merges in all other sources, and with
    `symmetrize`, as PyG's to_undirected does. With `symmetrize` the reverse of an edge counts as a
    repetition for "sum", not for "error"."""
    self_loops: SelfLoops = "keep"
    """Keep self-loops as they are, drop them, or add the missing ones with weight 1."""
    row_normalize: bool = False
    """Divide the features of each vertex by the sum of their absolute values; empty rows stay zero."""

    def __post_init__(self) -> None:
        for name, known in [("duplicates", get_args(Duplicates)), ("self_loops", get_args(SelfLoops))]:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def resolved(self, counted: bool = False) -> GraphOptions:
        """Return the options with what `auto` stands for; counted: the source counts repeated edges."""
        if self.duplicates != "auto":
            return self
        return replace(self, duplicates="sum" if counted and not self.symmetrize else "merge")


DEFAULT_OPTIONS = GraphOptions()


class Adjacency(NamedTuple):
    """Both directions of a graph, one object if pattern and values are symmetric."""

    adj: CSR
    adj_t: CSR
    num_merged: int
    """Listed edges that became one with an equal edge; with `symmetrize`, with its reverse, too."""


def build_adjacency(
    edges: Array, weights: Array | None, num_vertices: int, options: GraphOptions, origin: str = ""
) -> Adjacency:
    """Sort an edge list into both adjacencies; `origin` says what set the number of vertices, if not the caller.

    Shapes: edges integers [2, E], row 0 the sources; weights [E] or None. All weights 1 is the same as no weights.
    Cost: some sorts of E keys of 8 bytes; weights double that.
    Raises: GraphError on ids outside [0, N), weights of another length or not finite, or duplicates as `options` say.
    """
    check_edges(edges, weights, num_vertices, origin)
    src, dst = edges[0].astype(np.int64), edges[1].astype(np.int64)
    values = None if weights is None else weights.astype(np.float64)
    if options.self_loops == "drop":
        proper = src != dst
        src, dst, values = src[proper], dst[proper], None if values is None else values[proper]
    keys = src * num_vertices + dst
    if options.duplicates == "error":
        _refuse_duplicates(keys, num_vertices)
    if options.symmetrize:
        # Reduced on one triangle and then mirrored, so that sums agree in both directions to the last bit.
        keys = np.minimum(src, dst) * num_vertices + np.maximum(src, dst)
    num_listed = keys.size
    keys, values = _reduce(keys, values, num_vertices, options.duplicates)
    num_merged = num_listed - keys.size
    if options.symmetrize:
        keys, values = _mirror(keys, values, num_vertices)
    if options.self_loops == "add":
        keys, values = _add_self_loops(keys, values, num_vertices)
    return Adjacency(*_both_directions(keys, values, num_vertices), num_merged)


def edge_list(adj: CSR) -> tuple[Array, Array | None]:
    """Return edges int64 [2, E] in row order and weights [E] or None. Cost: 20 bytes an edge."""
    edges = np.empty((2, adj.nnz), dtype=np.int64)
    for rows, cols, first, stop in windows(adj):
        edges[0, first:stop], edges[1, first:stop] = rows, cols
    return edges, None if adj.values is None else adj.values.array()


NAMED = '; in Python, ids= names the rows, and ids="edges" numbers ids with gaps'


def check_edges(edges: Array, weights: Array | None, num_vertices: int, origin: str = "") -> None:
    """Check shape, type and range of an edge list from outside; raises GraphError.

    origin: what set the number of vertices, for the message.
    """
    if not 1 <= num_vertices <= MAX_VERTICES:
        todo = (
            f"number them from 0 without gaps{NAMED}"
            if num_vertices > 1
            else "give num_vertices (--vertices) or an edge"
        )
        raise GraphError(f"expected 1 to {MAX_VERTICES} vertices, got {num_vertices}; {todo}")
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise GraphError(
            f"edges must be integers of shape [2, E] (row 0 sources, row 1 targets), got {edges.dtype} "
            f"of shape {edges.shape}; transpose or convert them"
        )
    if edges.size:
        _check_range(int(edges.min()), int(edges.max()), num_vertices, origin)
    if weights is None:
        return
    if weights.shape != edges.shape[1:] or weights.dtype.kind not in "iufb":
        raise GraphError(
            f"expected one real weight for each of {edges.shape[1]} edges, got {weights.dtype} "
            f"of shape {weights.shape}; leave weights out for an unweighted graph"
        )
    if not np.isfinite(weights).all():
        raise GraphError(f"edge weights must be finite, {np.sum(~np.isfinite(weights))} are NaN or infinite; drop them")


def _check_range(lowest: int, highest: int, num_vertices: int, origin: str) -> None:
    if 0 <= lowest and highest < num_vertices:
        return
    todo = (
        f"{'give one row for each vertex' if origin else 'check num_vertices (--vertices)'} and start ids at 0{NAMED}"
    )
    if lowest == 1 and highest == num_vertices:
        todo = "ids seem to start at 1: subtract 1 from each"
    raise GraphError(f"vertex ids must lie in [0, {num_vertices}){origin}, got {lowest} to {highest}; {todo}")


def _refuse_duplicates(keys: Keys, num_vertices: int) -> None:
    ordered = np.sort(keys)
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
    if repeats.size:
        u, v = divmod(int(ordered[repeats[0]]), num_vertices)
        raise GraphError(
            f"expected every edge once, {repeats.size} repeat, the first is {u} -> {v}; "
            'choose duplicates="merge" or "sum" (--duplicates) to allow that'
        )


def _reduce(
    keys: Keys, values: Weights | None, num_vertices: int, duplicates: Duplicates
) -> tuple[Keys, Weights | None]:
    """Sort keys and make one edge of equal ones."""
    if values is None:
        keys = np.sort(keys)
    else:
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    if starts.size == keys.size:
        return keys, values
    if duplicates == "sum":
        values = (
            np.diff(starts, append=keys.size).astype(np.float64) if values is None else np.add.reduceat(values, starts)
        )
    elif values is not None:
        differing = np.flatnonzero((np.diff(keys) == 0) & (np.diff(values) != 0))
        if differing.size:
            u, v = divmod(int(keys[differing[0]]), num_vertices)
            raise GraphError(
                f"edge {u} -> {v} is listed with different weights ({values[differing[0]]}, "
                f'{values[differing[0] + 1]}); choose duplicates="sum" (--duplicates sum) or give each edge one weight'
            )
        values = values[starts]
    return keys[starts], values


def _mirror(keys: Keys, values: Weights | None, num_vertices: int) -> tuple[Keys, Weights | None]:
    """Add the reverse of every edge that is no self-loop; keys hold one direction of each."""
    u, v = keys // num_vertices, keys % num_vertices
    proper = u != v
    both = np.concatenate([keys, (v * num_vertices + u)[proper]])
    return _sorted(both, None if values is None else np.concatenate([values, values[proper]]))


def _add_self_loops(keys: Keys, values: Weights | None, num_vertices: int) -> tuple[Keys, Weights | None]:
    present = keys[keys // num_vertices == keys % num_vertices] % num_vertices
    missing = np.delete(np.arange(num_vertices, dtype=np.int64), present) * (num_vertices + 1)
    more = None if values is None else np.concatenate([values, np.ones(missing.size)])
    return _sorted(np.concatenate([keys, missing]), more)


def _both_directions(keys: Keys, values: Weights | None, num_vertices: int) -> tuple[CSR, CSR]:
    if values is not None and np.all(values == 1.0):
        values = None
    transposed, values_t = _sorted(keys % num_vertices * num_vertices + keys // num_vertices, values)
    adj = _csr(keys, values, num_vertices)
    same_values = values is None or values_t is None or np.array_equal(values, values_t)
    if same_values and np.array_equal(keys, transposed):
        return adj, adj
    return adj, _csr(transposed, values_t, num_vertices)


def _csr(keys: Keys, values: Weights | None, num_vertices: int) -> CSR:
    pattern = csr_from_keys(keys, num_vertices)
    if values is None:
        return pattern
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if not np.isfinite(single).all():
        raise GraphError(f"edge weights up to {np.abs(values).max():g} overflow float32 (3.4e38); scale them down")
    return CSR(pattern.indptr, pattern.indices, ArrayRows(single), num_vertices)


def _sorted(keys: Keys, values: Weights | None) -> tuple[Keys, Weights | None]:
    if values is None:
        return np.sort(keys), None
    order = np.argsort(keys)
    return keys[order], values[order]
