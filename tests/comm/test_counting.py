from __future__ import annotations

import pytest
import torch

from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.errors import CommError
from tests.comm.worlds import Nccl, Threads, World


def counted(comm: Communicator) -> tuple[int, int]:
    counting = CountingCommunicator(comm)
    counting.broadcast(torch.ones(6), 1).wait()
    counting.all_reduce(torch.ones(9, dtype=torch.float64)).wait()
    sends = [3 * comm.rank, 1, 2]
    receives = [3 * peer if comm.rank == 0 else comm.rank for peer in range(3)]
    out = torch.zeros(sum(receives), 5, dtype=torch.bfloat16)
    counting.all_to_all(out, torch.ones(sum(sends), 5, dtype=torch.bfloat16), receives, sends).wait()
    counting.barrier()
    return counting.bytes_sent, counting.messages


@pytest.mark.parametrize("world", [Threads(3), Nccl(3)], ids=["threads", "nccl"])
def test_counts_what_leaves_a_rank(world: World) -> None:
    """Fails if a transport is counted differently, or rows that stay are counted."""
    ring = 2 * 72 * 2 // 3
    rows = [1 + 2, 3 + 2, 6 + 1]
    assert world.run(counted) == [(48 * (rank == 1) + ring + rows[rank] * 10, 3) for rank in range(3)]


def test_failures_get_through() -> None:
    """Fails if `check` of the wrapped communicator is lost."""

    def case(comm: Communicator) -> None:
        counting = CountingCommunicator(comm)
        counting.check()
        counting.abort("disk full")
        with pytest.raises(CommError, match="disk full"):
            counting.check()

    Threads(1).run(case)
