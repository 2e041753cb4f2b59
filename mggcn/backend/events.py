"""Points in a device's work, which other work can wait for, and their times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol


class Event(Protocol):
    """A point in a rank's work that other work waits for."""

    def wait(self) -> None:
        """Return when the work is done (CPU) or ordered before what follows (GPU).

        Raises: CommError if it is a message and another rank failed or the transport's timeout passed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The event of work that is already done."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


DONE: Final = Done()


class Mark(Event, Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Return once the device has passed it: the host waits. Any thread may call this."""
        ...


class CommStream(Protocol):
    """The stream of messages: on a device with streams one that runs beside the kernels, otherwise the calling thread."""

    def working(self, after: Event | None) -> AbstractContextManager[None]:
        """Run the block's tensor work on the comm stream, after the event `after` or, without one, after the rank's
        work so far.
        """
        ...

    def record(self) -> Event:
        """Return an event that completes once the comm stream's work so far is done."""
        ...


class UploadStream(CommStream, Protocol):
    """The stream on which batches come to a device beside its kernels; `working` and `record` as of a comm stream."""

    def record(self) -> Mark: ...


class MessageStream(CommStream, Protocol):
    """A comm stream as a transport of processes takes it: on a GPU its messages are work of this stream."""

    @property
    def device(self) -> str:
        """The device whose tensors it moves, as torch names it."""
        ...

    @property
    def host_waits(self) -> bool:
        """Whether messages run on threads of the transport, for which the host waits, and not on this stream."""
        ...

    @property
    def recording(self) -> bool:
        """Whether the current stream's work is only recorded into a graph."""
        ...

    def record(self) -> Mark: ...

    def mark(self) -> Mark:
        """Return a point after the rank's own work so far. A replayed graph runs there, its messages too."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that are free on the device, 0 if messages take none of it."""
        ...


class Timestamp(Protocol):
    """A moment in a device's work, for measuring."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier timestamp of the same device to this one; the work must be done."""
        ...


Annotate = Callable[[str], AbstractContextManager[Any]]
"""Opens a block with a name, for a profiler."""
Agree = Callable[[str], tuple[str, bool]]
"""Tells all ranks why this one cannot continue ("": it can). Returns the reason of the first rank that gives one, and
whether that is this rank."""


def alone(reason: str) -> tuple[str, bool]:
    """Agree at once: the Agree of a single rank."""
    return reason, bool(reason)


class Repeatable(Protocol):
    """Work that is done again and again, the same each time."""

    @property
    def state(self) -> str:
        """How the work is launched: "eager", piece by piece; "captured", whole; "refused: REASON", eager for good."""
        ...

    def __call__(self) -> None:
        """Do the work once."""
        ...


@dataclass(frozen=True, slots=True)
class Eager:
    """Work that is always launched piece by piece."""

    function: Callable[[], None]
    state: str = "eager"

    def __call__(self) -> None:
        self.function()
