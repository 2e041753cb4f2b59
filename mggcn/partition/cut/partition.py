"""The rows of a vertex cut: a rank holds every vertex of its part, split vertices first, and owns some of them.

A split vertex lies in several parts: its root is its owner, its leaves are the other copies (DistGNN, section 5.2). Of a
rank's V rows the first S are those of split vertices, by original id, then the others. N vertices, P ranks, r bins.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError, StoreError
from mggcn.graph.csr import CSR, Array, Graph, Rows
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.cut.vertex_cut import CutStatistics, VertexCut
from mggcn.partition.locality.reuse import Shares
from mggcn.partition.order import Assignment
from mggcn.partition.sweep import sweep

CHUNK = 1 << 18
"""Number of vertices whose parts are read at a time."""
RANGES = 3
"""Ranges of a rank's rows: the split ones, and two halves of the others, multiplied while messages are on their way."""


def row_ranges(split: int, rows: int) -> tuple[int, ...]:
    """Return the bounds of the ranges of a rank's rows."""
    return (0, split, split + (rows - split) // 2, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutStats:
    """Statistics of a vertex cut: rows and split rows of each rank; nnz: entries of A per rank and range, self-loops
    included.

    leaves int64 (r, P, P): entry (b, p, q) counts the leaves of rank p in bin b whose root is on rank q.
    replication, edge_balance, split_share: of CutStatistics. reuse: locality of rank 0's gathers; (): not known.
    """

    counts: tuple[int, ...]
    split: tuple[int, ...]
    nnz: tuple[tuple[int, ...], ...]
    leaves: npt.NDArray[np.int64]
    replication: float
    edge_balance: float
    split_share: float
    exact: bool = True
    kind: Literal["cut"] = "cut"
    reuse: Shares = ()

    @property
    def num_entries(self) -> int:
        return sum(sum(ranges) for ranges in self.nnz)

    @property
    def assignment_bytes(self) -> int:
        # Owner and row of the rank's own assignment.
        return self.kept_bytes + 6

    @property
    def kept_bytes(self) -> int:
        # Part sets and owner of the cut, what is split and its bin.
        return 8 * -(-len(self.counts) // 64) + 2 + 1 + (4 if self.leaves.shape[0] > 1 else 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "counts": list(self.counts),
            "split": list(self.split),
            "nnz": [list(ranges) for ranges in self.nnz],
            "leaves": self.leaves.tolist(),
            "replication": self.replication,
            "edge_balance": self.edge_balance,
            "split_share": self.split_share,
            "exact": self.exact,
            "reuse": list(self.reuse),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> CutStats:
        """Invert to_dict."""
        return CutStats(
            counts=tuple(int(n) for n in content["counts"]),
            split=tuple(int(n) for n in content["split"]),
            nnz=tuple(tuple(int(n) for n in ranges) for ranges in content["nnz"]),
            leaves=np.array(content["leaves"], np.int64),
            replication=float(content["replication"]),
            edge_balance=float(content["edge_balance"]),
            split_share=float(content["split_share"]),
            exact=bool(content["exact"]),
            reuse=tuple(float(share) for share in content.get("reuse", ())),
        )

    def resized(self, num_vertices: int, num_edges: int, ranks: int, *, self_loops: bool) -> CutStats:
        # Published factors of Libra follow a power of P: Reddit 1.75, 2.94, 4.66, 6.93 at 2, 4, 8, 16 (DistGNN, Table 4).
        own = len(self.counts)
        power = np.log(self.replication) / np.log(own) if own > 1 else 0.0
        bins = self.leaves.shape[0]
        return CutStats.expected(num_vertices, num_edges, ranks, float(ranks**power), bins=bins, self_loops=self_loops)

    @staticmethod
    def expected(
        num_vertices: int, num_edges: int, ranks: int, replication: float, *, bins: int, self_loops: bool
    ) -> CutStats:
        """Return expected statistics of equal parts, where a vertex has `replication` copies on average and a split one
        at least two.

        Raises: ConfigError if there are more copies than ranks or fewer than one.
        """
        if not 1.0 <= replication <= ranks:
            raise ConfigError(
                f"a vertex has 1 to {ranks} copies on {ranks} ranks, got a replication of {replication:g}"
            )
        rows = -(-round(num_vertices * replication) // ranks)
        leaves = round(num_vertices * (replication - 1))
        split = min(num_vertices, leaves)
        split_rows = min(rows, -(-(leaves + split) // ranks))
        entries = -(-(num_edges + (num_vertices if self_loops else 0)) // ranks)
        bounds = row_ranges(split_rows, rows)
        nnz = tuple(entries * (b - a) // max(rows, 1) for a, b in itertools.pairwise(bounds))
        pairs = max(ranks * (ranks - 1), 1)
        table = np.full((bins, ranks, ranks), -(-leaves // (pairs * bins)), np.int64)
        table[:, np.arange(ranks), np.arange(ranks)] = 0
        share = split / num_vertices
        return CutStats(
            counts=(rows,) * ranks,
            split=(split_rows,) * ranks,
            nnz=(nnz,) * ranks,
            leaves=table,
            replication=replication,
            edge_balance=1.0,
            split_share=share,
            exact=False,
        )


@dataclass(frozen=True)
class CutPartition:
    """A vertex cut as a partition of rows; `bins`: over how many bins each root's split vertices are dealt in turn."""

    cut: VertexCut
    bins: int = 1
    kind: Literal["cut"] = "cut"

    @property
    def statistics(self) -> CutStatistics:
        return self.cut.statistics

    @property
    def counts(self) -> tuple[int, ...]:
        return self.cut.statistics.rows_per_part

    @cached_property
    def split(self) -> npt.NDArray[np.bool_]:
        """A mask of the vertices that lie in two parts or more (N,)."""
        split = np.empty(self.cut.parts.shape[0], np.bool_)
        for first in range(0, split.shape[0], CHUNK):
            parts = self.cut.parts[first : first + CHUNK]
            several = (parts & (parts - np.uint64(1))).any(1) | ((parts != 0).sum(1) > 1)
            split[first : first + CHUNK] = several
        return split

    @cached_property
    def bin_of(self) -> npt.NDArray[np.int32]:
        """Bin of each split vertex (N,), 0 for others. Cost: a sort of the split vertices by their root."""
        bins = np.zeros(self.split.shape[0], np.int32)
        if self.bins > 1:
            ids = np.flatnonzero(self.split)
            ids = ids[np.argsort(self.cut.owner[ids], kind="stable")]
            bins[ids] = np.arange(ids.shape[0]) % self.bins
        return bins

    def ids(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the original ids of a rank's rows."""
        members = self.cut.members(rank)
        split = self.split[members]
        return np.concatenate([members[split], members[~split]])

    def local_index(self, rank: int) -> Assignment:
        ids = self.ids(rank)
        owner = np.full(self.cut.owner.shape[0], rank + 1, np.uint16)
        owner[ids] = rank
        local = np.full(owner.shape[0], -1, np.int32)
        local[ids] = np.arange(ids.shape[0], dtype=np.int32)
        return Assignment(owner, local, self.counts)

    def owned(self, rank: int) -> npt.NDArray[np.bool_] | None:
        owned: npt.NDArray[np.bool_] = self.cut.owner[self.ids(rank)] == rank
        return owned

    def digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.cut.owner).data)
        digest.update(np.ascontiguousarray(self.cut.parts).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Lists:
    """Rows that one rank sends and receives for one bin; int32 of this rank.

    leaves: of its leaves, by rank of the root, then by id, leaf_counts of them to each rank; roots: of its roots, by rank
    of the leaf, then by id, once for each leaf, root_counts of them from each rank.
    """

    leaves: npt.NDArray[np.int32]
    leaf_counts: tuple[int, ...]
    roots: npt.NDArray[np.int32]
    root_counts: tuple[int, ...]


def exchange_lists(partition: CutPartition, rank: int, bins: int) -> tuple[Lists, ...]:
    """Return a rank's lists, one for each bin: the partition's, or all in one. Cost: P passes over its split rows, a sort.

    Raises: ConfigError for another number of bins.
    """
    if bins not in (1, partition.bins):
        raise ConfigError(
            f"the split vertices are spread over {partition.bins} bins, but lists were requested for {bins}"
        )
    cut, ranks = partition.cut, partition.cut.num_parts
    ids = partition.ids(rank)
    ids = ids[: int(partition.split[ids].sum())]
    owner = cut.owner[ids]
    bin_of = partition.bin_of[ids] if bins > 1 else np.zeros(ids.shape[0], np.int32)
    rows = np.arange(ids.shape[0], dtype=np.int32)
    result = []
    for number in range(bins):
        mine = bin_of == number
        leaves = rows[mine & (owner != rank)]
        leaves = leaves[np.argsort(owner[leaves], kind="stable")]
        leaf_counts = np.bincount(owner[leaves], minlength=ranks)
        roots = []
        for other in range(ranks):
            there = (cut.parts[ids, other // 64] >> np.uint64(other % 64)) & np.uint64(1) != 0
            roots.append(rows[mine & there & (owner == rank)] if other != rank else rows[:0])
        result.append(
            Lists(
                leaves, tuple(int(n) for n in leaf_counts), np.concatenate(roots), tuple(len(there) for there in roots)
            )
        )
    return tuple(result)


def cut_stats(graph: Graph, partition: CutPartition, *, self_loops: bool) -> CutStats:
    """Count the rows, entries and leaves that a cut gives to each rank. Cost: one sweep over the edges and their parts,
    O(N P) for the lists.
    """
    cut, ranks = partition.cut, partition.cut.num_parts
    split_rows, nnz = [], np.zeros((ranks, RANGES), np.int64)
    leaves = np.zeros((partition.bins, ranks, ranks), np.int64)
    stored = np.zeros(graph.num_vertices, bool)
    # A vertex that is not split lies in one part: its range there is its range.
    range_of = np.zeros(graph.num_vertices, np.int8)
    for rank in range(ranks):
        ids = partition.ids(rank)
        split = int(partition.split[ids].sum())
        split_rows.append(split)
        lengths = np.diff(row_ranges(split, ids.shape[0]))
        range_of[ids] = np.repeat(np.arange(RANGES, dtype=np.int8), lengths)
        own, bins = cut.owner[ids[:split]], partition.bin_of[ids[:split]]
        away = own != rank
        np.add.at(leaves, (bins[away], rank, own[away].astype(np.int64)), 1)
    for rows, columns, part, _ in _entries(graph.adj_t, cut.edge_part_t, ranks):
        nnz += np.bincount(part * RANGES + range_of[rows], minlength=nnz.size).reshape(nnz.shape)
        stored[rows[rows == columns]] = True
    if self_loops:
        lacking = np.flatnonzero(~stored)
        own = cut.owner[lacking].astype(np.int64)
        nnz += np.bincount(own * RANGES + range_of[lacking], minlength=nnz.size).reshape(nnz.shape)
    s = cut.statistics
    return CutStats(
        counts=partition.counts,
        split=tuple(split_rows),
        nnz=tuple(tuple(int(n) for n in ranges) for ranges in nnz),
        leaves=leaves,
        replication=s.replication,
        edge_balance=s.edge_balance,
        split_share=s.split_share,
    )


def _entries(matrix: CSR, edge_part: Rows, num_parts: int):  # type: ignore[no-untyped-def]
    """Yield (row, column, part, value or None) of the entries of a matrix, in its order, some at a time."""
    done = 0
    for chunk in sweep(matrix):
        count = chunk.indices.shape[0]
        rows = np.repeat(np.arange(chunk.first, chunk.first + chunk.rows), np.diff(chunk.indptr))
        yield rows, chunk.indices, read_parts(edge_part, done, done + count, num_parts).astype(np.int64), chunk.values
        done += count


def read_parts(edge_part: Rows, start: int, stop: int, num_parts: int) -> Array:
    """Return the parts of some entries. Raises: StoreError if one is not a part of the cut."""
    parts: Array = edge_part.read(start, stop)
    if parts.size and parts.max() >= num_parts:
        raise damaged_cut(f"names part {parts.max()} for an edge, but has {num_parts} parts")
    return parts


def damaged_cut(what: str) -> StoreError:
    """Return the error for a saved cut that is damaged."""
    return StoreError(f"the vertex cut {what}; it is damaged: make it again with mggcn partition --force")


def cut_partition(partition: Partition) -> CutPartition:
    """Return the vertex cut of a run. Raises: ConfigError for another kind of partition."""
    if not isinstance(partition, CutPartition):
        raise ConfigError(f"this strategy works on a vertex cut, got a partition of kind {partition.kind}")
    return partition


def stats_of_cut(stats: PartitionStats) -> CutStats:
    """Return the statistics as those of a vertex cut. Raises: ConfigError for another kind."""
    if not isinstance(stats, CutStats):
        raise ConfigError(f"this strategy works on a vertex cut, got a partition of kind {stats.kind}")
    return stats
