"""The host's own clock and comm stream: copies run synchronously, so every event is already complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mggcn.backend.events import DONE, Done, Event


@dataclass(frozen=True, slots=True)
class HostTime:
    """A moment of the host's clock."""

    at_s: float

    def seconds_since(self, earlier: HostTime) -> float:
        return self.at_s - earlier.at_s


@dataclass(frozen=True, slots=True)
class HostStream:
    """Data moves in the calling thread."""

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        if after is not None:
            after.wait()
        yield

    def record(self) -> Done:
        return DONE

    def timestamp(self) -> HostTime:
        return HostTime(time.perf_counter())
