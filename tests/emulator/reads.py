"""An emulated device that counts how often kernels read a tensor, by builds with reads.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from tests.emulator.device import EmulatedDevice
from tests.emulator.module import HERE, EmulatedModule

HOOKS = ("-fsanitize=thread", "-U__SANITIZE_THREAD__", "-include", str(HERE / "reads.hpp"))


class _Reads(ctypes.Structure):
    """struct Reads of reads.hpp."""

    _fields_: ClassVar = [
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("all", ctypes.c_ulonglong),
        ("most", ctypes.c_ulonglong),
    ]


class ReadingDevice(EmulatedDevice):
    """An EmulatedDevice; reads: of `watched` by each kernel in its last launch, by all threads and the most of one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.watched: Tensor | None = None
        self.reads: dict[str, tuple[int, int]] = {}

    def compile(self, path: Path, options: tuple[str, ...]) -> Any:
        return _Counted(self, EmulatedModule(path, (*options, *HOOKS), self._seed))


class _Counted:
    def __init__(self, device: ReadingDevice, module: EmulatedModule) -> None:
        self._device, self._module = device, module

    def get_function(self, name: str) -> Callable[..., None]:
        function, begin = self._module.get_function(name), self._module._library.emulate_reads
        begin.restype = ctypes.POINTER(_Reads)

        def launch(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            watched = self._device.watched
            start, nbytes = (0, 0) if watched is None else (watched.data_ptr(), watched.nbytes)
            counts = begin(ctypes.c_void_p(start), ctypes.c_void_p(start + nbytes)).contents
            function(grid, block, args, shared_mem=shared_mem)
            self._device.reads[name] = (counts.all, counts.most)

        return launch
