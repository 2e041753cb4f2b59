"""The communicator of a run with one rank: every operation is complete when it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from mggcn.comm.base import DONE, CommStream, Event
from mggcn.comm.calls import all_reduce_call, all_to_all_call, broadcast_call, disagreement
from mggcn.errors import CommError


@final
class SingleCommunicator:
    """Collectives over one rank: only `all_to_all` does anything; it copies."""

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self._failure: str | None = None

    def use_stream(self, comm_stream: CommStream) -> None:
        """Do nothing: the copy of `all_to_all` runs on the rank's own stream."""

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        broadcast_call(buf, root, size=1)
        return self._follow(after)

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        all_reduce_call(buf)
        return self._follow(after)

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        call = all_to_all_call(out, buf, out_rows, buf_rows, size=1)
        if problem := disagreement({0: call}):
            raise CommError(problem)
        done = self._follow(after)
        out.copy_(buf)
        return done

    def barrier(self) -> None:
        self._follow(None)

    def check(self) -> None:
        if self._failure is not None:
            raise CommError(self._failure)

    def synchronize(self) -> None:
        self.check()

    def device_bytes(self) -> dict[str, int]:
        return {}

    def abort(self, reason: str) -> None:
        self._failure = self._failure or reason

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _follow(self, after: Event | None) -> Event:
        self.check()
        if after is not None:
            after.wait()
        return DONE
