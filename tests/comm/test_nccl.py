"""NCCL's communicator over a library that is not NCCL: what it asks of the library, and what it does when that fails."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mggcn.backend.host import HostStream
from mggcn.comm import nccl
from mggcn.comm.base import Communicator
from mggcn.comm.nccl import connect_nccl
from mggcn.comm.nccl_settings import SETTINGS
from mggcn.errors import BackendError, CommError
from tests.comm.fake_nccl import TAKEN, FakeNccl, FakeStream, NcclError
from tests.comm.worlds import HANGING_S, Nccl, in_threads, wait_until


def summed(comm: Communicator) -> float:
    buf = torch.ones(5)
    comm.all_reduce(buf).wait()
    return float(buf[0])


def all_messages(comm: Communicator) -> list[str]:
    """What each of three calls and `check` raise."""
    messages = []
    buf, counts = torch.ones(comm.size), [1] * comm.size
    for call in (
        lambda: comm.broadcast(buf, 0).wait(),
        lambda: comm.all_to_all(buf.clone(), buf, counts, counts).wait(),
        comm.barrier,
        comm.check,
    ):
        with pytest.raises(CommError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("tuples", [False, True], ids=["bytes", "tuple"])
def test_ranks_start_with_the_same_id(tuples: bool) -> None:
    """Fails if an id is changed on its way through the store, as CuPy 14 or as CuPy 13 makes it."""
    assert Nccl(3, tuples).run(summed) == [3.0] * 3


def meets_in_a_file(rank: int, library: FakeNccl, stream: FakeStream, path: Path) -> float:
    comm = connect_nccl(rank, 2, f"file://{path}", 20.0, lambda error: None)
    host = torch.tensor([1.0 + rank])
    comm.all_reduce(host).wait()
    comm.use_stream(stream)
    comm.all_reduce(host).wait()  # the fake's memory is the host's, the communicator expects cuda
    comm.close()
    return float(host[0])


def test_connect_meets_at_a_file_and_close_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks do not find each other without torch's process group, or NCCL is not released at the end.

    Or if NCCL's settings are not those of the process.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # what is set below is removed at the end
        monkeypatch.delenv(name)
    library = FakeNccl()
    monkeypatch.setattr(nccl, "nccl_library", lambda: library)
    streams = [FakeStream(library) for _ in range(2)]
    sums = in_threads(2, lambda rank: meets_in_a_file(rank, library, streams[rank], tmp_path / "store"))
    assert sums == [6.0, 6.0]
    assert sorted(library.log) == [(0, "destroy"), (1, "destroy")]
    assert not dist.is_initialized()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    for stream in streams:
        stream.stop()


def test_no_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine without CuPy or NCCL raises something else than how to get them."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"needs CuPy .*pip install"):
        nccl.nccl_library()
    cuda, lacking = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
    lacking.available = False  # type: ignore[attr-defined]
    cuda.nccl = lacking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", lacking)
    with pytest.raises(BackendError, match="CuPy finds no NCCL"):
        nccl.nccl_library()


def test_host_lane_is_refused() -> None:
    """Fails if host addresses could reach NCCL."""
    world = Nccl(1)
    world.start = False
    with pytest.raises(CommError, match="NCCL moves device memory"):
        world.run(lambda comm: comm.use_stream(HostStream()))


def test_host_tensors_go_through_the_store() -> None:
    """Fails if NCCL is given the address of a host tensor, before or after it has started."""
    for start in (False, True):
        world = Nccl(2)
        world.start, world.device_type = start, "cuda"
        assert world.run(summed) == [2.0, 2.0]


class Spy:
    """A store that notes which threads use it."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.users: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.users.append(threading.current_thread().name)
        return getattr(self.store, name)


def test_store_is_left_alone_while_a_graph_is_recorded() -> None:
    """Fails if a recording talks to other ranks, which no repetition of it would do; or if nothing is compared before."""
    world = Nccl(2)
    spy = Spy(world.store)
    world.store = spy  # type: ignore[assignment]

    def case(comm: Communicator) -> tuple[int, int]:
        me = threading.current_thread().name
        summed(comm)
        before = spy.users.count(me)
        world.capturing[comm.rank] = True
        for _ in range(3):
            summed(comm)
        return before, spy.users.count(me) - before

    for before, during in world.run(case):
        assert before > 0
        assert during == 0


