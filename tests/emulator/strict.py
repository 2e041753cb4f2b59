"""An emulated device that holds repeated work to the rules of a CUDA graph: a recording freezes every number and address.

Work that is to be repeated runs as it is, and fails if it looks at a result, allocates, or differs in a launch, an
operation, an address or a number from the run that a GPU would have recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mggcn.backend.cuda.capture import WARM_CALLS
from mggcn.backend.events import Agree, Repeatable, alone
from tests.emulator.device import EmulatedDevice

LOOKS = {"aten._local_scalar_dense.default", "aten.item.default", "aten.nonzero.default", "aten.is_nonzero.default"}
SMALL = 64
"""Bytes of a temporary that a recording may hold: they come from the graph's own pool."""


class BrokenRecordingError(Exception):
    """A recorded graph would not do what this call did."""


class Watch(TorchDispatchMode):
    """Notes every operation of torch with its addresses and numbers; refuses looks and allocations."""

    def __init__(self, trace: list[Any]) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in LOOKS:
            raise BrokenRecordingError(f"{func} waits for the device")
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                if made.untyped_storage().nbytes() > SMALL:
                    raise BrokenRecordingError(f"{func} allocates {made.untyped_storage().nbytes()} bytes")
                known.add(made.untyped_storage().data_ptr())
        self._trace.append((str(func), *map(_noted, tree_leaves((args, kwargs)))))
        return result


def _noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        small = value.untyped_storage().nbytes() <= SMALL and value.numel() <= 1
        return "temporary" if small else (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
    return repr(value)


class StrictDevice:
    """An EmulatedDevice whose repeated work is watched; see mggcn/backend/cuda/base.py."""

    def __init__(self, seed: int = 0) -> None:
        self._inner = EmulatedDevice(seed=seed)
        self._trace: list[Any] | None = None
        self.repeats = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, path: Path, options: tuple[str, ...]) -> Any:
        return _Noted(self._inner.compile(path, options), self._note)

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        return _Repeated(self, function)

    def watched(self, function: Callable[[], None]) -> list[Any]:
        """Run `function` and return what it launched."""
        self._trace = trace = []
        try:
            with Watch(trace):
                function()
        finally:
            self._trace = None
        return trace

    def _note(self, launch: tuple[Any, ...]) -> None:
        if self._trace is not None:
            self._trace.append(launch)


class _Noted:
    def __init__(self, module: Any, note: Callable[[tuple[Any, ...]], None]) -> None:
        self._module = module
        self._note = note

    def get_function(self, name: str) -> Callable[..., None]:
        function = self._module.get_function(name)

        @functools.wraps(function.func if isinstance(function, functools.partial) else function)
        def launch(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            self._note((name, grid, block, tuple(arg.tobytes() for arg in args), shared_mem))
            function(grid, block, args, shared_mem=shared_mem)

        return launch


class _Repeated:
    def __init__(self, device: StrictDevice, function: Callable[[], None]) -> None:
        self._device = device
        self._function = function
        self._calls = 0
        self._recorded: list[Any] = []

    @property
    def state(self) -> str:
        return "captured" if self._recorded else "eager"

    def __call__(self) -> None:
        self._calls += 1
        if self._calls <= WARM_CALLS:
            self._function()
            return
        trace = self._device.watched(self._function)
        if self._calls == WARM_CALLS + 1:
            self._recorded = trace
            return
        self._device.repeats += 1
        for number, (before, now) in enumerate(zip(self._recorded, trace, strict=True)):
            if before != now:
                raise BrokenRecordingError(f"step {number} was recorded as {before} and is now {now}")
