"""Every kernel runs for both types, every instruction set that the processor has, with one or two threads."""

from __future__ import annotations

import pytest
import torch

from mggcn import native
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu import CpuBackend

# Threads alternate: that their number changes no bit has tests of its own.
VARIANTS = [
    (torch.float32, "baseline", 1),
    (torch.float32, "avx2", 2),
    (torch.float64, "baseline", 2),
    (torch.float64, "avx2", 1),
]


@pytest.fixture(params=VARIANTS, ids=lambda v: f"{str(v[0])[-2:]}-{v[1]}-{v[2]}")
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    dtype, isa, threads = request.param
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    return CpuBackend(dtype, threads, isa)
