"""Partitions of the rows: every vertex lies on one rank, and the statistics by which a run is planned.

N vertices, P ranks, V rows of a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.locality.reuse import UNKNOWN, Reuse
from mggcn.partition.order import Owners, part_sizes
from mggcn.partition.rows.required import RequiredRows, expected_required
from mggcn.partition.statistics import TileStatistics, expected_statistics
from mggcn.partition.sweep import ROWS


@dataclass(frozen=True)
class RowStats:
    """Statistics of a partition of the rows: rows per rank, the P x P tiles of A^T, and the locality of their gathers.

    required: the rows that a training epoch needs in the last layer, in the one before, ..., as far as `required_stats`
    goes; (): not known.
    """

    counts: tuple[int, ...]
    tiles: TileStatistics
    reuse: Reuse = UNKNOWN
    required: tuple[RequiredRows, ...] = ()
    ranges: bool = False
    """Whether every rank has consecutive vertices, which their bounds say."""

    @property
    def kind(self) -> Literal["rows"]:
        return "rows"

    @property
    def assignment_bytes(self) -> int:
        return self.kept_bytes + (9 if self.ranges else 6)  # halo and slice number the vertices once more

    @property
    def kept_bytes(self) -> int:
        return 0 if self.ranges else 6  # owner and row

    @cached_property
    def num_entries(self) -> int:
        return int(self.tiles.nnz.sum())

    @property
    def exact(self) -> bool:
        return self.tiles.exact

    def to_dict(self) -> dict[str, Any]:
        stats = {"kind": self.kind, "counts": list(self.counts), "reuse": self.reuse.to_dict(), "ranges": self.ranges}
        return stats | self.tiles.to_dict() | {"wanted": [rows.to_dict() for rows in self.required]}

    def only(self, level: int) -> RowStats:
        """Return the statistics of an aggregation that computes only the rows of `required[level]`.

        Its matrices for A^T and A differ, also in a symmetric graph. The locality of its gathers is that of all rows.
        """
        return RowStats(self.counts, self.required[level].tiles, reuse=self.reuse, ranges=self.ranges)

    def resized(self, num_vertices: int, num_edges: int, ranks: int, *, self_loops: bool) -> RowStats:
        rows, entries = max(sum(self.counts), 1), max(self.num_entries, 1)
        shares = [(required.num_rows / rows, required.num_entries / entries) for required in self.required]
        return RowStats.expected(num_vertices, num_edges, ranks, self_loops=self_loops, shares=shares)

    @staticmethod
    def expected(
        num_vertices: int, num_edges: int, ranks: int, *, self_loops: bool, shares: Sequence[tuple[float, float]] = ()
    ) -> RowStats:
        """Return the expectation over random assignments: `expected_statistics`, and `expected_required` for the shares."""
        counts, sizes = part_sizes(num_vertices, ranks), (num_vertices, num_edges)
        tiles = expected_statistics(*sizes, counts, self_loops=self_loops)
        return RowStats(counts, tiles, required=expected_required(*sizes, counts, shares, self_loops=self_loops))

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> RowStats:
        """Invert to_dict."""
        reuse = Reuse.from_dict(content["reuse"]) if "reuse" in content else UNKNOWN
        counts = tuple(int(n) for n in content["counts"])
        required = tuple(RequiredRows.from_dict(rows) for rows in content.get("wanted", ()))
        ranges = bool(content.get("ranges"))
        return RowStats(counts, TileStatistics.from_dict(content), reuse=reuse, required=required, ranges=ranges)


@dataclass(frozen=True, slots=True)
class RowPartition:
    """A partition in which every vertex is on one rank."""

    owners: Owners
    kind: Literal["rows"] = "rows"

    def local_index(self, rank: int) -> Owners:
        return self.owners

    def owned(self, rank: int) -> npt.NDArray[np.bool_] | None:
        return None

    def digest(self) -> str:
        digest, last = hashlib.sha256(), self.owners.num_vertices
        for start in range(0, last, ROWS):
            digest.update(np.ascontiguousarray(self.owners.owner_of(slice(start, min(start + ROWS, last)))).data)
        return digest.hexdigest()


def row_stats(stats: PartitionStats) -> RowStats:
    """Return the statistics as those of a partition of the rows. Raises: ConfigError for another kind."""
    if not isinstance(stats, RowStats):
        raise ConfigError(f"this strategy works on a partition of the rows, got one of kind {stats.kind}")
    return stats


def row_owners(partition: Partition) -> Owners:
    """Return the assignment of a partition of the rows. Raises: ConfigError for one of another kind."""
    if not isinstance(partition, RowPartition):
        raise ConfigError(f"this strategy works on a partition of the rows, got one of kind {partition.kind}")
    return partition.owners
