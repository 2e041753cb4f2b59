"""A vertex cut: every edge lies in one part, and a vertex lies in each part that holds one of its edges; one of these
parts owns it.

N vertices, E stored edges, P parts, W = ceil(P / 64).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import Rows
from mggcn.partition.statistics import balance


@dataclass(frozen=True, slots=True)
class CutStatistics:
    """Statistics of a vertex cut. An undirected edge counts once; self-loops are not edges here."""

    num_connected: int
    """Vertices with edges."""
    num_copies: int
    """Parts of these vertices, summed."""
    num_split: int
    """Vertices that lie in two parts or more."""
    edges_per_part: tuple[int, ...]
    rows_per_part: tuple[int, ...]
    """Vertices that lie in each part, isolated ones included."""

    @property
    def num_edges(self) -> int:
        return sum(self.edges_per_part)

    @property
    def replication(self) -> float:
        """Average number of parts of a vertex with edges: the published replication factor."""
        return self.num_copies / self.num_connected if self.num_connected else 1.0

    @property
    def split_share(self) -> float:
        """Share of the vertices with edges that lie in two parts or more."""
        return self.num_split / self.num_connected if self.num_connected else 0.0

    @property
    def edge_balance(self) -> float:
        """Edges of the fullest part over the average."""
        return balance(self.edges_per_part)

    @property
    def row_balance(self) -> float:
        """Vertices of the part with most of them over the average."""
        return balance(self.rows_per_part)


@dataclass(frozen=True, kw_only=True, slots=True)
class VertexCut:
    """Parts of all vertices and edges.

    parts uint64 (N, W): bit p % 64 of word p // 64 says that the vertex lies in part p; never empty.
    owner uint16 (N,): the root part of the vertex, one of its parts.
    edge_part uint8 (E,), uint16 from P = 257 on: part of every entry of the graph's adj, in its order; edge_part_t: of
    adj_t (the same object if the graph is symmetric, and then (u, v) and (v, u) lie together). A stored self-loop lies
    with the owner of its vertex.
    """

    num_parts: int
    parts: npt.NDArray[np.uint64]
    owner: npt.NDArray[np.uint16]
    edge_part: Rows
    edge_part_t: Rows
    statistics: CutStatistics

    def members(self, part: int) -> npt.NDArray[np.int64]:
        """Return the vertices that lie in a part, ascending. Cost: one pass over N words."""
        word = self.parts[:, part // 64]
        return np.flatnonzero(word & np.uint64(1 << part % 64))


def num_words(num_parts: int) -> int:
    """Return W, the words of a vertex's part set."""
    return -(-num_parts // 64)


def part_dtype(num_parts: int) -> npt.DTypeLike:
    """Return the type of `edge_part`."""
    return np.uint8 if num_parts <= 256 else np.uint16
