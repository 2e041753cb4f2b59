"""P logical ranks as threads of one process: for tests, dry runs and machines where processes are not worth it.

Nothing moves when an operation is called: it only posts its buffer where the ranks meet. The copies happen in `wait`,
so an operation is really "in flight" between the two, and code that touches a buffer too early fails here too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar, final

from torch import Tensor

from mggcn.comm.base import DONE, Communicator, Event
from mggcn.comm.calls import (
    Call,
    all_reduce_call,
    all_to_all_call,
    broadcast_call,
    disagreement,
    name_ranks,
)
from mggcn.errors import CommError

T = TypeVar("T")
POSTED: Final = 1
REDUCED: Final = 2
FINISHED: Final = 3


@final
class _Meeting:
    """Where the ranks meet for their n-th call: what each asked for, its buffer, and how far it is."""

    def __init__(self, size: int) -> None:
        self.calls: dict[int, Call] = {}
        self.buffers: dict[int, Tensor] = {}
        self.stages = [0] * size


@final
class ThreadWorld:
    """The board that the ranks share. Its lock guards every field; tensors are copied outside of it."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._failure: str | None = None

    def communicator(self, rank: int) -> ThreadCommunicator:
        """The communicator of `rank`; one per rank, used by one thread."""
        return ThreadCommunicator(self, rank)

    def abort(self, reason: str) -> None:
        """Wake every rank with CommError(reason); the first reason counts."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def check(self) -> None:
        """Raises: CommError if the world was aborted."""
        if self._failure is not None:
            raise CommError(self._failure)

    def post(self, number: int, rank: int, call: Call, buf: Tensor) -> _Meeting:
        """Announce call `number` of `rank`. Raises: CommError if it does not fit what others posted."""
        with self._changed:
            self.check()
            meeting = self._meetings.setdefault(number, _Meeting(self.size))
            meeting.calls[rank] = call
            meeting.buffers[rank] = buf
            if problem := disagreement(meeting.calls):
                self.abort(f"ranks disagree on call {number}: {problem}")
                self.check()
            meeting.stages[rank] = POSTED
            self._changed.notify_all()
            return meeting

    def reach(self, number: int, rank: int, stage: int) -> None:
        """Tell the others that `rank` has come to `stage` of call `number`."""
        with self._changed:
            self.check()
            stages = self._meetings[number].stages
            stages[rank] = stage
            if min(stages) == FINISHED:
                del self._meetings[number]
            self._changed.notify_all()

    def await_stage(self, number: int, meeting: _Meeting, stage: int, ranks: Iterable[int], waiter: int) -> None:
        """Return once all of `ranks` have come to `stage`. Raises: CommError that names those that did not."""

        def missing() -> list[int]:
            return [rank for rank in ranks if meeting.stages[rank] < stage]

        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not missing(), self.timeout_s)
            if self._failure is None and (late := missing()):
                self.abort(
                    f"rank {waiter} waited {self.timeout_s:g} s for {name_ranks(late)} "
                    f"in call {number} ({meeting.calls[waiter]})"
                )
            self.check()


@final
class ThreadCommunicator:
    """One rank of a ThreadWorld."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._number = 0
        self._pending: deque[_ThreadEvent] = deque()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

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
        self._post(Call("barrier"), Tensor(), self._meet, None).wait()

    def abort(self, reason: str) -> None:
        self._world.abort(reason)

    def close(self) -> None:
        """Meet once more, so that no rank leaves while another still reads its buffers."""
        self.barrier()

    def complete(self, event: _ThreadEvent) -> None:
        """Perform this rank's pending operations in the order of the calls, up to `event`.

        Every rank works through the same sequence, so the earliest unfinished operation can always go on: no deadlock.
        """
        while not event.done:
            self._world.check()
            head = self._pending.popleft()
            try:
                head.perform()
            except BaseException as error:
                self._world.abort(f"rank {self._rank}: {error}")
                raise
            head.done = True

    def _post(
        self, call: Call, buf: Tensor, perform: Callable[[int, _Meeting], None], after: Event | None
    ) -> _ThreadEvent:
        (after or DONE).wait()
        self._number += 1
        number = self._number
        meeting = self._world.post(number, self._rank, call, buf)
        event = _ThreadEvent(self, lambda: perform(number, meeting))
        self._pending.append(event)
        return event

    def _copy_from_root(self, number: int, meeting: _Meeting) -> None:
        root = meeting.calls[self._rank].root
        if self._rank == root:
            others = [rank for rank in range(self.size) if rank != root]
            self._await(number, meeting, FINISHED, others)
        else:
            self._await(number, meeting, POSTED, [root])
            meeting.buffers[self._rank].view(-1).copy_(meeting.buffers[root].view(-1))
        self._world.reach(number, self._rank, FINISHED)

    def _sum_in_place(self, number: int, meeting: _Meeting) -> None:
        """Sum in rank order, without a temporary: rank r sums the r-th slice of all buffers into that of rank 0.

        Nobody else reads that slice meanwhile, and all slices are ready before anyone overwrites its buffer.
        """
        everyone = range(self.size)
        self._await(number, meeting, POSTED, everyone)
        flat = [meeting.buffers[rank].view(-1) for rank in everyone]
        count = flat[0].numel()
        mine = slice(count * self._rank // self.size, count * (self._rank + 1) // self.size)
        for other in flat[1:]:
            flat[0][mine].add_(other[mine])
        self._world.reach(number, self._rank, REDUCED)
        self._await(number, meeting, REDUCED, everyone)
        if self._rank != 0:
            flat[self._rank].copy_(flat[0])
        self._world.reach(number, self._rank, FINISHED)
        if self._rank == 0:
            self._await(number, meeting, FINISHED, everyone)

    def _collect_rows(self, number: int, meeting: _Meeting, out: Tensor) -> None:
        everyone = range(self.size)
        self._await(number, meeting, POSTED, everyone)
        start = 0
        for rank in everyone:
            call = meeting.calls[rank]
            rows = call.sends[self._rank]
            first = sum(call.sends[: self._rank])
            out[start : start + rows].view(-1).copy_(meeting.buffers[rank][first : first + rows].view(-1))
            start += rows
        self._world.reach(number, self._rank, FINISHED)
        self._await(number, meeting, FINISHED, everyone)

    def _meet(self, number: int, meeting: _Meeting) -> None:
        self._await(number, meeting, POSTED, range(self.size))
        self._world.reach(number, self._rank, FINISHED)

    def _await(self, number: int, meeting: _Meeting, stage: int, ranks: Iterable[int]) -> None:
        self._world.await_stage(number, meeting, stage, ranks, self._rank)


@final
class _ThreadEvent:
    """An operation that its rank has posted and not yet performed."""

    def __init__(self, comm: ThreadCommunicator, perform: Callable[[], None]) -> None:
        self._comm = comm
        self.perform = perform
        self.done = False

    def wait(self) -> None:
        self._comm.complete(self)


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
            results[rank] = function(world.communicator(rank))
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
