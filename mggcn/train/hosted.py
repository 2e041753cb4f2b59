"""Rows of a rank in pinned memory of the host between the forward and the backward pass (run.capacity = host)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.backend.events import Event
from mggcn.errors import BackendError
from mggcn.memory.arena import BufferSpec
from mggcn.memory.units import human


class PinnedRows:
    """Implement HostRows on the stream of uploads, which runs over the whole graph need for nothing else.

    slots: what lies on the host, from slot 1 on. A slot is written in every epoch's forward pass and read in its backward
    pass, in this order on one stream, so that no epoch writes over what the one before still reads.
    """

    def __init__(self, slots: Sequence[BufferSpec], backend: KernelBackend) -> None:
        self._specs = slots
        self._backend = backend
        self._slots: list[Tensor] = []
        # Events do not outlive their wait: one that was recorded outside a CUDA graph must not end while it is recorded.
        self._moving: dict[int, Event] = {}

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs)

    def begin(self) -> None:
        """Pin the memory before the first epoch, and once: what only predicts pins none. Raises: BackendError."""
        if self._slots:
            return
        try:
            memory = self._backend.pinned(self.nbytes, required=True)
        except BackendError as error:
            raise BackendError(
                f"rows on the host need {human(self.nbytes)} of pinned memory for each rank, and {error}; raise the limit "
                "of locked memory (ulimit -l), free memory, or set run.capacity=memory"
            ) from error
        self._slots = list(memory.split([spec.nbytes for spec in self._specs]))

    def send(self, slot: int, rows: Tensor) -> None:
        self._copy(slot, self._bytes(slot, rows), self._slots[slot - 1])

    def fetch(self, slot: int, out: Tensor) -> None:
        self._copy(slot, self._slots[slot - 1], self._bytes(slot, out))

    def wait(self, slot: int) -> None:
        self._moving.pop(slot).wait()

    def _copy(self, slot: int, source: Tensor, target: Tensor) -> None:
        stream = self._backend.upload_stream
        with stream.working(None):
            target.copy_(source, non_blocking=True)
        self._moving[slot] = stream.record()

    def _bytes(self, slot: int, rows: Tensor) -> Tensor:
        """Return a buffer with the padding of its rows: rows with gaps would be copied through memory of torch's own."""
        spec = self._specs[slot - 1]
        return rows.as_strided((spec.rows * spec.ld,), (1,)).view(torch.uint8)
