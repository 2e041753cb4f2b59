"""A slow network on one machine: every message of an aggregation arrives a set time after it was sent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from mggcn.comm.base import CommStream, Communicator, Event, Moving


class LaggingCommunicator:
    """Forwards every call; broadcasts and all-to-alls are over no sooner than `seconds` after they started.

    Sums over ranks are not held back: every strategy waits for those of the gradients once an epoch.
    """

    def __init__(self, inner: Communicator, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def use_stream(self, comm_stream: CommStream, moving: Moving = nullcontext) -> None:
        self._inner.use_stream(comm_stream, moving)

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        return _Late(self._inner.broadcast(buf, root, after), time.monotonic() + self._seconds)

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        return self._inner.all_reduce(buf, after)

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        return _Late(self._inner.all_to_all(out, buf, out_rows, buf_rows, after), time.monotonic() + self._seconds)

    def barrier(self) -> None:
        self._inner.barrier()

    def check(self) -> None:
        self._inner.check()

    def device_bytes(self) -> Mapping[str, int]:
        return self._inner.device_bytes()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()


class _Late:
    """An event that is not over before a moment."""

    def __init__(self, inner: Event, moment: float) -> None:
        self._inner = inner
        self._moment = moment

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._moment - time.monotonic()))
