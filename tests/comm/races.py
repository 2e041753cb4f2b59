"""A race detector for streams: which accesses of tensors are ordered by events, whatever the host's order was.

Every rank has two streams, its own and its comm stream. Tensor operations run at once, on the host, but are noted with the
stream that a device would run them on. A vector clock per stream (Fidge 1988, Mattern 1989) says what a stream's work
comes after: recording an event copies the clock, waiting for it joins the copy. Two accesses of the same bytes, one of
them a write, race if neither stream's clock has seen the other: that threads have met orders nothing on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mggcn.backend.events import Event


@dataclass
class Stream:
    name: str
    clock: dict[str, int] = field(default_factory=dict)

    def now(self) -> dict[str, int]:
        """What comes after this has seen all of the stream's work so far."""
        seen = dict(self.clock)
        self.clock[self.name] = seen.setdefault(self.name, 0) + 1
        return seen

    def join(self, seen: dict[str, int]) -> None:
        for name, tick in seen.items():
            self.clock[name] = max(tick, self.clock.get(name, -1))


@dataclass(frozen=True)
class Access:
    stream: str
    tick: int
    first: int
    end: int
    write: bool
    what: str


@final
class Races:
    """The accesses of all ranks; `found` describes those that race."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.here = threading.local()
        self._lock = threading.Lock()
        self._accesses: dict[int, list[Access]] = {}
        self._alive: list[Any] = []

    @contextmanager
    def rank(self, number: int) -> Iterator[RecordingStream]:
        """Note what the calling thread does from here on as work of this rank."""
        self.here.stream = Stream(f"rank {number}")
        with _Watch(self):
            yield RecordingStream(self, Stream(f"lane of rank {number}"))

    def record(self) -> RecordedEvent:
        """Record an event behind the current stream's work."""
        return RecordedEvent(self, self.here.stream.now())

    def note(self, tensor: Tensor, write: bool, what: str) -> None:
        if tensor.numel() == 0:
            return
        stream: Stream = self.here.stream
        storage = tensor.untyped_storage()
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        tick = stream.clock.setdefault(stream.name, 0)
        new = Access(stream.name, tick, first, first + extent * tensor.itemsize, write, what)
        with self._lock:
            known = self._accesses.setdefault(storage.data_ptr(), [])
            if not known:
                self._alive.append(storage)  # its address must not come to mean something else
            for old in known:
                overlap = old.first < new.end and new.first < old.end
                if overlap and (old.write or write) and stream.clock.get(old.stream, -1) < old.tick:
                    self.found.append(f"{new.what} on {new.stream} is not ordered behind {old.what} on {old.stream}")
            known.append(new)


@final
class RecordedEvent:
    def __init__(self, races: Races, seen: dict[str, int]) -> None:
        self._races = races
        self._seen = seen

    def wait(self) -> None:
        self._races.here.stream.join(self._seen)


@final
class RecordingStream:
    def __init__(self, races: Races, stream: Stream) -> None:
        self._races = races
        self._stream = stream

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        here = self._races.here
        outer: Stream = here.stream
        here.stream = self._stream
        try:
            if after is None:
                self._stream.join(outer.now())
            else:
                after.wait()
            yield
        finally:
            here.stream = outer

    def record(self) -> RecordedEvent:
        return RecordedEvent(self._races, self._stream.now())


class _Watch(TorchDispatchMode):
    """Notes what every tensor operation of this thread reads and writes."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        schema, what = func._schema, func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        known = set()
        if not is_view:
            named = {argument.name: argument for argument in schema.arguments}
            given = [*zip(schema.arguments, args, strict=False), *((named[name], kwargs[name]) for name in kwargs)]
            for argument, value in given:
                write = argument.alias_info is not None and argument.alias_info.is_write
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        known.add(leaf.untyped_storage().data_ptr())
                        self._races.note(leaf, write, what)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result) if not is_view else ():
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self._races.note(leaf, True, what)
        return result
