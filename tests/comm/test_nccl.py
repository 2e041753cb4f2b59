"""The transport with a device: messages of a stream for which no host waits, over a stand-in; what is asked of torch."""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mggcn.backend.host import HostStream
from mggcn.comm import distributed
from mggcn.comm.base import Communicator
from mggcn.comm.nccl import Nccl as RealNccl
from mggcn.comm.nccl_settings import SETTINGS, TORCH_SETTINGS
from mggcn.errors import BackendError, CommError
from tests.comm import cases
from tests.comm.fake_nccl import TAKEN
from tests.comm.torch_nccl import RECORD, settings
from tests.comm.worlds import HANGING_S, Nccl, wait_until
from tests.emulator.contexts import Contexts

USED = {"ProcessGroupNCCL": ["eager_connect_single_device"], "Options": ["is_high_priority_stream", "_timeout"]}
"""What is asked of torch's objects besides their making: test_what_is_asked_of_torch_is_there shows that it is all."""


def summed(comm: Communicator) -> float:
    buf = torch.ones(5)
    comm.all_reduce(buf).wait()
    return float(buf[0])


def all_messages(comm: Communicator) -> list[str]:
    """What each of three calls, `check` and `synchronize` raise."""
    buf, counts = torch.ones(comm.size), [1] * comm.size
    calls = (
        lambda: comm.broadcast(buf, 0).wait(),
        lambda: comm.all_to_all(buf.clone(), buf, counts, counts).wait(),
        comm.barrier,
        comm.check,
        comm.synchronize,
    )
    return [failure(call) for call in calls]


def failed(comm: Communicator) -> str | None:
    try:
        comm.check()
    except CommError as error:
        return str(error)
    return None


def failure(call: Callable[[], object]) -> str:
    """What a call raises, soon."""
    started = time.monotonic()
    message = cases.failure(call)
    assert time.monotonic() - started < HANGING_S
    return message


def test_host_stream_is_refused() -> None:
    """Fails if host addresses could reach NCCL."""
    world = Nccl(1)
    world.start = False
    with pytest.raises(CommError, match="NCCL moves device memory"):
        world.run(lambda comm: comm.use_stream(HostStream()))


def test_a_tensor_goes_the_way_of_its_device() -> None:
    """Fails if NCCL is given the address of a host tensor, or gloo that of a device."""
    world = Nccl(2)
    world.library.deaf = {0, 1}
    for stream in world.streams:
        stream.device = "meta"

    def case(comm: Communicator) -> float:
        comm.all_reduce(torch.ones(5, device="meta"))
        if comm.rank == 0:
            assert "use_stream first" in failure(
                lambda: distributed.DistributedCommunicator(
                    comm._host,
                    comm._control,
                    0,  # type: ignore[attr-defined]
                ).all_reduce(torch.ones(5, device="meta"))
            )
        return summed(comm)

    assert world.run(case) == [2.0, 2.0]
    assert [world.library.taken[rank] for rank in range(2)] == [TAKEN["start"] + TAKEN["all_reduce"]] * 2


def test_others_are_left_alone_while_a_graph_is_recorded() -> None:
    """Fails if a recording talks to other ranks, which no repetition of it would do, or counts as a call."""
    world = Nccl(2)
    world.library.recording = lambda rank: world.streams[rank].recording
    recorded = threading.Event()

    def case(comm: Communicator) -> int:
        summed(comm)
        if comm.rank == 0:
            world.streams[0].is_capturing = lambda: True
            for _ in range(3):
                summed(comm)
            world.streams[0].is_capturing = lambda: False
            recorded.set()
        assert recorded.wait(10)
        summed(comm)
        comm.barrier()
        return comm._control.number  # type: ignore[attr-defined,no-any-return]

    assert world.run(case) == [3, 3]


