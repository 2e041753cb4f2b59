"""P logical ranks as threads of one process: for tests, dry runs, and several ranks on one GPU.

Nothing moves when an operation is called: it only posts its buffer where the ranks meet. In `wait` the ranks' threads
meet, and each moves its share in its comm stream. On the host that is the copy itself, so code that touches a buffer too
early fails here too. On a GPU the threads only start copies and leave events behind; no thread waits for the device:

    a buffer may be read from (READY), a slice holds its sum (REDUCED), a rank has all it requested (FINISHED)

are each an event on the comm stream of the rank that reports it, and a rank that depends on it orders its own comm stream
after that event.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from torch import Tensor

from mggcn.backend.host import HostStream
from mggcn.comm.base import DONE, CommStream, Communicator, Event
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call
from mggcn.comm.rendezvous import FINISHED, POSTED, READY, REDUCED, Meeting, ThreadWorld
from mggcn.errors import CommError

T = TypeVar("T")


@final
class ThreadCommunicator:
    """One rank of a ThreadWorld."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank: int = rank
        self.size: int = world.size
        self._comm_stream: CommStream = HostStream()
        self._number = 0
        self._pending: deque[_ThreadEvent] = deque()

    def use_stream(self, comm_stream: CommStream) -> None:
        self._comm_stream = comm_stream

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        return self._post(broadcast_call(buf, root, self.size), buf, self._copy_from_root, after)

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        return self._post(all_reduce_call(buf), buf, self._sum_in_place, after)

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        call = all_to_all_call(out, buf, out_rows, buf_rows, self.size)
        return self._post(call, buf, lambda number, meeting: self._collect_rows(number, meeting, out), after)

    def barrier(self) -> None:
        self._post(Call(op="barrier"), Tensor(), self._meet, DONE).wait()

    def check(self) -> None:
        self._world.check()

    def synchronize(self) -> None:
        self._world.check()

    def device_bytes(self) -> dict[str, int]:
        return {}

    def abort(self, reason: str) -> None:
        self._world.abort(reason)

    def close(self) -> None:
        """Meet once more, so that no rank leaves while another still reads its buffers."""
        self.barrier()

    def complete(self, event: _ThreadEvent) -> None:
        """Perform this rank's pending operations in the order of the calls, up to `event`.

        Every rank works through the same sequence, so the earliest unfinished operation can always run: no deadlock.
        """
        self._world.check()
        while event.over is None:
            # The caller may wait for a later call first: those before it run now, in the order that all ranks share.
            head = self._pending.popleft()
            try:
                with self._comm_stream.working(head.after):
                    head.over = head.perform()
            except BaseException as error:
                self._world.abort(f"rank {self.rank}: {error}")
                raise

    def _post(
        self, call: Call, buf: Tensor, perform: Callable[[int, Meeting], list[Event]], after: Event | None
    ) -> _ThreadEvent:
        if after is None:
            with self._comm_stream.working(None):
                after = self._comm_stream.record()
        self._number += 1
        number = self._number
        meeting = self._world.post(number, self.rank, call, buf)
        event = _ThreadEvent(self, after, lambda: perform(number, meeting))
        self._pending.append(event)
        return event

    def _copy_from_root(self, number: int, meeting: Meeting) -> list[Event]:
        root = meeting.calls[self.rank].root
        if self.rank == root:
            # The root's buffer is free again only when the slowest copy of it has been made.
            self._reach(number, READY)
            others = [rank for rank in range(self.size) if rank != root]
            copied = self._world.await_stage(number, meeting, FINISHED, others, self.rank)
            return [*copied, self._reach(number, FINISHED)]
        self._follow(number, meeting, READY, [root])
        meeting.buffers[self.rank].view(-1).copy_(meeting.buffers[root].view(-1))
        return [self._reach(number, FINISHED)]

    def _sum_in_place(self, number: int, meeting: Meeting) -> list[Event]:
        """Sum in rank order, without a temporary: rank r sums the r-th slice of all buffers into that of rank 0.

        Nobody else reads that slice meanwhile, and all slices are ready before anyone overwrites its buffer.
        """
        everyone = range(self.size)
        self._reach(number, READY)
        self._follow(number, meeting, READY, everyone)
        flat = [meeting.buffers[rank].view(-1) for rank in everyone]
        count = flat[0].numel()
        mine = slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
        for other in flat[1:]:
            flat[0][mine].add_(other[mine])
        self._reach(number, REDUCED)
        self._follow(number, meeting, REDUCED, everyone)
        if self.rank != 0:
            flat[self.rank].copy_(flat[0])
        copied = self._reach(number, FINISHED)
        if self.rank != 0:
            return [copied]
        return self._world.await_stage(number, meeting, FINISHED, everyone, self.rank)

    def _collect_rows(self, number: int, meeting: Meeting, out: Tensor) -> list[Event]:
        everyone = range(self.size)
        self._reach(number, READY)
        self._follow(number, meeting, READY, everyone)
        start = 0
        for rank in everyone:
            call = meeting.calls[rank]
            rows = call.sends[self.rank]
            first = sum(call.sends[: self.rank])
            out[start : start + rows].view(-1).copy_(meeting.buffers[rank][first : first + rows].view(-1))
            start += rows
        self._reach(number, FINISHED)
        return self._world.await_stage(number, meeting, FINISHED, everyone, self.rank)

    def _meet(self, number: int, meeting: Meeting) -> list[Event]:
        self._world.await_stage(number, meeting, POSTED, range(self.size), self.rank)
        return [self._reach(number, FINISHED)]

    def _reach(self, number: int, stage: int) -> Event:
        """Announce the event after which this rank's comm stream has reached `stage`."""
        event = self._comm_stream.record()
        self._world.reach(number, self.rank, stage, event)
        return event

    def _follow(self, number: int, meeting: Meeting, stage: int, ranks: Iterable[int]) -> None:
        """Order this rank's comm stream after `stage` of `ranks`."""
        for event in self._world.await_stage(number, meeting, stage, ranks, self.rank):
            event.wait()


