"""The host's own comm stream: copies run synchronously, so every event is already complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mggcn.backend.events import DONE, Done, Event


@dataclass(frozen=True, slots=True)
class HostStream:
    """The comm stream of a host: data moves in the calling thread, or in threads of the transport that it waits for."""

    device: str = "cpu"
    host_waits: bool = True
    recording: bool = False

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        if after is not None:
            after.wait()
        yield

    def record(self) -> Done:
        return DONE

    def mark(self) -> Done:
        return DONE

    def free_bytes(self) -> int:
        return 0
