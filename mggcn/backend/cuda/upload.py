"""Copies host arrays to a GPU through two pinned buffers: one is filled while the other is sent.

A copy from ordinary memory goes through a small pinned buffer of the driver's while the host waits. Here the host
meanwhile reads the next part, often from a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

log: logging.Logger = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
SMALL_BYTES = 1 << 20
"""Smaller arrays are copied as they are."""

Send = Callable[[Tensor, Tensor], Callable[[], object]]
"""Starts the copy of a pinned buffer into a device tensor; returns what waits on the host until the buffer is free."""


class Uploads:
    """Copies one rank's arrays to its device, in the order of the calls.

    pin: gives a pinned buffer of so many bytes; RuntimeError where the system has none, and copies then go without.
    """

    def __init__(
        self, pin: Callable[[int], Tensor], send: Send, buffer_bytes: int = BUFFER_BYTES, small_bytes: int = SMALL_BYTES
    ) -> None:
        self._pin = pin
        self._send = send
        self._buffer_bytes = buffer_bytes
        self._small_bytes = small_bytes
        self._buffers: list[Tensor] | None = None
        self._until_free: list[Callable[[], object]] = [_free, _free]
        self._next = 0

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        """Copy an array into out, of the same shape, and convert its type. The array may be changed once this returns.

        Cost: the first large array allocates the two buffers, which are kept.
        """
        step = self._buffer_bytes // max(out[:1].numel() * out.itemsize, 1)
        if out.nbytes < self._small_bytes or step == 0 or not self._pinned():
            out.copy_(_tensor(array))
            return
        for first in range(0, len(array), step):
            self._write_part(array[first : first + step], out[first : first + step])

    def _write_part(self, array: npt.NDArray[Any], out: Tensor) -> None:
        number, self._next = self._next, 1 - self._next
        self._until_free[number]()
        pinned = self._pinned()[number][: out.numel() * out.itemsize].view(out.dtype).view(out.shape)
        pinned.copy_(_tensor(array))
        self._until_free[number] = self._send(out, pinned)

    def _pinned(self) -> list[Tensor]:
        """Return the two buffers; none where the system refused them."""
        if self._buffers is None:
            try:
                self._buffers = [self._pin(self._buffer_bytes) for _ in self._until_free]
            except RuntimeError as error:
                log.warning("no pinned memory, so that uploads take longer: %s", str(error).splitlines()[0])
                self._buffers = []
        return self._buffers


def empty_like(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return a device tensor of an array's shape and type."""
    return torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, device=device)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return an array as a tensor, which shares its memory unless that may only be read."""
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())


def _free() -> None:
    return
