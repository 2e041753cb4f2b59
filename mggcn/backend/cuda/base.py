"""The contract of a device under the CUDA backend: it compiles kernels, has events and streams, records and replays
epochs.

Two classes fulfil it: backend/cuda/device.py on a GPU, and the tests' emulator on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.cuda.cusparse import Library
from mggcn.backend.cuda.kernels import Module
from mggcn.backend.cuda.sizes import DeviceTraits
from mggcn.backend.cuda.triton_kernels import BlockKernels
from mggcn.backend.events import Agree, CommStream, Event, Repeatable, Timestamp, UploadStream, alone


class Device(Protocol):
    """One device as one rank uses it: a stream for kernels, one for messages and one for batches."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def traits(self) -> DeviceTraits: ...

    @property
    def comm_stream(self) -> CommStream: ...

    @property
    def upload_stream(self) -> UploadStream: ...

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        """Implement KernelBackend.pinned."""
        ...

    @property
    def cusparse(self) -> Library:
        """CuSPARSE on the rank's stream. Raises: BackendError if there is none."""
        ...

    @property
    def block_kernels(self) -> BlockKernels | None:
        """Triton's kernels on the rank's stream; None where Triton is not installed or they were not measured."""
        ...

    def activate(self) -> None:
        """Implement KernelBackend.activate."""
        ...

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        """Implement KernelBackend.write."""
        ...

    def compile(self, path: Path, options: tuple[str, ...]) -> Module:
        """Compile a .cu file for this device."""
        ...

    def mixed_matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Out (float32) = or += a @ b of bfloat16, accumulated and kept in float32."""
        ...

    def record(self) -> Event:
        """Return an event that is done when all kernels so far are."""
        ...

    def timestamp(self) -> Timestamp:
        """Return a timestamp that is taken once all kernels so far are done."""
        ...

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        """Implement KernelBackend.repeatable."""
        ...

    def synchronize(self) -> None: ...

    def peak_bytes(self) -> int: ...
