"""An emulated device whose upload stream is as late as a device may be: its copies run when something waits for them.

Beside EmulatedDevice, whose copies run at once, these are both ends of what a stream of its own may do. What is overwritten
before its copy was waited for, or read before it has arrived, gives other bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mggcn.backend.events import Event
from tests.emulator.device import EmulatedDevice


class LateDevice:
    """See mggcn/backend/cuda/base.py."""

    def __init__(self, seed: int = 0) -> None:
        self._inner = EmulatedDevice(seed=seed)
        self.upload_stream = LateStream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LateStream:
    """ended: copies that have run, the first ones of those that were queued."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.ended = 0

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        with _Queued(self.copies):
            yield

    def record(self) -> Late:
        return Late(self, len(self.copies))


@dataclass(frozen=True)
class Late:
    """An event behind the first `count` copies."""

    stream: LateStream
    count: int

    def wait(self) -> None:
        for target, source in self.stream.copies[self.stream.ended : self.count]:
            target.copy_(source)
        self.stream.ended = max(self.stream.ended, self.count)

    def done(self) -> bool:
        return self.stream.ended >= self.count

    def synchronize(self) -> None:
        self.wait()


class _Queued(TorchDispatchMode):
    """Queues copies instead of making them."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ != "copy_":
            return func(*args, **(kwargs or {}))
        self._copies.append((args[0], args[1]))
        return args[0]
