"""Partitions of any kind: which rank holds which rows, and the sizes that a plan needs.

N vertices, P ranks, V rows of a rank.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mggcn.partition.order import Owners


class Partition(Protocol):
    """An assignment of rows to ranks."""

    @property
    def kind(self) -> Literal["rows", "cut"]: ...

    def local_index(self, rank: int) -> Owners:
        """Return an assignment that gives `rank` exactly the vertices that it holds, with their row numbers there."""
        ...

    def digest(self) -> str:
        """Return the SHA-256 of the assignment of vertices to owners."""
        ...

    def owned(self, rank: int) -> npt.NDArray[np.bool_] | None:
        """Return which of the rank's rows (V,) it owns, None if all: every vertex has one owner, and other ranks hold
        copies.
        """
        ...


class PartitionStats(Protocol):
    """The sizes that a partition gives to its ranks: all that a plan needs. Written to the run folder's plan.json."""

    @property
    def kind(self) -> Literal["rows", "cut"]: ...

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows that each rank holds, copies of other ranks' rows included."""
        ...

    @property
    def num_entries(self) -> int:
        """Nonzeros of A with the self-loops that the model inserts."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the numbers were counted; otherwise they are expectations for a bare shape."""
        ...

    @property
    def assignment_bytes(self) -> int:
        """Bytes per vertex of the graph that set-up needs to know which rank holds each vertex."""
        ...

    @property
    def kept_bytes(self) -> int:
        """The part of `assignment_bytes` that stays for the whole run."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        ...

    def resized(self, num_vertices: int, num_edges: int, ranks: int, *, self_loops: bool) -> PartitionStats:
        """Return the expected statistics of the same kind of partition for another number of ranks."""
        ...
