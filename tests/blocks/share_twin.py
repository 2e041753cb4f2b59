"""The part of a rank of a block that ranks share, by NumPy: what cpu/shared.cpp does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[Any]


@dataclass(frozen=True)
class Reads:
    """read bool (P, columns): which columns of a block each rank reads. of_row, of_column: the rank of each."""

    indptr: Vector
    indices: Vector
    of_row: Vector
    of_column: Vector
    ranks: int

    @property
    def read(self) -> npt.NDArray[np.bool_]:
        read = np.zeros((self.ranks, self.of_column.size), bool)
        read[np.repeat(self.of_row, np.diff(self.indptr)), self.indices] = True
        return read

    @property
    def exchanged(self) -> npt.NDArray[np.int64]:
        counts = np.stack([self.read[:, self.of_column == owner].sum(1) for owner in range(self.ranks)], 1)
        np.fill_diagonal(counts, 0)
        return counts

    def part(self, rank: int, *, gathered: bool) -> dict[str, Vector]:
        """The arrays of a Part, and places of columns by their numbers."""
        mine = self.of_column == rank
        far = np.flatnonzero(self.read[rank] & ~mine)
        if not gathered:
            far = far[np.argsort(self.of_column[far], kind="stable")]
        number = np.full(self.of_column.size, -1)
        number[mine] = np.arange(mine.sum())
        number[far] = np.arange(far.size) + (mine.sum() if gathered else 0)
        rows, lengths = self.of_row == rank, np.diff(self.indptr)
        entries = np.flatnonzero(np.repeat(rows, lengths))
        starts = np.concatenate([[0], np.cumsum(lengths[rows])])
        own = mine[self.indices[entries]] | gathered
        near = np.concatenate([[0], np.cumsum(own)])[starts]
        order = np.concatenate([entries[own], entries[~own]])
        others = self.read[:, mine]
        others[rank] = False
        places = np.concatenate([np.flatnonzero(mine), far]) if gathered else np.flatnonzero(mine)
        return {
            "near": near,
            "far": starts - near,
            "indices": number[self.indices[order]],
            "entries": order,
            "sent": np.nonzero(others)[1][: 0 if gathered else None],
            "places": places,
        }
