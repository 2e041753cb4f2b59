"""Requests for rows: every owner learns which of its rows are wanted, by whom, and in which order they come."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.requests import Requests, finished, request_rows
from mggcn.comm.threads import run_threads

ROWS = 50
"""Rows of each rank."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_come_to_whoever_asked_for_them(ranks: int) -> None:
    """Fails if a request comes to another rank than the row's owner, is lost, or rows come in another order than said."""

    def body(comm: Communicator) -> tuple[Requests, int]:
        counted = CountingCommunicator(comm)
        rng = np.random.default_rng(913 + comm.rank)
        # The last rank asks for nothing.
        count = 0 if comm.rank == ranks - 1 > 0 else 40
        owners = rng.integers(0, ranks, count).astype(np.uint16)
        rows = rng.integers(0, ROWS, count).astype(np.int32)
        found = finished(request_rows(counted, owners, rows, (comm.rank, 7 * comm.rank)))
        sent = counted.bytes_sent
        values = 1000.0 * comm.rank + found.rows.double()
        got = torch.empty(count, dtype=torch.float64)
        comm.all_to_all(got, values, found.wanted, found.given).wait()
        expected = 1000.0 * owners + rows
        np.testing.assert_array_equal(got.numpy(), expected[found.order])
        np.testing.assert_array_equal(np.bincount(owners, minlength=ranks), found.wanted)
        return found, sent - 4 * int(np.count_nonzero(owners != comm.rank))

    found = run_threads(ranks, body, 60.0)
    for rank, (asked, sent) in enumerate(found):
        assert asked.given == [other.wanted[rank] for other, _ in found]
        assert asked.told.tolist() == [[one, 7 * one] for one in range(ranks)]
        assert sent == 24 * (ranks - 1)  # a count and two numbers to each other rank
