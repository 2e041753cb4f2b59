from __future__ import annotations

import threading
import time

import pytest
import torch

from mggcn.comm.base import Communicator
from mggcn.comm.rendezvous import ThreadWorld
from mggcn.comm.threads import ThreadCommunicator, run_threads
from mggcn.errors import CommError, GraphError
from tests.comm import cases
from tests.comm.worlds import HANGING_S


def test_all_reduce_sums_in_rank_order() -> None:
    """Fails if the bits depend on who comes first, or on how the sum is cut in slices."""

    def rank(comm: Communicator) -> torch.Tensor:
        buf = cases.summand(comm.rank, 1001)
        time.sleep(0.01 * (comm.size - comm.rank))
        comm.all_reduce(buf).wait()
        return buf

    want = cases.summand(0, 1001)
    for peer in range(1, 5):
        want += cases.summand(peer, 1001)
    for got in run_threads(5, rank, 10.0):
        assert torch.equal(got, want)


def test_nothing_moves_before_wait() -> None:
    """Fails if a copy is made at once: a program that forgets to wait would pass its tests."""

    def rank(comm: Communicator) -> float:
        buf = torch.full((3,), float(comm.rank))
        event = comm.broadcast(buf, 0)
        time.sleep(0.05)
        early = float(buf[0])
        event.wait()
        return early

    assert run_threads(3, rank, 10.0) == [0.0, 1.0, 2.0]


def test_waiting_for_a_later_event_first_is_no_deadlock() -> None:
    """Fails if a rank that waits out of order, or meets in a barrier with an event open, blocks the others."""

    def rank(comm: Communicator) -> list[float]:
        one, two = torch.full((3,), comm.rank + 1.0), torch.full((3,), comm.rank + 5.0)
        first, second = comm.broadcast(one, 0), comm.broadcast(two, 1)
        if comm.rank == 1:
            comm.barrier()
            second.wait()
            first.wait()
        else:
            first.wait()
            second.wait()
            comm.barrier()
        return [float(one[0]), float(two[0])]

    assert run_threads(2, rank, 5.0) == [[1.0, 6.0]] * 2


def test_first_real_error_is_raised() -> None:
    """Fails if a CommError of a lower rank, which follows from the error, is raised in its stead."""

    def rank(comm: Communicator) -> None:
        if comm.rank == 2:
            time.sleep(0.1)
            raise GraphError("row 7 is torn")
        comm.all_reduce(torch.ones(3)).wait()

    started = time.monotonic()
    with pytest.raises(GraphError, match="row 7 is torn") as caught:
        run_threads(3, rank, 60.0)
    assert time.monotonic() - started < HANGING_S
    assert "raised on rank 2 of 3" in caught.value.__notes__
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_others_learn_the_reason() -> None:
    """Fails if the ranks that wait are told nothing about who failed."""
    reasons: list[str] = []

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            raise GraphError("row 7 is torn")
        try:
            comm.barrier()
        except CommError as error:
            reasons.append(str(error))

    with pytest.raises(GraphError):
        run_threads(2, rank, 60.0)
    assert reasons == ["rank 0 failed: GraphError: row 7 is torn"]


def test_rank_that_never_returns_is_left_behind() -> None:
    """Fails if one rank that hangs in its own code hides the error of another."""
    release = threading.Event()

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            raise GraphError("row 7 is torn")
        release.wait(3 * HANGING_S)

    started = time.monotonic()
    with pytest.raises(GraphError):
        run_threads(2, rank, 0.3)
    assert time.monotonic() - started < HANGING_S
    release.set()


def test_finished_meetings_are_forgotten() -> None:
    """Fails if the control store keeps the buffers of past calls alive."""
    world = ThreadWorld(1, 5.0)
    comm = ThreadCommunicator(world, 0)
    for _ in range(5):
        comm.all_reduce(torch.ones(3)).wait()
        comm.broadcast(torch.ones(3), 0).wait()
        comm.all_to_all(torch.ones(3), torch.ones(3), [3], [3]).wait()
        comm.barrier()
    assert world._meetings == {}
