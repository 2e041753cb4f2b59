"""A thread that detects failed peers, transport errors, hung library calls and a stalled device.

The rank's own thread cannot: it is busy, inside a library, or waiting for its device. After a failure the watchdog
informs all ranks, releases work that waits on the device, and ends the process with a report if the rank's own thread
does not return in time to see the failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, final

from mggcn.backend.events import CommStream, Event
from mggcn.comm.control_store import ControlStore
from mggcn.errors import CommError

TICK_S: Final = 0.25
LEAVE_S: Final = 20.0
"""After a failure the rank's thread has this long to notice it in a call, a wait or `check`."""

Look = Callable[[], str | None]
"""Returns what is wrong, or None. It may take a moment, but must not wait for the device."""


class Mark(Event, Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether the device has passed it."""
        ...


class DeviceStream(CommStream, Protocol):
    """A comm stream that is a stream of a device."""

    @property
    def handle(self) -> int:
        """The stream's address, as the device's libraries take it."""
        ...

    @property
    def capturing(self) -> threading.Lock:
        """Held while the rank's work is recorded into a graph: no other thread may touch its streams then."""
        ...

    def record(self) -> Mark: ...

    def mark(self) -> Mark:
        """Return a point behind the rank's own work so far. A graph that is repeated runs there, its messages too."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that are free on the device."""
        ...


@final
class Heartbeat:
    """A detector of a stalled device: it leaves marks in the rank's work, and finds them passed or not.

    The device passes a mark once it has done all work queued before it; if that takes longer than the time limit, the
    detector reports a failure.
    """

    def __init__(self, comm_stream: DeviceStream, control: ControlStore) -> None:
        self._comm_stream = comm_stream
        self._control = control
        self._mark: Mark | None = None
        self._moved_s = time.monotonic()

    def look(self) -> str | None:
        """Look once, and leave a new mark if the last was passed."""
        now = time.monotonic()
        if self._comm_stream.capturing.acquire(blocking=False):
            try:
                if self._mark is None or self._mark.done():
                    self._mark = self._comm_stream.mark()
                    self._moved_s = now
            finally:
                self._comm_stream.capturing.release()
        control = self._control
        if now - self._moved_s <= control.timeout_s:
            return None
        suspects = control.suspects(control.number)
        return (
            f"rank {control.rank} waited {control.timeout_s:g} s {suspects}: its device stands still, after or in call "
            f"{control.number} ({control.call})"
        )


@final
class Watchdog:
    """Runs from `start` until `stop`, or until the rank's thread knows of a failure.

    end: ends the process with a report.
    """

    def __init__(
        self,
        control: ControlStore,
        end: Callable[[CommError], None],
        *,
        tick_s: float = TICK_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._control = control
        self._end = end
        self._tick_s = tick_s
        self._leave_s = leave_s
        self._release: Callable[[], None] = lambda: None
        self._looks: Sequence[Look] = (self._look_inside,)
        self._inside: tuple[str, float] | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, release: Callable[[], None]) -> None:
        """Start to look every `tick_s`.

        release: frees work that waits on the device; called after a failure, in a thread of its own, since it may
        itself hang.
        """
        self._release = release
        self._thread = threading.Thread(target=self._run, name=f"watchdog of rank {self._control.rank}", daemon=True)
        self._thread.start()

    def add(self, *looks: Look) -> None:
        """Look at these as well from now on."""
        self._looks = (*self._looks, *looks)

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Guard a call into a library that may not return."""
        self._inside = (what, time.monotonic())
        try:
            yield
        finally:
            self._inside = None

    def hurry(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """Stop looking; a check that is under way finishes first."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        failed_at: float | None = None
        while not self._stopped:
            self._look()
            if self._control.failure is not None:
                if failed_at is None:
                    failed_at = time.monotonic()
                    threading.Thread(target=self._release, name="release", daemon=True).start()
                if self._control.raised:
                    return
                if time.monotonic() > failed_at + self._leave_s:
                    self._end(CommError(self._control.failure))
                    return
            self._wake.wait(self._tick_s)
            self._wake.clear()

    def _look(self) -> None:
        """Abort if something is wrong."""
        control = self._control
        control.look()
        for look in self._looks if control.failure is None else ():
            try:
                reason = look()
            except Exception as error:  # whatever a device or a library in trouble raises: here it can reach nobody
                reason = f"rank {control.rank}: its device cannot be watched any more: {error}"
            if reason is not None:
                control.abort(reason)

    def _look_inside(self) -> str | None:
        control, inside = self._control, self._inside
        if inside is None or time.monotonic() - inside[1] <= control.timeout_s:
            return None
        return f"rank {control.rank} waited {control.timeout_s:g} s {control.suspects(control.number)} in {inside[0]}"
