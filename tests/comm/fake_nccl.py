"""NCCL without GPUs: a stream is a thread, and a message is one of its jobs, which gloo carries out.

Calls return at once. A stream hangs as a GPU's does: when a rank does not come, has gone, or is told to by a test; only
the end of the process, `killed`, frees it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from mggcn.backend.events import Event
from mggcn.comm.control_store import await_keys

FREE = 10**6
TAKEN = {"start": 5000, "broadcast": 300, "all_reduce": 20, "all_to_all": 1000}
"""Bytes that a rank's device loses at the start, with the first call of a kind, and with each peer it sends to."""
LIMIT = timedelta(seconds=30)


def gloo_group(store: dist.Store, rank: int, size: int) -> Any:
    """A group that is not known to the process: its ranks may be threads."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout=LIMIT))
    return group


@final
class FakeMark:
    """A point in a stream. Who waits for it here is the host, since the host computes, but not on a lazy stream."""

    def __init__(self, lazy: bool, driver: threading.Lock) -> None:
        self.passed = threading.Event()
        self.lazy = lazy
        self.driver = driver

    def wait(self) -> None:
        if not self.lazy:
            self.passed.wait(30)

    def done(self) -> bool:
        with self.driver:
            return self.passed.is_set()


@final
class FakeStream:
    """A thread that carries out work in order; a MessageStream of the host's memory."""

    host_waits = False

    def __init__(self, library: FakeNccl, rank: int = 0, *, lazy: bool = False) -> None:
        self.library, self.rank, self.lazy = library, rank, lazy
        self.device = "cpu"
        self.is_capturing: Callable[[], bool] = lambda: False
        self.driver = threading.Lock()
        """Who holds it is inside the driver, as in a launch that finds the device's queue full; others wait."""
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="fake stream", daemon=True)
        self.thread.start()

    @property
    def recording(self) -> bool:
        return self.is_capturing()

    def _run(self) -> None:
        while (job := self.work.get()) is not None:
            job()
            del job

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        if after is not None:
            after.wait()
        self.library.current.stream = self
        try:
            yield
        finally:
            del self.library.current.stream

    def record(self) -> FakeMark:
        mark = FakeMark(self.lazy, self.driver)
        self.work.put(mark.passed.set)
        return mark

    def mark(self) -> FakeMark:
        """The rank's own work waits for its messages, so a mark behind them stands for it."""
        return self.record()

    def free_bytes(self) -> int:
        return FREE - self.library.taken[self.rank]

    def stop(self) -> None:
        self.work.put(None)
        self.thread.join(5)
        assert not self.thread.is_alive()


@final
class FakeNccl:
    """What ranks that are threads share; the sets and tables below are what tests break."""

    def __init__(self) -> None:
        self.deaf: set[int] = set()
        """Ranks whose messages do not come to their end on the device."""
        self.refused: dict[int, Exception] = {}
        """What a rank's calls raise."""
        self.recording: Callable[[int], bool] = lambda rank: False
        """Whether a rank's calls are only recorded into a graph."""
        self.absent: set[int] = set()
        """Ranks that do not get through the start: all others hang there with them."""
        self.killed = threading.Event()
        """Set by what ends a process: the threads that hang come out."""
        self.taken: Counter[int] = Counter()
        """Bytes of each rank's device that are not free."""
        self.greedy: dict[int, int] = {}
        """How many times as much as usual a rank takes."""
        self.closing: Callable[[], object] = lambda: None
        """What the release of a group waits for."""
        self.closed: list[int] = []
        self.current = threading.local()

    def of(self, store: dist.Store, rank: int, size: int) -> FakeBackend:
        return FakeBackend(self, dist.PrefixStore("device", store), rank, size)


@final
class FakeBackend:
    """The DeviceBackend of one rank."""

    def __init__(self, library: FakeNccl, store: dist.Store, rank: int, size: int) -> None:
        self.library, self.store, self.rank, self.size = library, store, rank, size

    def open(self, device: torch.device, timeout: timedelta) -> Any:
        if self.rank in self.library.refused:
            raise self.library.refused[self.rank]
        if self.rank in self.library.absent:
            self.library.killed.wait(30)
            raise RuntimeError("killed in the start")
        return FakeGroup(self.library, self.store, self.rank, self.size)

    def close(self, group: Any) -> None:
        self.library.closing()
        self.library.closed.append(self.rank)


@final
class FakeGroup:
    """What torch.distributed's functions ask of a group."""

    def __init__(self, library: FakeNccl, store: dist.Store, rank: int, size: int) -> None:
        self.library, self.store, self.rank, self.size = library, store, rank, size
        self.gloo = gloo_group(store, rank, size)
        self.connected: set[tuple[str, int]] = set()
        self.number = 0
        self._connect("start")

    def broadcast(self, tensors: list[Tensor], opts: Any) -> None:
        root = opts.rootRank
        self._post(
            opts,
            "broadcast",
            [-1],
            lambda: dist.broadcast(tensors[0], group=self.gloo, group_src=root, async_op=True),
        )

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        self._post(opts, "all_reduce", [-1], lambda: dist.all_reduce(tensors[0], group=self.gloo, async_op=True))

    def alltoall_base(self, out: Tensor, buf: Tensor, receives: list[int], sends: list[int], opts: Any) -> None:
        peers = [peer for peer, rows in enumerate(sends) if rows and peer != self.rank]
        self._post(
            opts,
            "all_to_all",
            peers,
            lambda: dist.all_to_all_single(out, buf, receives, sends, group=self.gloo, async_op=True),
        )

    all_to_all_single = alltoall_base

    def _post(self, opts: Any, kind: str, peers: Sequence[int], start: Callable[[], Any]) -> None:
        assert not opts.asyncOp, "the message would leave the comm stream"
        stream: FakeStream = self.library.current.stream
        assert stream.rank == self.rank
        if self.rank in self.library.refused:
            raise self.library.refused[self.rank]
        if self.library.recording(self.rank):
            return
        for peer in peers:
            self._connect(kind, peer)

        self.number += 1
        here = [f"{self.number}-{rank}" for rank in range(self.size)]

        def job() -> None:
            if self.rank in self.library.deaf:
                self.library.killed.wait(30)
                return
            # gloo's threads can only be joined once nothing waits for a rank that does not come.
            self.store.set(here[self.rank], "")
            while await_keys(self.store, here, 0.1):
                if self.library.killed.is_set():
                    return
            try:
                start().wait()
            except RuntimeError:  # gloo notices that a rank has gone; NCCL's kernels wait on
                self.library.killed.wait(30)

        stream.work.put(job)

    def _connect(self, kind: str, peer: int = -1) -> None:
        """Take memory of the device, once for each kind and peer."""
        if (kind, peer) not in self.connected:
            self.connected.add((kind, peer))
            self.library.taken[self.rank] += TAKEN[kind] * self.library.greedy.get(self.rank, 1)
