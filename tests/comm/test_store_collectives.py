from __future__ import annotations

import pytest
import torch

from mggcn.comm import store_collectives
from mggcn.comm.base import Communicator
from mggcn.errors import CommError
from tests.comm import cases
from tests.comm.worlds import Store


def test_sums_are_formed_in_rank_order() -> None:
    """Fails if the bits depend on who comes first."""

    def rank(comm: Communicator) -> torch.Tensor:
        buf = cases.summand(comm.rank, 1001)
        comm.all_reduce(buf).wait()
        return buf

    want = cases.summand(0, 1001)
    for peer in range(1, 4):
        want += cases.summand(peer, 1001)
    for got in Store(4).run(rank):
        assert torch.equal(got, want)


def test_large_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a store is flooded with what belongs on a device."""
    monkeypatch.setattr(store_collectives, "MAX_BYTES", 16)

    def rank(comm: Communicator) -> float:
        buf = torch.ones(4)
        comm.all_reduce(buf).wait()
        comm.all_reduce(torch.ones(5)).wait()
        return float(buf[0])

    with pytest.raises(CommError, match="20 bytes of host memory; at most 16 go through the store"):
        Store(1).run(rank)
