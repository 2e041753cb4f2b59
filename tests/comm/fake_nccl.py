"""NCCL without GPUs: the interface of cupy.cuda.nccl for ranks that are threads, on host memory.

Calls return at once; a stream's own thread carries them out in order, and meets the other ranks there, as NCCL's kernels
do. It hangs as they do, too: when a rank does not come, asks for something else, or is told to by a test; only an abort
of the rank's own communicator frees it, and leaves the buffers as they are.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from mggcn.backend.events import Event

DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}


FREE = 10**6
TAKEN = {"start": 5000, "broadcast": 300, "all_reduce": 20, "all_to_all": 1000}
"""Bytes that a rank's device loses at the start, with the first call of a kind, and with each peer it sends to."""


class NcclError(RuntimeError):
    pass


@final
class FakeMark:
    """A point in a stream: whoever waits here for it is the host, since the host computes."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def wait(self) -> None:
        self.passed.wait(30)

    def done(self) -> bool:
        return self.passed.is_set()


@final
class FakeStream:
    """A thread that carries out work in order; a DeviceStream of the host's memory."""

    def __init__(self, library: FakeNccl, rank: int = 0) -> None:
        self.library, self.rank = library, rank
        self.handle = library.add_stream(self)
        self.capturing = threading.Lock()
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="fake stream", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self.work.get()) is not None:
            job()

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        if after is not None:
            after.wait()
        yield

    def record(self) -> FakeMark:
        mark = FakeMark()
        self.work.put(mark.passed.set)
        return mark

    def mark(self) -> FakeMark:
        """The rank's own work waits for its messages, so a mark behind them stands for it."""
        if threading.current_thread().name.startswith("watchdog"):
            assert self.capturing.locked()
        return self.record()

    def free_bytes(self) -> int:
        return FREE - self.library.taken[self.rank]

    def stop(self) -> None:
        self.work.put(None)
        self.thread.join(5)
        assert not self.thread.is_alive()


@dataclass
class Room:
    """Where the ranks of one unique id meet."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    arrived: set[int] = field(default_factory=set)
    operations: dict[int, dict[int, tuple[Any, bytes]]] = field(default_factory=dict)
    mail: dict[tuple[int, int], deque[bytes]] = field(default_factory=dict)


@final
class FakeNccl:
    """The library; the sets and tables below are what tests break."""

    NCCL_SUM = 0
    NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 1, 2, 4
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9

    def __init__(self, *, tuples: bool = False) -> None:
        self.tuples = tuples
        """Whether ids are tuples of signed bytes, as in CuPy 13."""
        self.deaf: set[int] = set()
        """Ranks whose messages do not come to their end on the device."""
        self.stuck: set[int] = set()
        """Ranks whose calls do not return."""
        self.broken: dict[int, str] = {}
        """What check_async_error raises for a rank."""
        self.refused: dict[int, Exception] = {}
        """What a rank's calls raise."""
        self.recording: Callable[[int], bool] = lambda rank: False
        """Whether a rank's calls are only recorded into a graph."""
        self.absent: set[int] = set()
        """Ranks that do not get through ncclCommInitRank: all others hang there with them."""
        self.killed = threading.Event()
        """Set by what ends a process: the threads that hang come out."""
        self.taken: Counter[int] = Counter()
        """Bytes of each rank's device that are not free."""
        self.greedy: dict[int, int] = {}
        """How many times as much as usual a rank takes."""
        self.log: list[tuple[int, str]] = []
        self.rooms: dict[bytes, Room] = {}
        self.streams: dict[int, FakeStream] = {}
        self._handles = itertools.count(1000)
        self._lock = threading.Lock()
        self._group = threading.local()

    def add_stream(self, stream: FakeStream) -> int:
        with self._lock:
            handle = next(self._handles)
            self.streams[handle] = stream
            return handle

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        made = secrets.token_bytes(128)
        self.rooms[made] = Room()
        return tuple(ctypes.c_byte(value).value for value in made) if self.tuples else made

    def NcclCommunicator(self, ndev: int, unique_id: Any, rank: int) -> FakeCommunicator:  # noqa: N802
        assert isinstance(unique_id, tuple if self.tuples else bytes)
        assert len(unique_id) == 128
        room = self.rooms[bytes(value % 256 for value in unique_id)]
        if rank in self.refused:
            raise self.refused[rank]
        comm = FakeCommunicator(self, room, ndev, rank)
        with room.changed:
            if rank not in self.absent:
                room.arrived.add(rank)
        give_up_at = time.monotonic() + 30
        while len(room.arrived) < ndev:
            if self.killed.is_set() or time.monotonic() > give_up_at:
                raise SystemExit("killed in ncclCommInitRank")
            time.sleep(0.002)
        return comm

    def groupStart(self) -> None:  # noqa: N802
        assert getattr(self._group, "jobs", None) is None
        self._group.jobs = []

    def groupEnd(self) -> None:  # noqa: N802
        jobs, self._group.jobs = self._group.jobs, None
        for stream in {stream for stream, _, _ in jobs}:
            steps = [step for where, waits, step in sorted(jobs, key=lambda job: job[1]) if where == stream]
            self.streams[stream].work.put(lambda steps=steps: [step() for step in steps])

    def grouped(self, stream: int, waits: bool, step: Callable[[], object]) -> None:
        """Add to this thread's group; what does not wait for others goes first, since a group is one operation."""
        self._group.jobs.append((stream, waits, step))


