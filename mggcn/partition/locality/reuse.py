"""Locality of the gathers of an order: how many other rows a rank uses between two uses of the same one.

A cache of C rows serves a use if fewer than C others lie between (with the least recently used leaving first), so these
distances show what any cache will do. Source: SHARDS, Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
2015: the exact distances of a sample of the columns. N vertices, P ranks, M sampled entries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.graph.csr import Graph
from mggcn.partition.locality.chunks import row_chunks
from mggcn.partition.order import Owners

BOUNDS: Final = tuple(256 * 4**k for k in range(12))
"""The distances that are distinguished, in rows; the last stands for all larger ones: kFirst and kBuckets of
cpu/reuse.cpp.
"""
SAMPLED: Final = 1 << 19
"""Approximate number of entries that are sampled, but at least a 2^MAX_SHIFT-th of all."""
MAX_SHIFT: Final = 8
"""A sample of a 256th of the columns resolves distances of 256 rows, the shortest that are distinguished."""
SEED: Final = 1

Shares = tuple[float, ...]
"""Fraction of the gathers in each bin of reuse distance; BOUNDS are the upper edges."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The shares for the ranks' own tiles and for all others; () if there are none."""

    own: Shares
    others: Shares

    def together(self, own_nnz: int, others_nnz: int) -> Shares:
        """Return the shares of own and other tiles together, given their nonzeros."""
        total = own_nnz + others_nnz
        if not self.own or not self.others:
            return self.own or self.others
        pairs = zip(self.own, self.others, strict=True)
        return tuple((a * own_nnz + b * others_nnz) / max(total, 1) for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"bounds": list(BOUNDS), "own": list(self.own), "others": list(self.others)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Reuse:
        """Invert to_dict."""
        return Reuse(*(tuple(float(share) for share in content[name]) for name in ("own", "others")))


UNKNOWN: Final = Reuse((), ())
"""The reuse of a partition of which only the shape is known: its gathers are assumed to be random."""


def near_share(shares: Shares, rows: int) -> float:
    """Return the share of the gathers that find their row among the `rows` last used ones, one of BOUNDS."""
    return sum(share for share, bound in zip(shares, BOUNDS, strict=False) if bound <= rows)


def estimate_reuse(graph: Graph, owners: Owners, threads: int) -> Reuse:
    """Estimate the locality of products with A^T when every rank multiplies its rows in order, tile after tile.

    The first use of a row in a tile counts as one after all other rows that the tile uses.
    Cost: one sweep over the entries; a sort of M = min(nnz, max(SAMPLED, nnz / 256)) of them and M log M steps; 8 N + 40 M
    bytes. Exact if nnz <= SAMPLED.
    """
    shift, places, columns = _sample(graph, owners, threads)
    return Reuse(*_distances(graph, shift, places, columns))


def estimate_part_reuse(graph: Graph, held: Owners, rank: int, threads: int) -> Shares:
    """Estimate the locality of the products of one rank, given the vertices that it holds, some perhaps as copies.

    Every edge between two of these vertices counts as the rank's own. Cost: as estimate_reuse.
    """
    shift, places, columns = _sample(graph, held, threads)
    own = places >> np.uint64(32) == np.uint64(rank << 16 | rank)
    return _distances(graph, shift, places[own], columns[own])[0]


def _sample(graph: Graph, owners: Owners, threads: int) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Return how sparse the sample of columns is (one of 2^shift), and tile, row and column (M,) of their entries."""
    nnz, shift = graph.adj_t.nnz, 0
    while shift < MAX_SHIFT and nnz >> shift > SAMPLED:
        shift += 1
    return shift, *_trace(graph, owners, shift, threads)


def _distances(
    graph: Graph, shift: int, places: npt.NDArray[np.uint64], columns: npt.NDArray[np.int32]
) -> tuple[Shares, Shares]:
    """Return the shares of ranks' own tiles and of the others."""
    order = np.argsort(places, kind="stable")
    tiles = (places >> np.uint64(32))[order]
    columns = columns[order]
    # Without a sampled edge there is no tile, but an end of the last one all the same: the kernel reads it.
    starts = np.append(np.flatnonzero(np.diff(tiles, prepend=np.uint64(2**32))), tiles.shape[0]).astype(np.int64)
    first = tiles[starts[:-1]]
    kinds = (first >> np.uint64(16) != first & np.uint64(0xFFFF)).astype(np.uint8)
    histogram = np.zeros((2, len(BOUNDS)), np.int64)
    last, tree = np.zeros(graph.num_vertices, np.int64), np.zeros(columns.shape[0] + 1, np.int32)
    native.kernel("mggcn_reuse_distances")(
        *(array.ctypes.data for array in (columns, starts, kinds)),
        kinds.shape[0],
        shift,
        *(array.ctypes.data for array in (last, tree, histogram)),
    )
    own, others = (_shares(counts) for counts in histogram)
    return own, others


def _trace(
    graph: Graph, owners: Owners, shift: int, threads: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Return tile and row (M,) of the entries of the sampled columns of A^T, and these columns (M,)."""
    kernel = native.kernel("mggcn_reuse_trace")
    where = owners.arguments()
    places, columns = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    for chunk in row_chunks((graph.adj_t,), threads):
        found = np.empty(chunk.entries, np.uint64), np.empty(chunk.entries, np.int32)
        filled = ctypes.c_int64(0)
        kernel(chunk.pointer, ctypes.byref(where), shift, SEED, ctypes.byref(filled), *(a.ctypes.data for a in found))
        places.append(found[0][: filled.value].copy())
        columns.append(found[1][: filled.value].copy())
    return np.concatenate(places), np.concatenate(columns)


def _shares(counts: npt.NDArray[np.int64]) -> Shares:
    total = int(counts.sum())
    return tuple(float(count) / total for count in counts) if total else ()