def test_hang_on_the_device_is_ended_on_all_ranks() -> None:
    """Fails if a message that no rank's device finishes is waited for without end."""
    world = Nccl(3, lazy=True)
    world.library.deaf = {0, 1, 2}

    def case(comm: Communicator) -> list[str]:
        summed(comm)  # returns: no host waits for a message
        return [failure(comm.synchronize), *all_messages(comm)]

    first, *others = world.run(case, timeout_s=0.5)
    assert others == [first] * 2
    assert first == [first[0]] * 6
    assert "waited 0.5 s with all other ranks: its device stands still" in first[0]
    assert "call 1 (all_reduce of 5 x float32)" in first[0]


def test_unequal_calls_after_the_compared_ones_name_the_rank() -> None:
    """Fails if a rank that makes one call less, when calls are no longer compared, hangs the others for ever."""
    world = Nccl(3, lazy=True)
    world.checked_calls = 2

    def case(comm: Communicator) -> str:
        for _ in range(3 + (comm.rank != 1)):
            summed(comm)
        if comm.rank != 1:
            return failure(comm.synchronize)
        assert wait_until(lambda: failed(comm) is not None, 5)
        return failed(comm) or ""

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 3
    assert "waited 0.5 s for rank 1: its device stands still" in messages[0]
    assert "call 4 (all_reduce of 5 x float32)" in messages[0]


def test_rank_that_is_stuck_in_the_driver_holds_nobody_up() -> None:
    """Fails if what ends the other ranks asks a device, or waits for a rank whose driver answers nothing."""
    world = Nccl(2, lazy=True)
    world.library.deaf = {0, 1}
    stuck, over = threading.Event(), threading.Event()

    def launch() -> None:
        with world.streams[1].driver:
            stuck.set()
            over.wait(2 * HANGING_S)

    def case(comm: Communicator) -> str:
        comm.all_reduce(torch.ones(5))
        if comm.rank == 1:
            return cases.failure(comm.synchronize)  # once the driver answers
        message = failure(comm.synchronize)
        over.set()
        return message

    threading.Thread(target=launch, daemon=True).start()
    assert stuck.wait(HANGING_S)
    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 2
    assert "rank 0 waited 0.5 s" in messages[0]


@pytest.mark.parametrize("waits", [True, False])
def test_peer_that_fails_is_heard_by_a_rank_whose_device_waits(waits: bool) -> None:
    """Fails if the failure of a rank does not reach one that waits for its device, or that only asks now and then."""
    world = Nccl(2, lazy=True)
    world.checked_calls = 0

    def case(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(0.3)
            comm.abort("rank 1 failed: disk full")
            return ""
        event = comm.all_reduce(torch.ones(4))
        event.wait()
        message = failure(comm.synchronize) if waits else ""
        assert wait_until(lambda: failed(comm) is not None, 5)
        with pytest.raises(CommError, match="disk full"):
            event.wait()
        return message or failed(comm) or ""

    started = time.monotonic()
    assert world.run(case, timeout_s=20.0) == ["rank 1 failed: disk full", ""]
    assert time.monotonic() - started < 5


def test_refused_call_is_told_to_all() -> None:
    """Fails if torch's own exception gets through, or only one rank learns of it."""
    world = Nccl(2, lazy=True)

    def case(comm: Communicator) -> str:
        if comm.rank == 1:
            world.library.refused = {1: RuntimeError("NCCL error: invalid usage\nmore")}
            return failure(lambda: summed(comm))
        summed(comm)
        return failure(comm.synchronize)

    messages = world.run(case)
    assert messages == [messages[0]] * 2
    assert messages[0].startswith(
        "rank 1: the transport failed in call 1 (all_reduce of 5 x float32): NCCL error: invalid"
    )
    assert "\n" not in messages[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not while capturing")])
def test_an_error_that_others_tell_better_passes(error: Exception) -> None:
    """Fails if missing memory, or the end of a recording, is told as a failure of the transport."""
    world = Nccl(1)

    def case(comm: Communicator) -> str | None:
        world.library.refused = {0: error}
        world.streams[0].is_capturing = lambda: "capturing" in str(error)
        with pytest.raises(type(error), match=str(error)):
            summed(comm)
        return failed(comm)

    assert world.run(case) == [None]


def test_hanging_start_is_ended() -> None:
    """Fails if ranks hang in NCCL's start, which no abort can end and which has no time limit of its own."""
    world = Nccl(2)
    world.start = False
    world.library.absent = {0, 1}

    def case(comm: Communicator) -> str:
        return failure(lambda: comm.use_stream(world.streams[comm.rank]))

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 2
    assert "waited 0.5 s with all other ranks to start NCCL" in messages[0]


def test_rank_that_does_not_come_to_the_start_is_named() -> None:
    """Fails if ranks enter NCCL's start before all are known to be about to."""
    world = Nccl(3)
    world.start = False

    def case(comm: Communicator) -> str:
        time.sleep(1.2 * (comm.rank == 2))
        return failure(lambda: comm.use_stream(world.streams[comm.rank]))

    messages = world.run(case, timeout_s=0.5)
    assert messages == [messages[0]] * 3
    assert "waited 0.5 s for rank 2 to start NCCL" in messages[0]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])  # of NCCL, and of torch where it finds no GPU
