"""CUDA graphs without a GPU: an emulated device whose recordings can be refused, and torch's allocator as they leave it.

What is recorded is not carried out: kernels and operations that write are counted and left out. A replay carries out the
work. Several ranks as threads record at the same time, as processes would.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mggcn.backend.cuda.capture import Captured, Refusals
from mggcn.backend.events import Agree, Repeatable, alone
from tests.emulator.device import EmulatedDevice

BEGIN, END = 0, -1
"""Where a recording fails if not in a call: when it begins, and when it ends."""


class Allocator(threading.local):
    """Pools of recordings in torch's allocator, of which every thread has its own: ranks stand for processes.

    ends: whether torch ends a failed recording's pool (from 2.12); releases: whether its reset gives it back (after 2.13).
    """

    def __init__(self, *, ends: bool = False, releases: bool = False) -> None:
        self.ends, self.releases = ends, releases
        self.underway: set[Any] = set()
        self.users: dict[Any, int] = {}
        self._made = 0

    def handle(self) -> tuple[int, int]:
        self._made += 1
        return (0, self._made)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0

    def empty(self) -> None:
        assert not self.underway
        self.users = {pool: users for pool, users in self.users.items() if users}

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"segment_pool_id": pool, "active_size": 0} for pool in self.users]


class Graph:
    """What torch.cuda.CUDAGraph is, as far as Captured knows it."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._complete = False
        self._pool: Any = None
        self._device: Any = None
        self._function: Callable[[], None] | None = None

    def begin(self, device: CaptureDevice, pool: Any) -> None:
        self._device, self._pool = device, pool
        self._allocator.underway.add(pool)
        self._allocator.users[pool] = 1
        device.fail(BEGIN)
        device.phase = "recording"

    def finish(self, failed: bool) -> None:
        device, self._device.phase = self._device, ""
        try:
            device.fail(END)
            if failed:
                raise RuntimeError("operation failed due to a previous error during capture")
        except BaseException:
            if self._allocator.ends:
                self._allocator.underway.remove(self._pool)
            raise
        self._allocator.underway.remove(self._pool)
        self._function, self._complete = device.function, True

    def reset(self) -> None:
        if self._pool is not None and (self._complete or self._allocator.releases):
            self._allocator.release(0, self._pool)
        self._pool, self._complete = None, False

    def replay(self) -> None:
        assert self._function is not None
        self._device.phase = "replaying"
        try:
            self._device.replays += 1
            self._function()
        finally:
            self._device.phase = ""


class _Left(TorchDispatchMode):
    """Counts the operations of torch that a recording holds; those that write are left out."""

    def __init__(self, device: CaptureDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return func(*args, **kwargs)  # a view
        self._device.call()
        given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        if not written:
            return func(*args, **kwargs)
        return given[written[0]] if schema.returns else None


class CaptureDevice:
    """An EmulatedDevice whose work is recorded by the real Captured; its `number`-th recorded call fails with `error`."""

    device_index = 0

    def __init__(
        self, seed: int = 0, number: int | None = None, error: Exception | None = None, comm_stream: Any = None
    ) -> None:
        self._inner = EmulatedDevice(seed=seed)
        self._number = number
        self._error = error
        self._comm_stream = comm_stream or self._inner.comm_stream
        self.refusals = Refusals()
        self.function: Callable[[], None] | None = None
        self.phase = ""
        self.calls = 0
        self.replays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def comm_stream(self) -> Any:
        return self._comm_stream

    def fail(self, number: int) -> None:
        if number == self._number and self._error is not None:
            raise self._error

    def call(self) -> None:
        self.calls += 1
        self.fail(self.calls)

    def compile(self, path: Path, options: tuple[str, ...]) -> Any:
        return _Skipped(self._inner.compile(path, options), self)

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        def work() -> None:
            self.function = function
            if self.phase == "recording":
                with _Left(self):
                    function()
            else:
                function()

        return Captured(work, self, agree, self.refusals)  # type: ignore[arg-type]


class _Skipped:
    def __init__(self, module: Any, device: CaptureDevice) -> None:
        self._module = module
        self._device = device

    def get_function(self, name: str) -> Callable[..., None]:
        function = self._module.get_function(name)

        @functools.wraps(function.func if isinstance(function, functools.partial) else function)
        def launch(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            if self._device.phase == "recording":
                self._device.call()
            else:
                function(grid, block, args, shared_mem=shared_mem)

        return launch


def stand_in(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> None:
    """Put the stand-ins in the place of torch's graphs and allocator."""

    @contextmanager
    def graph(graph: Graph, *, pool: Any, stream: CaptureDevice, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        graph.begin(stream, pool)
        try:
            yield
        except BaseException:
            graph.finish(failed=True)
            raise
        graph.finish(failed=False)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(allocator))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", allocator.handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