def test_watchdog_keeps_away_from_a_recording() -> None:
    """Fails if a mark is left in a stream whose work is being recorded; or if a recording that hangs is never noticed."""
    world = Nccl(1)
    marks: list[float] = []
    stream = world.streams[0]
    leave = stream.mark
    stream.mark = lambda: marks.append(time.monotonic()) or leave()  # type: ignore[method-assign]

    def case(comm: Communicator) -> tuple[int, int, str]:
        assert wait_until(lambda: len(marks) > 2, 5)
        with stream.capturing:
            before = len(marks)
            assert wait_until(lambda: failed(comm) is not None, 5)
            return before, len(marks), failed(comm) or ""

    ((before, after, reason),) = world.run(case, timeout_s=0.4)
    assert before == after
    assert "its device stands still" in reason


def failed(comm: Communicator) -> str | None:
    try:
        comm.check()
    except CommError as error:
        return str(error)
    return None


def seconds_to_fail(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises(CommError):
        call()
    return time.monotonic() - started


def test_hang_on_the_device_is_ended_on_all_ranks() -> None:
    """Fails if a message that no rank's device finishes is waited for without end, or leaves a rank's device stuck."""
    world = Nccl(3)
    world.library.deaf = {0, 1, 2}

    def case(comm: Communicator) -> list[str]:
        assert seconds_to_fail(lambda: summed(comm)) < HANGING_S
        return all_messages(comm)

    first, *others = world.run(case, timeout_s=0.5)
    assert others == [first] * 2
    assert first == [first[0]] * 4
    assert "waited 0.5 s with all other ranks: its device stands still" in first[0]
    assert "call 1 (all_reduce of 5 x float32)" in first[0]
    assert wait_until(lambda: sorted(world.library.log) == [(rank, "abort") for rank in range(3)], 5)


def test_unequal_calls_after_the_compared_ones_name_the_rank() -> None:
    """Fails if a rank that makes one call less, when calls are no longer compared, hangs the others for ever."""
    world = Nccl(3)
    world.checked_calls = 2

    def case(comm: Communicator) -> str:
        for _ in range(3):
            summed(comm)
        if comm.rank != 1:
            assert seconds_to_fail(lambda: summed(comm)) < HANGING_S
        assert wait_until(lambda: failed(comm) is not None, 5)
        return failed(comm) or ""

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 3
    assert "waited 0.5 s for rank 1: its device stands still" in messages[0]
    assert "call 4 (all_reduce of 5 x float32)" in messages[0]


def test_peer_that_fails_frees_a_rank_whose_device_waits() -> None:
    """Fails if the failure of a rank does not reach one that waits for its device, which asks nobody anything."""
    world = Nccl(2)

    def case(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(0.3)
            comm.abort("rank 1 failed: disk full")
            return ""
        world.library.deaf = {0}
        event = comm.broadcast(torch.ones(4), 0)
        world.streams[0].record().wait()  # stands for torch.cuda.synchronize: only an abort of NCCL ends it
        with pytest.raises(CommError) as caught:
            comm.check()
        with pytest.raises(CommError, match="disk full"):
            event.wait()
        return str(caught.value)

    world.checked_calls = 0
    started = time.monotonic()
    assert world.run(case, timeout_s=20.0) == ["rank 1 failed: disk full", ""]
    assert time.monotonic() - started < 5
    assert (0, "abort") in world.library.log


def test_asynchronous_error_reaches_all_ranks() -> None:
    """Fails if an error that NCCL only tells who asks for it is not asked for."""
    world = Nccl(2)

    def case(comm: Communicator) -> list[str]:
        summed(comm)
        comm.barrier()
        world.library.broken = {1: "unhandled system error"}
        assert wait_until(lambda: failed(comm) is not None, 5)
        return all_messages(comm)

    messages = world.run(case)
    assert messages == [["rank 1: NCCL failed in call 2 or before: unhandled system error"] * 4] * 2


@pytest.mark.parametrize(("error", "text"), [(NcclError("invalid usage"), "invalid usage"), (KeyError(7), "status 7")])
def test_refused_call_is_told_to_all(error: Exception, text: str) -> None:
    """Fails if NCCL's own exception gets through, or only one rank learns of it."""
    world = Nccl(2)

    def case(comm: Communicator) -> str:
        if comm.rank == 1:
            world.library.refused = {1: error}
        with pytest.raises(CommError) as caught:
            summed(comm)
        return str(caught.value)

    assert world.run(case) == [f"rank 1: NCCL failed in call 1 (all_reduce of 5 x float32): {text}"] * 2


def test_call_that_does_not_return_is_aborted() -> None:
    """Fails if a rank that hangs inside NCCL, its stream idle, goes unnoticed or cannot be freed."""
    world = Nccl(2)
    world.library.stuck = {0}

    def case(comm: Communicator) -> str:
        with pytest.raises(CommError) as caught:
            summed(comm)
        return str(caught.value)

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 2
    assert "waited 0.5 s with all other ranks" in messages[0]
    assert "call 1 (all_reduce of 5 x float32)" in messages[0]
    assert world.ended == []


def test_hanging_start_ends_the_process() -> None:
    """Fails if ranks hang in ncclCommInitRank, which no abort can end and no time limit of NCCL's own."""
    world = Nccl(2)
    world.library.absent = {1}
    world.leave_s = 0.2
    started = time.monotonic()
    with pytest.raises(SystemExit):
        world.run(summed, timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert world.ended
    for _, message in world.ended:
        assert "waited 0.5 s with all other ranks in ncclCommInitRank" in message


def test_rank_that_does_not_come_to_the_start_is_named() -> None:
    """Fails if ranks enter ncclCommInitRank before all are known to be about to."""
    world = Nccl(3)
    world.start = False

    def case(comm: Communicator) -> str:
        time.sleep(1.2 * (comm.rank == 2))
        with pytest.raises(CommError) as caught:
            comm.use_stream(world.streams[comm.rank])
        return str(caught.value)

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 3
    assert "waited 0.5 s for rank 2 to start NCCL" in messages[0]


def test_refused_start_is_told_to_all() -> None:
    """Fails if the other ranks hang in ncclCommInitRank when one could not get there."""
    world = Nccl(2)
    world.library.refused = {1: NcclError("duplicate GPU")}
    world.leave_s = 0.2
    world.start = False

    def case(comm: Communicator) -> str:
        with pytest.raises(CommError if comm.rank == 1 else SystemExit) as caught:
            comm.use_stream(world.streams[comm.rank])
        return str(caught.value)

    assert world.run(case)[1] == "rank 1 could not start NCCL: duplicate GPU"
    assert world.ended == [(0, "rank 1 could not start NCCL: duplicate GPU")]


def test_buffer_lives_until_its_event_was_waited_for() -> None:
    """Fails if memory that NCCL still reads or writes can be given to another tensor."""
    world = Nccl(1)

    def case(comm: Communicator) -> tuple[bool, bool]:
        buf = torch.ones(4)
        alive = weakref.ref(buf)
        event = comm.all_reduce(buf)
        del buf
        before = alive() is not None
        event.wait()
        return before, alive() is not None

    assert world.run(case) == [(True, False)]


def test_calls_of_the_library_can_be_measured() -> None:
    """Fails if a message cannot be told apart on the stream, or an empty one is measured."""
    world = Nccl(2)
    world.start = False

    def case(comm: Communicator) -> int:
        entered: list[bool] = []

        @contextmanager
        def moving() -> Iterator[None]:
            entered.append(True)
            yield

        comm.use_stream(world.streams[comm.rank], moving)
        summed(comm)
        comm.broadcast(torch.ones(2), 1).wait()
        comm.broadcast(torch.ones(0), 1).wait()
        comm.barrier()
        return len(entered)

    assert world.run(case) == [2, 2]


def test_close_waits_for_the_stream_but_not_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if messages under way are cut off, or if a communicator that a CUDA graph still holds blocks the end."""
    monkeypatch.setattr(nccl, "DESTROY_S", 0.2)
    world = Nccl(2)
    held = threading.Event()

    def case(comm: Communicator) -> float:
        buf = torch.ones(4)
        world.streams[comm.rank].work.put(lambda: time.sleep(0.3))
        comm.all_reduce(buf)
        comm.close()
        return float(buf[0])

    monkeypatch.setattr("tests.comm.fake_nccl.FakeCommunicator.destroy", lambda self: held.wait(10))
    started = time.monotonic()
    assert world.run(case) == [2.0, 2.0]
    assert 0.5 < time.monotonic() - started < 5
    held.set()


def test_settings_are_made_before_the_first_call() -> None:
    """Fails if NCCL is called before its settings are there, or one that the user made is changed."""
    world = Nccl(2)
    world.environ = {"HOME": "/nowhere", "NCCL_MAX_NCHANNELS": "2"}
    seen: list[dict[str, str]] = []
    make = world.library.get_unique_id
    world.library.get_unique_id = lambda: seen.append(dict(world.environ)) or make()  # type: ignore[method-assign,func-returns-value]
    before = dict(os.environ)
    assert world.run(summed) == [2.0, 2.0]
    assert seen == [{**SETTINGS, **{"HOME": "/nowhere", "NCCL_MAX_NCHANNELS": "2"}}]
    assert dict(os.environ) == before


def test_what_nccl_takes_is_measured_by_moment() -> None:
    """Fails if the start, a kind of message or a peer is missed, counted twice, or counted for another kind."""
    world = Nccl(3)

    def case(comm: Communicator) -> list[dict[str, int]]:
        def swap(rows: list[int]) -> None:
            buf = torch.ones(sum(rows))
            comm.all_to_all(buf.clone(), buf, rows, rows).wait()

        seen = [dict(comm.device_bytes())]
        for _ in range(2):
            comm.broadcast(torch.ones(2), 1).wait()
        seen.append(dict(comm.device_bytes()))
        summed(comm)
        swap([1, 1, 0] if comm.rank < 2 else [0, 0, 1])
        seen.append(dict(comm.device_bytes()))
        swap([1, 1, 1])
        return [*seen, dict(comm.device_bytes())]

    for rank, seen in enumerate(world.run(case)):
        peers = 1 if rank < 2 else 0
        assert seen[0] == {"start": TAKEN["start"]}
        assert seen[1] == {**seen[0], "broadcast": TAKEN["broadcast"]}
        assert seen[2] == {**seen[1], "all_reduce": TAKEN["all_reduce"], "all_to_all": peers * TAKEN["all_to_all"]}
        assert seen[3] == {**seen[2], "all_to_all": 2 * TAKEN["all_to_all"]}
        assert sum(seen[3].values()) == world.library.taken[rank]


def test_nothing_is_measured_while_a_graph_is_recorded_or_later() -> None:
    """Fails if the driver is asked for its memory in a recording, or in every message of a run."""
    world = Nccl(1)
    world.checked_calls = 2
    asked: list[int] = []
    free = world.streams[0].free_bytes
    world.streams[0].free_bytes = lambda: asked.append(1) or free()  # type: ignore[method-assign,func-returns-value]

    def case(comm: Communicator) -> list[int]:
        counts = [len(asked)]
        for capturing in (True, False, False, False):
            world.capturing[0] = capturing
            summed(comm)
            counts.append(len(asked))
        return counts

    assert world.run(case) == [[2, 2, 4, 6, 6]]  # a recorded call is none of the first two


def test_other_free_memory_is_not_credited() -> None:
    """Fails if memory that someone else gives back during a call makes NCCL's look smaller."""
    world = Nccl(1)

    def case(comm: Communicator) -> dict[str, int]:
        start = comm._nccl.allReduce  # type: ignore[attr-defined]

        def freeing(*arguments: Any) -> None:
            world.library.taken[0] -= 10**5
            start(*arguments)

        comm._nccl.allReduce = freeing  # type: ignore[attr-defined]
        summed(comm)
        return dict(comm.device_bytes())

    assert world.run(case) == [{"start": TAKEN["start"], "all_reduce": 0}]