@final
class FakeCommunicator:
    """One rank's communicator, with the methods and argument order of CuPy's."""

    def __init__(self, library: FakeNccl, room: Room, size: int, rank: int) -> None:
        self.library, self.room, self.size, self.rank = library, room, size, rank
        self.aborted = False
        self.number = itertools.count()
        self.connected: set[tuple[str, int]] = set()
        self._connect("start")

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        nbytes = count * DTYPES[dtype].itemsize

        def finish(texts: dict[int, bytes]) -> None:
            ctypes.memmove(target, texts[root], nbytes)

        self._collective(("broadcast", count, dtype, root), source, nbytes, finish, stream)

    def allReduce(  # noqa: N802
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        assert op == FakeNccl.NCCL_SUM
        nbytes = count * DTYPES[dtype].itemsize

        def finish(texts: dict[int, bytes]) -> None:
            values = [torch.frombuffer(bytearray(texts[rank]), dtype=DTYPES[dtype]) for rank in range(self.size)]
            for value in values[1:]:
                values[0] += value
            ctypes.memmove(target, values[0].data_ptr(), nbytes)

        self._collective(("all_reduce", count, dtype), source, nbytes, finish, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert count > 0
        assert peer != self.rank
        self._enter()
        self._connect("all_to_all", peer)

        def step() -> None:
            text = ctypes.string_at(source, count * DTYPES[dtype].itemsize)
            with self.room.changed:
                self.room.mail.setdefault((self.rank, peer), deque()).append(text)
                self.room.changed.notify_all()

        if not self.library.recording(self.rank):
            self.library.grouped(stream, False, step)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert count > 0
        assert peer != self.rank
        self._enter()

        def step() -> None:
            with self.room.changed:
                box = self.room.mail.setdefault((peer, self.rank), deque())
                if self._await(lambda: bool(box)):
                    text = box.popleft()
                    assert len(text) == count * DTYPES[dtype].itemsize
                    ctypes.memmove(target, text, len(text))

        if not self.library.recording(self.rank):
            self.library.grouped(stream, True, step)

    def abort(self) -> None:
        with self.room.changed:
            self.aborted = True
            self.library.log.append((self.rank, "abort"))
            self.room.changed.notify_all()

    def destroy(self) -> None:
        self.library.log.append((self.rank, "destroy"))

    def check_async_error(self) -> None:
        if self.rank in self.library.broken:
            raise NcclError(self.library.broken[self.rank])

    def _connect(self, kind: str, peer: int = -1) -> None:
        """Take memory of the device, once for each kind and peer."""
        if (kind, peer) not in self.connected:
            self.connected.add((kind, peer))
            self.library.taken[self.rank] += TAKEN[kind] * self.library.greedy.get(self.rank, 1)

    def _enter(self) -> None:
        """What may happen to a call before it is on the stream."""
        if self.rank in self.library.refused:
            raise self.library.refused[self.rank]
        if self.rank in self.library.stuck:
            with self.room.changed:
                assert self.room.changed.wait_for(lambda: self.aborted, 30)
            raise NcclError("aborted")

    def _await(self, condition: Callable[[], bool]) -> bool:
        """Hold the stream until `condition`; False after an abort. The caller holds the lock of the room."""
        deaf = self.rank in self.library.deaf
        assert self.room.changed.wait_for(lambda: self.aborted or (not deaf and condition()), 30)
        return not self.aborted

    def _collective(
        self, what: tuple[Any, ...], source: int, nbytes: int, finish: Callable[[dict[int, bytes]], None], stream: int
    ) -> None:
        assert nbytes > 0
        self._enter()
        if self.library.recording(self.rank):
            return
        self._connect(what[0])
        number = next(self.number)

        def job() -> None:
            with self.room.changed:
                posted = self.room.operations.setdefault(number, {})
                posted[self.rank] = (what, ctypes.string_at(source, nbytes))
                self.room.changed.notify_all()
                if self._await(lambda: [each for each, _ in posted.values()] == [what] * self.size):
                    finish({rank: text for rank, (_, text) in posted.items()})

        self.library.streams[stream].work.put(job)
