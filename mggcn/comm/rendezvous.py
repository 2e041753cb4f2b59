"""The rendezvous of ranks that are threads of one process: their calls, and the progress of each."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, final

from torch import Tensor

from mggcn.backend.events import DONE, Event
from mggcn.comm.calls import Call, disagreement, name_ranks
from mggcn.errors import CommError

POSTED: Final = 1
READY: Final = 2
REDUCED: Final = 3
FINISHED: Final = 4


@final
class Meeting:
    """The ranks' n-th call: the request of each, its buffer, its progress, and its events."""

    def __init__(self, size: int) -> None:
        self.calls: dict[int, Call] = {}
        self.buffers: dict[int, Tensor] = {}
        self.stages: list[int] = [0] * size
        self.events: dict[tuple[int, int], Event] = {}


@final
class ThreadWorld:
    """The control store that the ranks share. Its lock guards every field; tensors are copied outside of it."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[int, Meeting] = {}
        self._failure: str | None = None
        self._ended: set[int] = set()

    def end(self, rank: int) -> None:
        """Note that a rank makes no more calls: ranks that still wait for it fail at once."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Wake every rank with CommError(reason); the first reason counts."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def check(self) -> None:
        """Raises: CommError if the world was aborted."""
        if self._failure is not None:
            raise CommError(self._failure)

    def post(self, number: int, rank: int, call: Call, buf: Tensor) -> Meeting:
        """Announce call `number` of `rank`. Raises: CommError if it does not fit what others posted."""
        with self._changed:
            self.check()
            meeting = self._meetings.setdefault(number, Meeting(self.size))
            meeting.calls[rank] = call
            meeting.buffers[rank] = buf
            if problem := disagreement(meeting.calls):
                self.abort(f"ranks disagree on call {number}: {problem}")
                self.check()
            meeting.stages[rank] = POSTED
            self._changed.notify_all()
            return meeting

    def reach(self, number: int, rank: int, stage: int, event: Event) -> None:
        """Tell the others that `rank` reaches `stage` of call `number` with `event`."""
        with self._changed:
            self.check()
            meeting = self._meetings[number]
            meeting.events[stage, rank] = event
            meeting.stages[rank] = stage
            if min(meeting.stages) == FINISHED:
                del self._meetings[number]
            self._changed.notify_all()

    def await_stage(self, number: int, meeting: Meeting, stage: int, ranks: Iterable[int], waiter: int) -> list[Event]:
        """Return the events with which `ranks` reach `stage`, once all their threads have announced them.

        Raises: CommError that names those that did not.
        """

        def missing() -> list[int]:
            return [rank for rank in ranks if meeting.stages[rank] < stage]

        def hopeless() -> bool:
            return self._failure is not None or not self._ended.isdisjoint(missing())

        with self._changed:
            self._changed.wait_for(lambda: hopeless() or not missing(), self.timeout_s)
            if self._failure is None and (late := missing()):
                where = f"in call {number} ({meeting.calls[waiter]})"
                if ended := sorted(self._ended.intersection(late)):
                    self.abort(
                        f"rank {waiter} waits {where} for {name_ranks(ended)}, which ended without completing that call"
                    )
                else:
                    self.abort(f"rank {waiter} waited {self.timeout_s:g} s for {name_ranks(late)} {where}")
            self.check()
            return [meeting.events.get((stage, rank), DONE) for rank in ranks]
