"""A device for the CUDA backend without a GPU (mggcn/backend/cuda/base.py): CPU tensors, emulated kernels, no streams."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.cuda.sizes import DeviceTraits
from mggcn.backend.cuda.triton_kernels import BlockKernels
from mggcn.backend.cuda.upload import Uploads
from mggcn.backend.events import DONE, Agree, Done, Eager, alone
from mggcn.backend.host import HostStream
from mggcn.errors import BackendError
from tests.emulator.module import EmulatedModule

H100 = DeviceTraits("emulated GPU", (9, 0), 132, 50 * 2**20)


@dataclass(frozen=True, slots=True)
class HostTime:
    """A moment of the host's clock."""

    at_s: float

    def seconds_since(self, earlier: HostTime) -> float:
        return self.at_s - earlier.at_s


def _buffer(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def _send(out: Tensor, pinned: Tensor) -> Callable[[], object]:
    out.copy_(pinned)
    return lambda: pinned.view(-1).view(torch.uint8).fill_(0xA5)


class EmulatedDevice:
    """seed: in which order the threads of a block and the blocks of a grid run; 0 is the natural one.

    block_kernels: Triton's; its interpreter takes tenths of a second for a block.
    """

    def __init__(self, seed: int = 0, traits: DeviceTraits = H100, block_kernels: BlockKernels | None = None) -> None:
        self.block_kernels = block_kernels
        self._seed = seed
        self._traits = traits
        self._uploads = Uploads(_buffer, _send, buffer_bytes=768, small_bytes=64)

    def activate(self) -> None:
        return

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def traits(self) -> DeviceTraits:
        return self._traits

    @property
    def comm_stream(self) -> HostStream:
        return HostStream()

    @property
    def upload_stream(self) -> HostStream:
        return HostStream()

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @property
    def cusparse(self) -> Any:
        raise BackendError("the emulated device has no cuSPARSE")

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        self._uploads.write(array, out)

    def compile(self, path: Path, options: tuple[str, ...]) -> EmulatedModule:
        return EmulatedModule(path, options, self._seed)

    def mixed_matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        product = a.float() @ b.float()
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)

    def record(self) -> Done:
        return DONE

    def timestamp(self) -> HostTime:
        return HostTime(time.perf_counter())

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Eager:
        return Eager(function)

    def synchronize(self) -> None:
        return

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
