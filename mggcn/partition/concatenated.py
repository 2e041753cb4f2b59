"""All vertices as the rows of one matrix, in the order in which messages between all ranks lay them."""

from __future__ import annotations

import numpy as np

from mggcn.partition.order import Assignment


def concatenated_by_rank(owners: Assignment, first: int = 0) -> Assignment:
    """Return an assignment of all N vertices to one rank: those of rank `first` in order of their rows there, then of the
    other ranks in their order.

    Cost: O(N), 6 N bytes.
    """
    order = [first, *(rank for rank in range(len(owners.counts)) if rank != first)]
    starts = np.empty(len(order), np.int32)
    starts[order] = np.cumsum([0, *(owners.counts[rank] for rank in order[:-1])])
    rows = starts[owners.owner]
    rows += owners.local
    return Assignment(np.zeros(rows.shape, np.uint16), rows, (sum(owners.counts),))
