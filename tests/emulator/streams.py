"""An emulated device whose kernels and batches run on streams of their own: what is not ordered by an event is found.

Operations of torch run at once, on the host, but are noted with the stream that a GPU would run them on
(tests/comm/races.py). Host memory that the upload stream reads must stay as it is until the host has waited for an event
behind the copy: a GPU may be that late. Who waits, and on which thread, is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mggcn.backend.events import Event
from tests.comm.races import Races, RecordedEvent, RecordingStream
from tests.emulator.device import EmulatedDevice


class StreamsDevice:
    """See mggcn/backend/cuda/base.py. Use it inside `running`, on the thread that runs the steps.

    uploads: operations of the upload stream; changed: host memory that was written before somebody waited for its copy;
    waited: threads on which the host waited.
    """

    def __init__(self, seed: int = 0) -> None:
        self._inner = EmulatedDevice(seed=seed)
        self.races = Races()
        self.uploads: list[str] = []
        self.changed: list[str] = []
        self.waited: list[str] = []
        self.upload_stream: UploadStream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def record(self) -> RecordedEvent:
        return self.races.record()

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.races.rank(0) as stream:
            self.upload_stream = UploadStream(self, stream)
            yield
            self.upload_stream.finish()


@dataclass
class Sent:
    """An event of the upload stream, and the copies from host memory that lie before it."""

    device: StreamsDevice
    event: RecordedEvent
    copies: list[tuple[Tensor, Tensor]]
    seen: bool = field(default=False)

    def wait(self) -> None:
        self.event.wait()

    def done(self) -> bool:
        return self.seen

    def synchronize(self) -> None:
        self.device.waited.append(threading.current_thread().name)
        self.check()

    def check(self) -> None:
        """Compare host memory with what was copied from it: the GPU may read it only now."""
        self.seen = True
        changed = [source for source, then in self.copies if not torch.equal(source, then)]
        self.device.changed += [f"{len(source)} elements of {source.dtype}" for source in changed]


class UploadStream:
    """The upload stream of a StreamsDevice."""

    def __init__(self, device: StreamsDevice, stream: RecordingStream) -> None:
        self._device, self._stream = device, stream
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._sent: list[Sent] = []

    @contextmanager
    def working(self, after: Event | None) -> Iterator[None]:
        with self._stream.working(after), _Copies(self._device, self._copies):
            yield

    def record(self) -> Sent:
        sent = Sent(self._device, self._stream.record(), list(self._copies))
        self._copies.clear()
        self._sent.append(sent)
        return sent

    def finish(self) -> None:
        """Look at what nobody waited for."""
        for sent in self._sent:
            if not sent.seen:
                sent.check()


class _Copies(TorchDispatchMode):
    """Notes what is copied from the host."""

    def __init__(self, device: StreamsDevice, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._device, self._copies = device, copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("copy_", "fill_", "zero_"):
            self._device.uploads.append(func.overloadpacket.__name__)
            if len(args) > 1 and isinstance(args[1], Tensor):
                self._copies.append((args[1], args[1].clone()))
        return func(*args, **(kwargs or {}))
