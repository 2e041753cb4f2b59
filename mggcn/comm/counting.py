"""Counts the bytes that leave a rank, whatever the transport: wraps a communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mggcn.backend.events import Annotate, CommStream, alone
from mggcn.comm.base import Communicator, Event

REASON_BYTES = 256
"""Of a reason that a rank reports to the others."""


@dataclass(frozen=True, slots=True)
class _NamedEvent:
    """The event of a message, the wait for which is a block of the profiler."""

    inner: Event
    annotate: Annotate
    name: str

    def wait(self) -> None:
        with self.annotate(f"wait: {self.name}"):
            self.inner.wait()


class CountingCommunicator:
    """Forwards every call, and adds up the bytes that this rank sends.

    A broadcast counts nbytes (P - 1) at its root, an all-reduce 2 (P - 1) / P of its buffer as in a ring, an all-to-all
    what goes to other ranks.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank: int = inner.rank
        self.size: int = inner.size
        self.bytes_sent: int = 0
        self.messages: int = 0
        self.annotate: Annotate | None = None
        """Opens blocks around the calls of messages and the waits for them, if there is a profiler."""
        # What sends nothing is not counted: these are the other communicator's own.
        self.use_stream: Callable[[CommStream], None] = inner.use_stream
        self.barrier: Callable[[], None] = inner.barrier
        self.check: Callable[[], None] = inner.check
        self.synchronize: Callable[[], None] = inner.synchronize
        self.device_bytes: Callable[[], Mapping[str, int]] = inner.device_bytes
        self.abort: Callable[[str], None] = inner.abort
        self.close: Callable[[], None] = inner.close

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        self.messages += self.size > 1
        if root == self.rank:
            self.bytes_sent += buf.nbytes * (self.size - 1)
        return self._send(f"broadcast from {root}", buf, lambda: self._inner.broadcast(buf, root, after))

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        self.messages += self.size > 1
        self.bytes_sent += 2 * buf.nbytes * (self.size - 1) // self.size
        return self._send("all_reduce", buf, lambda: self._inner.all_reduce(buf, after))

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        self.messages += self.size > 1
        row = buf[:1].nbytes if buf.shape[0] else 0
        self.bytes_sent += row * (sum(buf_rows) - buf_rows[self.rank])
        return self._send("all_to_all", buf, lambda: self._inner.all_to_all(out, buf, out_rows, buf_rows, after))

    def _send(self, what: str, buf: Tensor, call: Callable[[], Event]) -> Event:
        if self.annotate is None or self.size == 1:
            return call()
        name = f"message {self.messages}: {what}, {buf.nbytes} bytes"
        with self.annotate(name):
            event = call()
        return _NamedEvent(event, self.annotate, name)

    def agree(self, reason: str) -> tuple[str, bool]:
        """Implement backend.events.Agree by an uncounted host message of all ranks. Raises: CommError as Event.wait."""
        if self.size == 1:
            return alone(reason)
        reasons = torch.zeros(self.size, REASON_BYTES, dtype=torch.uint8)
        text = bytearray(reason.encode()[:REASON_BYTES])
        reasons[self.rank, : len(text)] = torch.tensor(text, dtype=torch.uint8)
        self._inner.all_reduce(reasons).wait()
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in reasons]
        first = next((rank for rank, found in enumerate(texts) if found), None)
        return ("", False) if first is None else (f"rank {first}: {texts[first]}", first == self.rank)
