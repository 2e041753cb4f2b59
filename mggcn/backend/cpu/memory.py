"""Memory of the CPU backend: pages straight from the kernel, and work space that the products of a rank share."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

HUGE_BYTES = 2**22
"""Allocations of at least this size use pages of 2 MiB: random rows were read 1.2 to 1.9 times as fast
(bench/notes/0012-spmm-cpu.md)."""


def allocate(nbytes: int) -> Tensor:
    """Return zeroed bytes, aligned to a page, straight from the system; untouched pages cost nothing."""
    memory = mmap.mmap(-1, max(nbytes, 64), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class Workspace:
    """Memory that is used while its lock is held and is then cached; it is as large as the largest use so far."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self._memory = allocate(0)

    @property
    def nbytes(self) -> int:
        return self._memory.shape[0]

    def take(self, nbytes: int) -> Tensor:
        """Return `nbytes` that earlier uses may have written to; call it with the lock held, once per use."""
        if nbytes > self._memory.shape[0]:
            self._memory = allocate(nbytes)
        return self._memory[:nbytes]
