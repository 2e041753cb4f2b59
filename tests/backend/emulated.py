"""The CUDA backend without a GPU."""

from __future__ import annotations

import torch

from mggcn.backend.cuda.backend import CudaBackend
from tests.emulator.device import EmulatedDevice

WORKSPACE_BYTES = 2**20


def emulated_backend(dtype: torch.dtype, seed: int) -> CudaBackend:
    """Return a CudaBackend whose kernels run under the emulator; `seed` shuffles their threads, 0 does not."""
    return CudaBackend(dtype, EmulatedDevice(seed), WORKSPACE_BYTES)
