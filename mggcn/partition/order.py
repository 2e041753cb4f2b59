"""Assignments of vertices to ranks: the row orders random, permute and none.

N vertices, P ranks; rank r owns floor((r + 1) N / P) - floor(r N / P) vertices, so parts differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError

MAX_RANKS = 65535
MAX_PARTS = 1024
"""Most parts of a cut that is kept."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """owner uint16 (N,): rank of each vertex; local int32 (N,): its row there; counts: rows per rank."""

    owner: npt.NDArray[np.uint16]
    local: npt.NDArray[np.int32]
    counts: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.counts)

    def owned(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the original ids of a rank's vertices, by local id."""
        ids = np.flatnonzero(self.owner == rank)
        out = np.empty_like(ids)
        out[self.local[ids]] = ids
        return out


def whole_graph(num_vertices: int) -> Assignment:
    """Return the assignment of all vertices to one rank, in their order."""
    owner, local = np.zeros(num_vertices, np.uint16), np.arange(num_vertices, dtype=np.int32)
    return Assignment(owner, local, (num_vertices,))


def part_sizes(num_vertices: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank; the larger parts are spread evenly over the ranks."""
    bounds = [num_vertices * r // ranks for r in range(ranks + 1)]
    return tuple(b - a for a, b in pairwise(bounds))


def assign(num_vertices: int, ranks: int, order: str, seed: int) -> Assignment:
    """Assign every vertex to a rank.

    random: a seeded random assignment that keeps the original order inside each part; permute: MG-GCN's random
    permutation, section 5.2; none: consecutive ranges. One rank owns all in the original order, except for permute.
    Cost: O(N) time (permute and random draw one permutation), 6 N bytes kept.
    Raises: ConfigError if the order is unknown or there are too many ranks.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"ranks must lie in 1 .. {MAX_RANKS}, got {ranks}")
    if ranks == 1 and order in ("none", "random"):
        return whole_graph(num_vertices)
    counts = part_sizes(num_vertices, ranks)
    by_position = np.repeat(np.arange(ranks, dtype=np.uint16), counts)
    if order == "none":
        local = np.concatenate([np.arange(c, dtype=np.int32) for c in counts])
        return Assignment(by_position, local, counts)
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


def concatenated_by_rank(owners: Assignment, first: int = 0) -> Assignment:
    """Return an assignment of all N vertices to one rank that keeps each rank's rows together and in order: rank `first`
    comes first, then the others by number.

    Cost: O(N), 6 N bytes.
    """
    order = [first, *(rank for rank in range(len(owners.counts)) if rank != first)]
    starts = np.empty(len(order), np.int32)
    starts[order] = np.cumsum([0, *(owners.counts[rank] for rank in order[:-1])])
    rows = starts[owners.owner]
    rows += owners.local
    return Assignment(np.zeros(rows.shape, np.uint16), rows, (sum(owners.counts),))
