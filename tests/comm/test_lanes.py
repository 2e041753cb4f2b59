"""The threads transport on devices: no access without an event that orders it. See races.py for what that means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from mggcn.backend.events import DONE, Event
from mggcn.comm import rendezvous
from mggcn.comm.base import Communicator
from mggcn.comm.rendezvous import FINISHED, READY, REDUCED, ThreadWorld
from mggcn.comm.threads import run_threads
from tests.comm import cases
from tests.comm.races import Races

SIZES = (1, 2, 3, 5)


def on_lanes(size: int, case: Callable[..., Any], *args: Any) -> tuple[list[Any], Races]:
    races = Races()

    def rank(comm: Communicator) -> Any:
        with races.rank(comm.rank) as comm_stream:
            comm.use_stream(comm_stream)
            return case(comm, *args)

    return run_threads(size, rank, 30.0), races


CASES: tuple[Callable[[Communicator], Any], ...] = (
    cases.broadcast_from_each_root,
    cases.several_in_flight,
    cases.buffers_are_free_after_wait,
    cases.all_reduce_sums,
    cases.uneven_all_to_all,
    cases.row_order_in_all_to_all,
    cases.empty_tensors,
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_access_is_ordered(size: int, case: Callable[[Communicator], Any]) -> None:
    """Fails if a copy may overtake the write it reads, or a write the copy of another rank."""
    _, races = on_lanes(size, case)
    assert races.found == []


def reuse_at_once(comm: Communicator) -> None:
    """Every buffer is written before each call and after each wait, with nothing else between the two."""
    rank, size = comm.rank, comm.size
    buf, out = torch.zeros(3 * size), torch.zeros(3 * size)
    for root in range(size):
        buf.fill_(rank)
        comm.broadcast(buf, root).wait()
    for _ in range(2):
        buf.fill_(rank)
        comm.all_reduce(buf).wait()
        comm.all_to_all(out, buf, [3] * size, [3] * size).wait()
        buf.fill_(-1)
        out.fill_(-1)


@pytest.mark.parametrize("stage", [READY, REDUCED, FINISHED])
def test_a_dropped_wait_is_found(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the detector, or the cases, would let a protocol through that lacks one of its three waits."""
    assert on_lanes(3, reuse_at_once)[1].found == []
    await_stage = ThreadWorld.await_stage

    def deaf(
        self: ThreadWorld, number: int, where: rendezvous.Meeting, wanted: int, ranks: Iterable[int], waiter: int
    ) -> list[Event]:
        events = await_stage(self, number, where, wanted, ranks, waiter)
        return [DONE for _ in events] if wanted == stage else events

    monkeypatch.setattr(ThreadWorld, "await_stage", deaf)
    assert on_lanes(3, reuse_at_once)[1].found


def forgets_to_wait(comm: Communicator, writer: int) -> None:
    buf = torch.full((4,), float(comm.rank))
    event = comm.broadcast(buf, 0)
    if comm.rank == writer:
        buf.fill_(7)
    event.wait()


@pytest.mark.parametrize("writer", [0, 1])
def test_work_between_call_and_wait_is_concurrent(writer: int) -> None:
    """Fails if a program's mistakes do not show, or if a message waits for work that came after its call: no overlap."""
    assert on_lanes(2, forgets_to_wait, writer)[1].found
