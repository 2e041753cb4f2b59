"""Every kernel runs for every type, on each of the CPU's instruction sets, under the emulator and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from mggcn import native
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from tests.backend.cases import type_name

if TYPE_CHECKING:
    from tests.emulator.device import EmulatedDevice
    from tests.emulator.module import EmulatedModule

# Threads alternate: that their number changes no bit has tests of its own.
CPU = [
    (torch.float32, "baseline", 1),
    (torch.float32, "avx2", 2),
    (torch.float64, "baseline", 2),
    (torch.float64, "avx2", 1),
    (torch.bfloat16, "baseline", 2),
    (torch.bfloat16, "avx2", 1),
]
# Seed 0 is the natural order of threads; others shuffle it.
EMULATED = [(torch.float32, 0), (torch.float32, 5), (torch.float32, 991), (torch.float64, 17), (torch.bfloat16, 331)]
SLOW_SEED = 991


def slow(seed: int) -> list[pytest.MarkDecorator]:
    """One more order of threads takes as long as the others and has found no more."""
    return [pytest.mark.slow] if seed == SLOW_SEED else []


GPU = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def _checked_builds_know_it(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test of emulated kernels that `-k emulated` leaves out, so that tests/emulator/checked.py never runs it.

    Tests of Triton's kernels may use the others beside them: its interpreter takes long and is checked by none of them.
    """
    if "emulated" in request.node.name or "emulated" in request.node.keywords:
        return
    from tests.emulator.device import EmulatedDevice

    really = EmulatedDevice.compile

    def refuse(device: EmulatedDevice, path: Path, options: tuple[str, ...]) -> EmulatedModule:
        if device.block_kernels is not None:
            return really(device, path, options)
        raise AssertionError(f"{path.name} is emulated: name the case so, or mark the test pytest.mark.emulated")

    monkeypatch.setattr(EmulatedDevice, "compile", refuse)


def _cpu(dtype: torch.dtype, isa: str, threads: int) -> KernelBackend:
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    return CpuBackend(dtype, threads, isa)


def _emulated(dtype: torch.dtype, seed: int) -> KernelBackend:
    from tests.backend.emulated import emulated_backend

    return emulated_backend(dtype, seed)


def _gpu(dtype: torch.dtype, spmm: Literal["own", "cusparse"] = "own") -> KernelBackend:
    from mggcn.backend.cuda.backend import CudaBackend
    from mggcn.backend.cuda.device import CudaDevice
    from mggcn.backend.cuda.presence import missing_for_cuda
    from tests.backend.emulated import WORKSPACE_BYTES

    missing = missing_for_cuda()
    if missing:
        pytest.skip(missing)
    device = CudaDevice(0, capture=False)
    if dtype == torch.bfloat16 and device.traits.capability < (8, 0):
        pytest.skip("this GPU is older than sm_80, the first with bfloat16")
    return CudaBackend(dtype, device, WORKSPACE_BYTES, spmm)


@pytest.fixture(
    params=[
        *(pytest.param((_cpu, v), id=f"{type_name(v[0])}-{v[1]}-{v[2]}") for v in CPU),
        *(pytest.param((_emulated, v), id=f"emulated-{type_name(v[0])}-{v[1]}", marks=slow(v[1])) for v in EMULATED),
        *(pytest.param((_gpu, (d,)), id=f"cuda-{type_name(d)}", marks=pytest.mark.cuda) for d in GPU),
        *(
            pytest.param((_gpu, (d, "cusparse")), id=f"cuda-cusparse-{type_name(d)}", marks=pytest.mark.cuda)
            for d in GPU[:2]
        ),
    ]
)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    make, how = request.param
    made: KernelBackend = make(*how)
    return made
