"""A communicator whose messages leave marks: wraps any Communicator, which says when it moves data on its comm stream.

A transport moves the message that is being called or waited for, since transports perform calls in order. The root of a
broadcast that others copy from moves nothing itself, and has no mark then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from mggcn.comm.base import CommStream, Communicator, Event, Moving
from mggcn.trace.recorder import Message, Recorder


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """The event of a message: work of the transport in the wait is the message's."""

    inner: Event
    message: Message
    recorder: Recorder

    def wait(self) -> None:
        with self.recorder.moving(self.message):
            self.inner.wait()
        self.recorder.arrived(self.message)


class TracedCommunicator:
    """Forwards every call.

    in_flight: the transport moves data on threads of its own and not on the comm stream, as gloo does; a message is then
    marked from its call to the end of the wait.
    """

    def __init__(self, inner: Communicator, recorder: Recorder, *, in_flight: bool) -> None:
        self._inner = inner
        self._recorder = recorder
        self._in_flight = in_flight

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def use_stream(self, comm_stream: CommStream, moving: Moving = nullcontext) -> None:
        @contextmanager
        def marked() -> Iterator[None]:
            with moving(), self._recorder.moved(comm_stream):
                yield

        self._inner.use_stream(comm_stream, marked)

    def check(self) -> None:
        self._inner.check()

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        message = Message(op="broadcast", nbytes=buf.nbytes, received=0 if root == self.rank else buf.nbytes, root=root)
        return self._send(message, lambda: self._inner.broadcast(buf, root, after))

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        message = Message(op="all_reduce", nbytes=buf.nbytes, received=2 * buf.nbytes * (self.size - 1) // self.size)
        return self._send(message, lambda: self._inner.all_reduce(buf, after))

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        row = out[:1].nbytes if out.shape[0] else 0
        message = Message(op="all_to_all", nbytes=buf.nbytes, received=row * (sum(out_rows) - out_rows[self.rank]))
        return self._send(message, lambda: self._inner.all_to_all(out, buf, out_rows, buf_rows, after))

    def barrier(self) -> None:
        self._inner.barrier()

    def device_bytes(self) -> Mapping[str, int]:
        return self._inner.device_bytes()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _send(self, message: Message, call: Callable[[], Event]) -> Event:
        if not self._recorder.recording:
            return call()
        self._recorder.post(message, in_flight=self._in_flight)
        with self._recorder.moving(message):
            return TracedEvent(call(), message, self._recorder)
