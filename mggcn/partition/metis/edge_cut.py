"""An edge cut: every vertex lies in one part; edges between parts are cut, and their ends are needed in both.

N vertices, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import Graph
from mggcn.graph.splits import SPLITS, first_splits
from mggcn.partition.order import Assignment
from mggcn.partition.statistics import balance, tile_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeCutStatistics:
    """Statistics of an edge cut. An undirected edge counts once; self-loops are not edges here."""

    num_edges: int
    num_cut: int
    """Edges whose ends lie in different parts."""
    rows_per_part: tuple[int, ...]
    nonzeros_per_part: tuple[int, ...]
    """Entries of the rows of A^T, and of A if it is another matrix, with a self-loop in each."""
    halo_per_part: tuple[int, ...]
    """Rows of other parts that a part needs to multiply its rows of A^T: what it receives for a layer's forward pass."""
    halo_t_per_part: tuple[int, ...]
    """The same for A and the backward pass."""
    train_per_part: tuple[int, ...] = ()
    """Vertices of the first training split; () in cuts of earlier versions."""
    val_per_part: tuple[int, ...] = ()
    test_per_part: tuple[int, ...] = ()

    @property
    def cut_share(self) -> float:
        """Cut edges over all edges."""
        return self.num_cut / self.num_edges if self.num_edges else 0.0

    @property
    def nonzero_balance(self) -> float:
        """Nonzeros of the fullest part over the average."""
        return balance(self.nonzeros_per_part)

    @property
    def row_balance(self) -> float:
        """Vertices of the part with most of them over the average."""
        return balance(self.rows_per_part)

    @property
    def halo_share(self) -> float:
        """Rows received in a layer's forward pass, by all parts, over the number of vertices."""
        return sum(self.halo_per_part) / max(sum(self.rows_per_part), 1)


@dataclass(frozen=True, slots=True)
class EdgeCut:
    """Parts of all vertices: owner uint16 (N,). A part may be empty."""

    num_parts: int
    owner: npt.NDArray[np.uint16]
    statistics: EdgeCutStatistics

    def assignment(self) -> Assignment:
        """Return the parts as those of ranks; inside a part vertices keep their original order. Cost: as `by_owner`."""
        return by_owner(self.owner, self.num_parts)


def by_owner(owner: npt.NDArray[np.uint16], num_parts: int) -> Assignment:
    """Return the assignment that gives vertex v to part owner[v] (N,) and keeps the original order inside each part.

    Cost: one stable sort of N parts in linear time, 8 N bytes meanwhile.
    """
    counts = np.bincount(owner, minlength=num_parts)
    order = np.argsort(owner, kind="stable")
    local = np.empty(owner.shape[0], np.int32)
    local[order] = np.arange(owner.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
    return Assignment(owner, local, tuple(int(count) for count in counts))


def edge_cut(graph: Graph, owner: npt.NDArray[np.uint16], num_parts: int) -> EdgeCut:
    """Return a cut with its statistics. Cost: that of `tile_statistics`."""
    owners = by_owner(owner, num_parts)
    tiles = tile_statistics(graph, owners, self_loops=True)
    nonzeros = tiles.nnz.sum(1) if graph.symmetric else tiles.nnz.sum(1) + tiles.nnz.sum(0)
    total = int(tiles.nnz.sum())
    once = 2 if graph.symmetric else 1
    statistics = EdgeCutStatistics(
        num_edges=(total - graph.num_vertices) // once,
        num_cut=(total - int(tiles.nnz.trace())) // once,
        rows_per_part=owners.counts,
        nonzeros_per_part=_counts(nonzeros),
        halo_per_part=_counts(_halo(tiles.rows_needed)),
        halo_t_per_part=_counts(_halo(tiles.rows_needed_t)),
        **_of_splits(graph, owner, num_parts),
    )
    return EdgeCut(num_parts, owner, statistics)


def _of_splits(graph: Graph, owner: npt.NDArray[np.uint16], num_parts: int) -> dict[str, tuple[int, ...]]:
    """Return how many vertices of each split a part has; zeros where there is none."""
    masks = first_splits(graph)
    members = {name: owner[masks[name]] if name in masks else owner[:0] for name in SPLITS}
    return {f"{name}_per_part": _counts(np.bincount(of, minlength=num_parts)) for name, of in members.items()}


def _halo(needed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many rows of other parts each part needs in all, from the counts by part (P, P)."""
    rows: npt.NDArray[np.int64] = needed.sum(1) - needed.diagonal()
    return rows


def _counts(array: npt.NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(count) for count in array)