def test_refused_start_is_told_to_all(kind: type[Exception]) -> None:
    """Fails if the other ranks hang in NCCL's start when one could not get there."""
    world = Nccl(2)
    world.library.refused = {1: kind("duplicate GPU")}
    world.start = False

    def case(comm: Communicator) -> str:
        return failure(lambda: comm.use_stream(world.streams[comm.rank]))

    assert world.run(case) == ["rank 1 could not start NCCL: duplicate GPU"] * 2


def test_buffer_lives_until_its_event_was_waited_for() -> None:
    """Fails if memory that NCCL still reads or writes can be given to another tensor."""
    world = Nccl(1)

    def case(comm: Communicator) -> tuple[bool, bool]:
        buf = torch.ones(4)
        alive = weakref.ref(buf)
        event = comm.all_reduce(buf)
        del buf
        comm.synchronize()
        before = alive() is not None
        event.wait()
        assert wait_until(lambda: alive() is None, 5)
        return before, alive() is not None

    assert world.run(case) == [(True, False)]


@pytest.mark.parametrize("held", [False, True])
def test_close_waits_for_the_stream_but_not_for_graphs(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if messages under way are cut off, or if a group that a CUDA graph still holds blocks the end."""
    monkeypatch.setattr(distributed, "DESTROY_S", 0.2)
    destroyed: list[Any] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    world = Nccl(2)
    if held:
        world.library.closing = lambda: world.library.killed.wait(30)

    def case(comm: Communicator) -> float:
        buf = torch.ones(4)
        world.streams[comm.rank].work.put(lambda: time.sleep(0.3))
        comm.all_reduce(buf)
        comm.close()
        return float(buf[0])

    started = time.monotonic()
    assert world.run(case) == [2.0, 2.0]
    assert 0.3 < time.monotonic() - started < HANGING_S
    assert len(destroyed) == (0 if held else 2)
    if not held:
        assert sorted(world.library.closed) == [0, 1]


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
        sends = {"all_to_all": TAKEN["all_to_all"]} if rank < 2 else {}
        assert seen[0] == {"start": TAKEN["start"]}
        assert seen[1] == {**seen[0], "broadcast": TAKEN["broadcast"]}
        assert seen[2] == {**seen[1], "all_reduce": TAKEN["all_reduce"], **sends}
        assert seen[3] == {**seen[2], "all_to_all": 2 * TAKEN["all_to_all"]}
        assert sum(seen[3].values()) == world.library.taken[rank]


def test_nothing_is_measured_while_a_graph_is_recorded_or_later() -> None:
    """Fails if the driver is asked for its memory in a recording, or in every message of a run."""
    world = Nccl(1)
    world.checked_calls = 2
    stream, asked = world.streams[0], list[int]()
    free = stream.free_bytes
    stream.free_bytes = lambda: asked.append(1) or free()  # type: ignore[method-assign,func-returns-value]

    def case(comm: Communicator) -> list[int]:
        counts = [len(asked)]
        for capturing in (True, False, False, False):
            stream.is_capturing = lambda capturing=capturing: capturing  # type: ignore[misc]
            summed(comm)
            counts.append(len(asked))
        return counts

    assert world.run(case) == [[2, 2, 4, 6, 6]]  # a recorded call is none of the first two


def test_other_free_memory_is_not_credited() -> None:
    """Fails if memory that someone else gives back during a call makes NCCL's look smaller."""
    world = Nccl(1)

    def case(comm: Communicator) -> dict[str, int]:
        world.library.greedy = {0: -100}
        summed(comm)
        return dict(comm.device_bytes())

    assert world.run(case) == [{"start": TAKEN["start"]}]


def test_no_nccl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a torch without NCCL raises something else than how to get it, or only once all ranks have met."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(BackendError, match="needs a torch that is built with NCCL"):
        distributed.connect(0, 2, "file:///nowhere", 1.0, True, "nccl")


class Strict:
    """An object of a class of torch that has what is used of it, and nothing else; it notes what is called."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        vars(self).update(_names=USED[name], _name=name, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"{self._name} has no {name}")
        return lambda *args, **kwargs: self._calls.append((name, *args, *kwargs.items()))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise AttributeError(f"{self._name} has no {name}")
        self._calls.append((name, value))
        vars(self)[name] = value


@pytest.mark.parametrize("planted", [False, True])
def test_threads_that_start_and_end_nccl_use_the_gpu_of_their_rank(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a thread of its own starts or releases NCCL on GPU 0, where every rank would make a context, or if threads
    that name no GPU are not seen to do so.
    """
    contexts, device = Contexts(monkeypatch), torch.device("cuda", 3)
    if planted:
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    backend = SimpleNamespace(eager_connect_single_device=contexts.call)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda **_: SimpleNamespace()), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **_: contexts.call() or group)  # type: ignore[func-returns-value]  # None, then
    monkeypatch.setattr(dist, "destroy_process_group", contexts.call)
    made = RealNccl({})
    opened = distributed.aside(lambda: made.open(device, timedelta(seconds=90))).result(HANGING_S)
    distributed.aside(lambda: made.close(opened)).result(HANGING_S)
    assert contexts.made == {0 if planted else 3}


