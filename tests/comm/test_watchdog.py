from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from mggcn.comm.control_store import ControlStore
from mggcn.comm.watchdog import Heartbeat, Watchdog
from mggcn.errors import CommError
from tests.comm.fake_nccl import FakeNccl, FakeStream
from tests.comm.worlds import HANGING_S, wait_until


class Scene:
    """A watchdog of rank 0 of 1, and what it did."""

    def __init__(self, timeout_s: float = 10.0, leave_s: float = 0.2) -> None:
        self.control = ControlStore(dist.HashStore(), 0, 1, timeout_s)
        self.released = threading.Event()
        self.ended: list[str] = []
        self.dog = Watchdog(self.control, lambda error: self.ended.append(str(error)), tick_s=0.02, leave_s=leave_s)
        self.dog.start(self.released.set)

    def failed(self) -> bool:
        return wait_until(lambda: self.control.failure is not None, 5)


def test_what_a_look_finds_is_told_and_frees_the_device() -> None:
    """Fails if a problem that only the watchdog sees stays with it."""
    scene = Scene()
    scene.dog.add(lambda: None)
    time.sleep(0.1)
    assert scene.control.failure is None
    scene.dog.add(lambda: "the device is gone")
    assert scene.failed()
    assert scene.control.failure == "the device is gone"
    assert scene.released.wait(5)


def test_look_that_raises_is_a_failure() -> None:
    """Fails if the watchdog dies of a device in trouble, and leaves its rank alone with it."""

    def look() -> str | None:
        raise RuntimeError("an illegal memory access was encountered")

    scene = Scene()
    scene.dog.add(look)
    assert scene.failed()
    assert "its device cannot be watched any more: an illegal memory access" in str(scene.control.failure)
    assert scene.released.wait(5)


def test_rank_that_does_not_come_back_is_ended_and_one_that_does_is_not() -> None:
    """Fails if a process hangs for ever after a failure, or is killed although its own thread reports it."""
    for told in (False, True):
        scene = Scene()
        scene.control.abort("disk full")
        if told:
            try:
                scene.control.check()
            except CommError:
                pass
        time.sleep(0.6)
        assert scene.ended == ([] if told else ["disk full"])
        assert scene.released.is_set()
        scene.dog.stop()


def test_release_that_hangs_does_not_hold_the_end_up() -> None:
    """Fails if an abort that hangs, as NCCL's does while a CUDA graph holds it, stops the watchdog."""
    held = threading.Event()
    ended: list[CommError] = []
    control = ControlStore(dist.HashStore(), 0, 1, 10.0)
    dog = Watchdog(control, ended.append, tick_s=0.02, leave_s=0.2)

    def release() -> None:
        held.wait(10)

    dog.start(release)
    control.abort("disk full")
    assert wait_until(lambda: bool(ended), 5)
    held.set()


def test_inside_limits_only_what_it_guards() -> None:
    """Fails if a call that returned in time counts on, or one that hangs is not named."""
    scene = Scene(timeout_s=0.3)
    with scene.dog.inside("a quick call"):
        time.sleep(0.05)
    time.sleep(0.5)
    assert scene.control.failure is None
    with scene.dog.inside("ncclCommInitRank"):
        assert scene.failed()
    assert scene.control.failure == "rank 0 waited 0.3 s with all other ranks in ncclCommInitRank"


def test_stop_ends_the_thread() -> None:
    """Fails if a watchdog outlives its communicator."""
    scene = Scene()
    started = time.monotonic()
    scene.dog.stop()
    assert time.monotonic() - started < HANGING_S
    scene.control.abort("too late")
    time.sleep(0.1)
    assert not scene.released.is_set()


def test_heart_beats_while_the_stream_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a device that is never idle, yet moves, counts as standing still; or if standing still does not."""
    monkeypatch.setattr(threading.current_thread(), "name", "watchdog of the test")
    stream = FakeStream(FakeNccl())
    heart = Heartbeat(stream, ControlStore(dist.HashStore(), 0, 1, 0.5))
    give_up_at = time.monotonic() + 1.5
    while time.monotonic() < give_up_at:
        while stream.work.qsize() < 3:
            stream.work.put(lambda: time.sleep(0.02))
        assert heart.look() is None
        time.sleep(0.02)
    held = threading.Event()
    stream.work.put(lambda: held.wait(10))
    assert wait_until(lambda: heart.look() is not None, 5)
    held.set()
    stream.stop()
