"""Assignments of vertices to ranks, in arrays or as ranges; the row orders random, permute and none.

N vertices, P ranks; rank r owns floor((r + 1) N / P) - floor(r N / P) vertices, so parts differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import ConfigError

MAX_RANKS = 65535
MAX_PARTS = 1024
"""Most parts of a cut that is kept."""


Vertices = slice | npt.NDArray[np.integer]
"""Consecutive vertices, or any, by id."""


class Owners(Protocol):
    """The rank of each vertex and its row there."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows per rank."""
        ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_vertices(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...

    def owner_of(self, vertices: Vertices) -> npt.NDArray[np.uint16]:
        """Return the rank of each vertex."""
        ...

    def local_of(self, vertices: Vertices) -> npt.NDArray[np.int32]:
        """Return the row of each vertex on its rank."""
        ...

    def owned(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the original ids of a rank's vertices, by local id."""
        ...

    def span(self, rank: int) -> range:
        """Return consecutive vertices among which a rank's are."""
        ...

    def in_order(self, rank: int) -> bool:
        """Return whether a rank's rows have the original order."""
        ...

    def count(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return how many chosen vertices (N,) each rank has, (P,)."""
        ...

    def arguments(self) -> native.OwnersArgs:
        """Return what kernels are told; it points into arrays that must live as long."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """owner uint16 (N,): rank of each vertex; local int32 (N,): its row there; counts: rows per rank."""

    owner: npt.NDArray[np.uint16]
    local: npt.NDArray[np.int32]
    counts: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.counts)

    @property
    def num_vertices(self) -> int:
        return self.owner.size

    @property
    def nbytes(self) -> int:
        return self.owner.nbytes + self.local.nbytes

    def owner_of(self, vertices: Vertices) -> npt.NDArray[np.uint16]:
        return self.owner[vertices]

    def local_of(self, vertices: Vertices) -> npt.NDArray[np.int32]:
        return self.local[vertices]

    def owned(self, rank: int) -> npt.NDArray[np.int64]:
        ids = np.flatnonzero(self.owner == rank)
        out = np.empty_like(ids)
        out[self.local[ids]] = ids
        return out

    def span(self, rank: int) -> range:
        return range(self.owner.size)

    def in_order(self, rank: int) -> bool:
        return bool((np.diff(self.local[self.owner == rank]) > 0).all())

    def count(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        return np.bincount(self.owner[chosen], minlength=self.num_ranks)

    def arguments(self) -> native.OwnersArgs:
        return native.OwnersArgs(self.owner.ctypes.data, self.local.ctypes.data, None, self.num_ranks)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Consecutive vertices, in their order. bounds int64 (P + 1,): rank r has bounds[r] .. bounds[r + 1] - 1."""

    bounds: npt.NDArray[np.int64]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(np.diff(self.bounds).tolist())

    @property
    def num_ranks(self) -> int:
        return self.bounds.size - 1

    @property
    def num_vertices(self) -> int:
        return int(self.bounds[-1])

    @property
    def nbytes(self) -> int:
        return self.bounds.nbytes

    def owner_of(self, vertices: Vertices) -> npt.NDArray[np.uint16]:
        """As Owners says. Cost: a search among the bounds for each vertex, unless they are consecutive."""
        if isinstance(vertices, slice):
            start, stop, _ = vertices.indices(self.num_vertices)
            stop = max(start, stop)
            if self.num_ranks == 1:
                return np.zeros(stop - start, np.uint16)
            return np.repeat(np.arange(self.num_ranks, dtype=np.uint16), np.diff(self.bounds.clip(start, stop)))
        return np.searchsorted(self.bounds[1:-1].astype(vertices.dtype), vertices, side="right").astype(np.uint16)

    def local_of(self, vertices: Vertices) -> npt.NDArray[np.int32]:
        """As Owners says. Cost: as owner_of."""
        if isinstance(vertices, slice):
            start, stop, _ = vertices.indices(self.num_vertices)
            rows = np.arange(start, stop, dtype=np.int32)
            for first, last in pairwise(self.bounds.tolist()):
                rows[max(first - start, 0) : max(last - start, 0)] -= first
            return rows
        return np.subtract(vertices, self.bounds[self.owner_of(vertices)], dtype=np.int64).astype(np.int32)

    def owned(self, rank: int) -> npt.NDArray[np.int64]:
        return np.arange(self.bounds[rank], self.bounds[rank + 1])

    def span(self, rank: int) -> range:
        return range(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def in_order(self, rank: int) -> bool:
        return True

    def count(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        return np.array([np.count_nonzero(chosen[a:b]) for a, b in pairwise(self.bounds.tolist())], np.int64)

    def arguments(self) -> native.OwnersArgs:
        return native.OwnersArgs(None, None, self.bounds.ctypes.data, self.num_ranks)


def whole_graph(num_vertices: int) -> Ranges:
    """Return the assignment of all vertices to one rank, in their order."""
    return Ranges(np.array([0, num_vertices], np.int64))


def part_sizes(num_vertices: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank; the larger parts are spread evenly over the ranks."""
    bounds = [num_vertices * r // ranks for r in range(ranks + 1)]
    return tuple(b - a for a, b in pairwise(bounds))


def assign(num_vertices: int, ranks: int, order: str, seed: int) -> Owners:
    """Assign every vertex to a rank.

    random: a seeded random assignment that keeps the original order inside each part; permute: MG-GCN's random
    permutation, section 5.2; none: consecutive ranges. One rank owns all in the original order, except for permute.
    Cost: none; permute and random draw one permutation, and keep 6 N bytes.
    Raises: ConfigError if the order is unknown or there are too many ranks.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"ranks must lie in 1 .. {MAX_RANKS}, got {ranks}")
    if ranks == 1 and order in ("none", "random"):
        return whole_graph(num_vertices)
    counts = part_sizes(num_vertices, ranks)
    if order == "none":
        return Ranges(np.array([0, *accumulate(counts)], np.int64))
    by_position = np.repeat(np.arange(ranks, dtype=np.uint16), counts)
    permutation = np.random.default_rng(seed).permutation(num_vertices)
    owner = np.empty(num_vertices, np.uint16)
    owner[permutation] = by_position
    local = np.empty(num_vertices, np.int32)
    if order == "random":
        for rank, count in enumerate(counts):
            local[owner == rank] = np.arange(count, dtype=np.int32)
    elif order == "permute":
        local[permutation] = np.concatenate([np.arange(c, dtype=np.int32) for c in counts])
    else:
        raise ConfigError(f"run.order must be random, permute or none, got {order!r}")
    return Assignment(owner, local, counts)


def concatenated_by_rank(owners: Owners, first: int = 0) -> Owners:
    """Return an assignment of all N vertices to one rank that keeps each rank's rows together and in order: rank `first`
    comes first, then the others by number.

    Cost: O(N), 6 N bytes; nothing for ranges of which the first rank's are the first.
    """
    if isinstance(owners, Ranges) and first == 0:
        return whole_graph(owners.num_vertices)
    order = [first, *(rank for rank in range(len(owners.counts)) if rank != first)]
    starts = np.empty(len(order), np.int32)
    starts[order] = np.cumsum([0, *(owners.counts[rank] for rank in order[:-1])])
    rows = starts[owners.owner_of(slice(None))]
    rows += owners.local_of(slice(None))
    return Assignment(np.zeros(rows.shape, np.uint16), rows, (sum(owners.counts),))