def test_what_is_asked_of_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a name is used that a CUDA build of torch does not have, a thread is left on GPU 0, or a limit is lost."""
    calls: list[Any] = []
    device, limit = torch.device("cuda", 3), timedelta(seconds=90)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append(("destroy", group)))

    def options(**given: bool) -> Strict:
        made = Strict("Options", calls)
        for name, value in given.items():
            setattr(made, name, value)
        return made

    backend = Strict("ProcessGroupNCCL", calls)
    group = SimpleNamespace(_get_backend=lambda device: calls.append(("_get_backend", device)) or backend)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **given: calls.append(given) or group)
    environ = {"HOME": "/nowhere", "NCCL_MAX_NCHANNELS": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    made = RealNccl(environ)
    assert environ == {**SETTINGS, **TORCH_SETTINGS, "HOME": "/nowhere", "NCCL_MAX_NCHANNELS": "2"} | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"
    }
    assert made.open(device, limit) is group  # type: ignore[comparison-overlap]
    made.close(group)  # type: ignore[arg-type]
    given = next(call for call in calls if isinstance(call, dict))
    assert {name: given[name] for name in ("backend", "timeout")} == {"backend": "nccl", "timeout": limit}
    assert [call for call in calls if not isinstance(call, dict)] == [
        ("set_device", device),
        ("is_high_priority_stream", True),
        ("_timeout", limit),
        ("_get_backend", device),
        ("eager_connect_single_device", device),
        ("set_device", device),
        ("destroy", group),
    ]


def test_this_torch_has_what_the_record_says() -> None:
    """Fails if stubs or headers of this torch no longer have what was found in a CUDA build, or a setting is unknown."""
    record = json.loads(RECORD.read_text())
    stub = (Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text()
    for kind, names in USED.items():
        for name in names:
            assert name in record["attributes"][kind]
            assert re.search(rf"\b{name}\b", stub), f"{name} is not in the stubs of torch {torch.__version__}"
    for name in TORCH_SETTINGS:
        assert name in record["settings"]
        assert name in settings(), f"{name} is not in the headers of torch {torch.__version__}"