@final
@dataclass(eq=False, slots=True)
class _ThreadEvent:
    """An operation that its rank has posted. `over`: what its buffers are free after, once the rank's share is started."""

    comm: ThreadCommunicator
    after: Event
    perform: Callable[[], list[Event]]
    over: list[Event] | None = None

    def wait(self) -> None:
        self.comm.complete(self)
        for event in self.over or ():
            event.wait()


def run_threads(size: int, function: Callable[[Communicator], T], timeout_s: float) -> list[T]:
    """Call `function` once per rank, each in its own thread, and return the results in rank order.

    Grad mode, the number of torch threads and the current stream belong to a thread: `function` sets its own.
    Raises: the first error of any rank that is not a CommError (those follow from it), else the first CommError;
    the other ranks are aborted. A rank that neither calls nor returns is left behind `timeout_s` after the error.
    """
    world = ThreadWorld(size, timeout_s)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(world, rank))
            world.end(rank)
        except BaseException as error:
            error.add_note(f"raised on rank {rank} of {size}")
            errors.append(error)
            world.abort(f"rank {rank} failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        _join(threads, errors, timeout_s)
    except BaseException as error:  # a signal handler of the main thread
        world.abort(f"{type(error).__name__}: {error}")
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, CommError)), errors[0])
    return [results[rank] for rank in range(size)]


def _join(threads: Sequence[threading.Thread], errors: Sequence[BaseException], timeout_s: float) -> None:
    """Wait for all threads; once there is an error, at most `timeout_s` longer."""
    give_up_at: float | None = None
    while alive := [thread for thread in threads if thread.is_alive()]:
        alive[0].join(0.05)
        if errors and give_up_at is None:
            give_up_at = time.monotonic() + timeout_s
        if give_up_at is not None and time.monotonic() > give_up_at:
            return
