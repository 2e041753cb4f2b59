"""Macrobatches: batches of consecutive steps whose rows are fetched from their owners together, and what that takes.

N vertices, P ranks, M steps of an epoch, B batches of a macrobatch. Source: BatchGNN, section 3 and appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

COUNTS: Final = 4
"""What ranks tell each other of a macrobatch beside how many rows they ask for: rows that its batches read of this rank's
own, of those that it keeps, and of other ranks', and how many are fetched."""
PART_COUNTS: Final = COUNTS + 3
"""Where edges are drawn by their owners, also: vertices around which this rank has drawn for itself, those for which it has
asked others, and edges that came from these."""
EXCHANGES: Final = 3
"""Messages of a relay, one after the other: counts, ids, rows."""
COUNT_BYTES: Final = 8 * (1 + COUNTS)
ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Macrobatches:
    """The macrobatches of a run, numbered through its epochs; the last one of an epoch may have fewer batches.

    steps: M; size: B, 0 for all of an epoch.
    """

    steps: int
    size: int

    @property
    def batches(self) -> int:
        """The most batches of one."""
        return min(self.size or self.steps, self.steps)

    @property
    def per_epoch(self) -> int:
        """Macrobatches of an epoch, M / B rounded up."""
        return -(-self.steps // self.batches)

    def of(self, step: int) -> int:
        """Return the number of the one that has a step, counted from the run's first."""
        epoch, at = divmod(step, self.steps)
        return epoch * self.per_epoch + at // self.batches

    def span(self, number: int) -> range:
        """Return the steps of one."""
        epoch, at = divmod(number, self.per_epoch)
        first, last = at * self.batches, min((at + 1) * self.batches, self.steps)
        return range(epoch * self.steps + first, epoch * self.steps + last)

    def of_epoch(self, epoch: int) -> range:
        """Return the numbers of those of an epoch."""
        return range(epoch * self.per_epoch, (epoch + 1) * self.per_epoch)

    def at_once(self, ahead: int) -> int:
        """Return the most of them that a step and so many behind it belong to."""
        first = np.arange(self.steps)
        epoch, at = np.divmod(first + ahead, self.steps)
        return int((epoch * self.per_epoch + at // self.batches - first // self.batches).max()) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchPlan:
    """The rows that a rank keeps of other ranks, and the memory and messages of fetching them.

    row_bytes: of a row on its way, D numbers of the type of activations; rows: the most that a macrobatch fetches; at_once:
    macrobatches whose rows are held; cached: rows that are kept throughout; owned: vertices of this rank.
    """

    num_vertices: int
    ranks: int
    owned: int
    row_bytes: int
    rows: int
    at_once: int
    cached: int = 0

    @property
    def held(self) -> int:
        """Rows of other ranks that are held."""
        return self.cached + self.at_once * self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of a rank: rows that are held, and that are on their way to others; where they are; which are read.

        A vertex takes 4 bytes for the place of its row, 1 for whose it is, 1 to collect those of a macrobatch; a row that
        is fetched 56 while it is put in order and on its way, one that another rank asks for 16.
        """
        fetched = max(self.rows, self.cached)
        asked = (self.ranks - 1) * min(self.owned, fetched)
        return self.held * self.row_bytes + asked * (self.row_bytes + 16) + 56 * fetched + 6 * self.num_vertices


def bytes_fetched(relays: int, rows: int, row_bytes: int, ranks: int) -> int:
    """Return the bytes that all ranks send in so many relays that fetch so many rows together.

    Each rank tells each other what it asks for, then sends ids; rows come back. The same as eq. 2 and 3 of BatchGNN with
    these as C and S, and without topology, which every rank reads by itself.
    """
    return relays * ranks * (ranks - 1) * COUNT_BYTES + rows * (ID_BYTES + row_bytes)


def cache_bytes(inner: int, new: int, edges: int, row_bytes: int) -> tuple[int, int]:
    """Return BatchGNN's eq. 4 and eq. 5 in bytes: what the last hop of batches reads without a cache of sums, and with it.

    inner: |V|, rows for which the hop draws; new: |N(V)|, rows that it adds; edges: those that it draws. A vertex and an
    edge are ID_BYTES of topology.
    """
    without = (inner + new) * (row_bytes + ID_BYTES) + edges * ID_BYTES
    return without, inner * (2 * row_bytes + ID_BYTES)
