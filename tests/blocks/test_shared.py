"""A rank's part of a shared block is that of the twin, for one word of ranks and for two."""

from __future__ import annotations

import numpy as np
import pytest

from mggcn.blocks.block import Capacity
from mggcn.blocks.sampler import BatchTooLargeError
from mggcn.blocks.shared import Share, SharePlan
from tests.blocks.share_twin import Reads, Vector


def block(rows: int, columns: int, share: float, seed: int) -> tuple[Vector, Vector]:
    """Row pointers and columns of a random block; some rows are empty."""
    rng = np.random.default_rng(seed)
    edges = rng.random((rows, columns)) < share * rng.random((rows, 1)) ** 2
    return np.concatenate([[0], np.cumsum(edges.sum(1))]), np.nonzero(edges)[1].astype(np.int32)


def plan_of(size: Capacity, whole: Capacity, ranks: int, *, exchanged: bool) -> SharePlan:
    return SharePlan(
        capacities=(size,), together=(whole,), exchanged=(exchanged,), ranks=ranks, transposed=1, value_bytes=4
    )


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5, 70])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_parts_are_those_of_the_twin(share: float, ranks: int, exchanged: bool) -> None:
    """Fails if a rank's edges, numbers, places or messages are others, or ranks disagree about a message."""
    rows, columns = 40, 90
    indptr, indices = block(rows, columns, share, ranks)
    rng = np.random.default_rng(ranks)
    of_row, of_column = (rng.integers(0, ranks, count).astype(np.uint16) for count in (rows, columns))
    edges = indices.size + 1
    whole = Capacity(rows, columns, edges)
    size = Capacity.of((rows, columns, edges, columns, columns * ranks, rows, rows * ranks, edges))
    plan, twin = plan_of(size, whole, ranks, exchanged=exchanged), Reads(indptr, indices, of_row, of_column, ranks)
    messages = np.zeros((ranks, ranks), np.int64)
    for rank in range(ranks):
        one = Share(plan, rank)
        found, wanted = one.cut(0, "", indptr, indices, of_row, of_column), twin.part(rank, gathered=not exchanged)
        for name in ("near", "far", "indices", "entries", "sent"):
            np.testing.assert_array_equal(getattr(found, name), wanted[name], err_msg=name)
        assert found.num_columns == wanted["places"].size
        np.testing.assert_array_equal(one.arrays["places"][: found.num_columns], wanted["places"])
        np.testing.assert_array_equal(found.received_from, twin.exchanged[rank])
        messages[rank] = found.sent_to
        assert one.count(indptr, indices, of_row, of_column).edges.sum() == indices.size
    np.testing.assert_array_equal(messages.T, twin.exchanged)


@pytest.mark.parametrize("what", ["sources", "edges", "received", "sent"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_part_that_is_too_large_is_refused_on_every_rank(what: str, rank: int) -> None:
    """Fails if a rank goes on where another has not the room that was planned."""
    indptr, indices = block(40, 90, 1.0, 7)
    of_row = np.repeat(np.arange(3), [30, 6, 4]).astype(np.uint16)
    of_column = np.repeat(np.arange(3), [50, 20, 20]).astype(np.uint16)
    size = {"targets": 40, "sources": 90, "edges": indices.size, "received": 90, "sent": 180} | {what: 10}
    plan = plan_of(Capacity(**size), Capacity(40, 90, indices.size), 3, exchanged=True)
    with pytest.raises(BatchTooLargeError, match="10"):
        Share(plan, rank).cut(0, "", indptr, indices, of_row, of_column)
