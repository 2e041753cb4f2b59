"""Which GPU each thread uses, as CUDA has it: a new thread uses GPU 0, and its first call makes a context there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch


class Contexts:
    """Stands in for torch.cuda's events and set_device. made: GPUs on which this process has a context."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.made: set[int] = set()
        self._current = threading.local()
        patched.setattr(torch.cuda, "set_device", self.use)
        patched.setattr(torch.cuda, "Event", lambda **_: _Event(self))

    def use(self, device: torch.device) -> None:
        """Since CUDA 12 this makes the context."""
        self._current.index = device.index
        self.call()

    def call(self, *_: Any) -> None:
        """Any call of the runtime."""
        self.made.add(getattr(self._current, "index", 0))


class _Event:
    """torch's records on the GPU of its stream; for its other calls torch changes nothing about the thread."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def record(self, stream: Any) -> None:
        self._contexts.made.add(stream.device.index)

    def query(self) -> bool:
        self._contexts.call()
        return True

    def synchronize(self) -> None:
        self._contexts.call()
