"""gpu.py and NCCL's self-test, with stand-ins for torch's CUDA, for CuPy and for the program."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import collect_env

from mggcn.backend.cuda import compile as cuda_compile
from mggcn.backend.cuda import kernels as cuda_kernels
from mggcn.doctor import gpu, nccl_selftest
from mggcn.doctor.findings import Finding
from mggcn.doctor.gpu import Machine
from mggcn.errors import BackendError
from mggcn.host import python
from tests.backend.fake_cupy import FakeCupy
from tests.emulator.module import EmulatedModule

GIB = 2**30
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, major=9, minor=0)
V100 = SimpleNamespace(name="Tesla V100-SXM2-32GB", total_memory=32 * GIB, major=7, minor=0)
P100 = SimpleNamespace(name="Tesla P100", total_memory=16 * GIB, major=6, minor=0)
NOTHING = Machine(None, "")
TWO = Machine("580.65.06", "GPU 0: H100\nGPU 1: H100", (H100, H100), (), "12.8")
CPU_BUILD = Machine("580.65.06", "GPU 0: H100")
FINE = Finding("CuPy", "ok", "")
ABSENT = Finding("CuPy", "missing", "not installed")


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: list[Any], apart: tuple[tuple[int, int], ...] = ()) -> None:
    """Have torch see GPUs, of which those of `apart` (device, peer) do not reach each other, and nvidia-smi list one."""
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "580.65.06")
    monkeypatch.setattr(collect_env, "get_gpu_info", lambda run: "GPU 0: H100")

    def available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return bool(gpus)

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_what_torch_and_nvidia_smi_say_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if access in one direction counts, or what torch warns of is lost."""
    pretend(monkeypatch, [H100] * 4, ((2, 1), (0, 3), (3, 0)))
    found = gpu.find_machine()
    assert (found.driver, len(found.gpus), found.apart, found.cuda) == ("580.65.06", 4, ((0, 3), (1, 2)), "12.8")
    pretend(monkeypatch, [])
    found = gpu.find_machine()
    assert (found.gpus, found.listed) == ((), "GPU 0: H100")
    finding = gpu.check_torch(found, compute=True)
    assert (finding.state, finding.remedy) == ("broken", gpu._TORCH)
    assert finding.detail.endswith("it cannot use the GPU. The NVIDIA driver on your system is too old")


@pytest.mark.parametrize(
    ("gpus", "state", "detail"),
    [
        ((H100,) * 8, "ok", "8 x NVIDIA H100 80GB HBM3 (80.0 GiB, sm_90); driver 580.65.06"),
        (
            (V100, H100),
            "ok",
            "Tesla V100-SXM2-32GB (32.0 GiB, sm_70), NVIDIA H100 80GB HBM3 (80.0 GiB, sm_90); driver 580.65.06; "
            "--precision bf16 and tf32 need sm_80 or newer",
        ),
        ((P100,), "missing", "Tesla P100 (16.0 GiB, sm_60); driver 580.65.06"),
        ((), "missing", "driver 580.65.06, GPU 0: H100"),
    ],
)
def test_gpus(gpus: tuple[Any, ...], state: str, detail: str) -> None:
    finding = gpu.check_gpus(replace(CPU_BUILD, gpus=gpus))
    assert (finding.state, finding.detail) == (state, detail)
    assert gpu.check_gpus(NOTHING) == Finding("GPUs", "missing", "none here; runs use the CPU")


def test_peers() -> None:
    assert gpu.check_peers(TWO).detail == "all 2 GPUs reach each other's memory"
    assert gpu.check_peers(replace(TWO, gpus=(H100,))).state == "ok"
    finding = gpu.check_peers(replace(TWO, gpus=(H100,) * 3, apart=((0, 1), (0, 2))))
    assert (finding.state, finding.detail) == ("missing", "2 of 3 pairs of GPUs have none: 0-1, 0-2")


def test_torch_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.check_torch(NOTHING, True) == Finding("torch CUDA", "missing", "torch is built for the CPU")
    assert gpu.check_torch(CPU_BUILD, True).remedy == gpu._TORCH
    assert gpu.check_torch(Machine(None, "", cuda="13.0"), True).detail == "built for CUDA 13.0, no GPU here"

    def fail(*shape: int, device: str) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch, "ones", fail)
    finding = gpu.check_torch(replace(TWO, warned="Tesla V100 is not compatible"), True)
    assert finding.state == "broken"
    assert finding.detail == "built for CUDA 12.8: no kernel image is available Tesla V100 is not compatible"
    assert gpu.check_torch(TWO, compute=False) == Finding("torch CUDA", "ok", "built for CUDA 12.8")
    finding = gpu.check_torch(replace(TWO, warned="Tesla V100 is not compatible"), compute=False)
    assert (finding.state, finding.remedy) == ("ok", gpu._TORCH)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.full(shape, 2.0))
    assert gpu.check_torch(TWO, True).detail == "a sum on the GPU came out wrong"


def fake_cupy(cuda: int = 12090, driver: int = 13000, usable: bool = True) -> Any:
    """CuPy without arrays or kernels of its own."""
    cupy: Any = FakeCupy()
    cupy.runs_on = cuda
    cupy.cuda.runtime.driverGetVersion = lambda: driver

    def synchronize() -> None:
        if not usable:
            raise RuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.Stream = lambda non_blocking: SimpleNamespace(synchronize=synchronize)
    return cupy


def install(monkeypatch: pytest.MonkeyPatch, names: list[str], cupy: Any = None) -> None:
    """Pretend that distributions are installed and that importing cupy gives `cupy`."""
    monkeypatch.setattr(gpu, "installed_version", lambda name: "13.6.0" if name in names else None)

    def load(name: str) -> Any:
        if cupy is None or name != "cupy":
            raise ImportError(f"no {name}")
        return cupy

    monkeypatch.setattr(importlib, "import_module", load)


def test_cupy_is_not_imported_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    for machine in (NOTHING, CPU_BUILD):
        assert gpu.check_cupy(machine, True).detail.startswith("cupy-cuda12x 13.6.0 is installed, no GPU here")
    assert "cupy" not in sys.modules


def test_the_remedy_names_the_cupy_of_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [])
    assert gpu.check_cupy(TWO, True).remedy == "for --device cuda: pip install cupy-cuda12x"
    assert gpu.check_cupy(replace(TWO, cuda="13.0"), True).remedy.endswith("pip install cupy-cuda13x")
    assert {"cupy-cuda12x", "cupy-cuda13x"} <= set(gpu.check_cupy(CPU_BUILD, True).remedy.split())


def test_two_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x", "cupy-cuda13x"], fake_cupy())
    finding = gpu.check_cupy(TWO, True)
    assert finding.state == "broken"
    assert "cupy-cuda12x 13.6.0, cupy-cuda13x 13.6.0" in finding.detail
    assert gpu.check_cupy(NOTHING, True).state == "missing", "a CPU machine is healthy all the same"


def test_cupy_must_import_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    assert gpu.check_cupy(TWO, True).detail == "cupy-cuda12x 13.6.0: no cupy"
    install(monkeypatch, ["cupy-cuda12x"], fake_cupy(usable=False))
    finding = gpu.check_cupy(TWO, True)
    assert (finding.state, finding.detail) == ("broken", "cupy-cuda12x 13.6.0: cudaErrorInsufficientDriver")
    assert gpu.check_cupy(TWO, compute=False).state == "ok", "the GPU is not used"


@pytest.mark.parametrize(
    ("cuda", "driver", "torch_cuda", "said"),
    [
        (13000, 12080, "12.8", "CUDA 13.0; the driver has CUDA 12.8"),
        (12090, 13000, "13.0", "CUDA 12.9; torch is built for CUDA 13.0"),
        (12090, 13000, "12.4", "CUDA 12.9"),
    ],
)
def test_cupy_fits_torch_and_driver(
    monkeypatch: pytest.MonkeyPatch, cuda: int, driver: int, torch_cuda: str, said: str
) -> None:
    install(monkeypatch, ["cupy"], fake_cupy(cuda, driver))
    finding = gpu.check_cupy(replace(TWO, cuda=torch_cuda), True)
    assert finding.detail == f"cupy 13.6.0, {said}"
    assert finding.state == ("broken" if ";" in said else "ok")


def emulated(monkeypatch: pytest.MonkeyPatch, path: Path | None = None) -> None:
    """Have the emulator compile what the doctor asks for, or another file in its place."""
    install(monkeypatch, ["cupy-cuda12x"], fake_cupy())

    def load(given: Any, asked: Path, options: tuple[str, ...]) -> EmulatedModule:
        return EmulatedModule(path or asked, options)

    monkeypatch.setattr(cuda_compile, "load_kernels", load)


def test_sources_are_found_compiled_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the doctor needs kernels of CuPy's own, or believes in kernels without running one."""
    emulated(monkeypatch)
    finding = gpu.check_sources(FINE, device="cpu")
    assert finding.state == "ok", finding.detail
    assert finding.detail.endswith("rows.cu compiles and computes")
    assert gpu.check_sources(ABSENT).state == "missing"
    assert not gpu.check_sources(FINE, compute=False).detail.endswith("computes")


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for header in cuda_kernels.folder().glob("*.cuh"):
        shutil.copy(header, tmp_path)
    text = (cuda_kernels.folder() / "rows.cu").read_text()
    assert "in + index[i] * ld_in" in text
    (tmp_path / "rows.cu").write_text(text.replace("in + index[i] * ld_in", "in + i * ld_in"))
    emulated(monkeypatch, tmp_path / "rows.cu")
    finding = gpu.check_sources(FINE, device="cpu")
    assert (finding.state, finding.detail) == ("broken", "rows.cu gathers wrong rows")


def test_sources_that_are_missing_or_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    finding = gpu.check_sources(FINE, device="cpu")
    assert finding.state == "broken"
    assert "rows.cu does not compile or run: no cupy" in finding.detail

    def nowhere() -> Path:
        raise BackendError("the CUDA sources are not in /nowhere")

    monkeypatch.setattr(cuda_kernels, "folder", nowhere)
    assert (gpu.check_sources(FINE).state, gpu.check_sources(ABSENT).state) == ("broken", "missing")


def test_wheels_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, list(gpu.NCCL))
    both = gpu.check_nccl(replace(TWO, cuda="13.0"), False)
    assert both.state == "broken"
    assert both.detail == "several are installed: nvidia-nccl-cu12 13.6.0, nvidia-nccl-cu13 13.6.0"
    assert both.remedy.endswith("nvidia-nccl-cu13")
    assert gpu.check_nccl(NOTHING, False).state == "missing", "a CPU machine is healthy all the same"
    install(monkeypatch, ["nvidia-nccl-cu12"])
    assert gpu.check_nccl(TWO, False) == Finding("NCCL", "ok", "nvidia-nccl-cu12 13.6.0")


def test_self_test_findings() -> None:
    def look(answer: object, machine: Machine = TWO) -> Finding:
        run: Callable[[list[str], float], str] = lambda command, limit_s: f"a warning\n{json.dumps(answer)}\n"  # noqa: E731
        return gpu.check_nccl(machine, True, run)

    assert look({"version": "2.27.3", "wrong": []}) == Finding("NCCL", "ok", "2.27.3, self-test passed on 2 GPUs")
    assert look({"version": "2.27.3", "wrong": [1]}).detail == "self-test: wrong sums on GPUs [1]"
    error = {"error": "RuntimeError: unhandled system error"}
    assert (look(error).state, look(error, replace(TWO, gpus=(H100,))).state) == ("broken", "missing")
    assert gpu.check_nccl(NOTHING, True).state == "missing"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(60)", "no result within 1 s on 2 GPUs"),
        ("import os; os.abort()", "code -6"),
        ("print('no JSON')", "it died"),
        ("pass", "it died"),
    ],
)
def test_a_self_test_that_hangs_or_dies_is_reported(code: str, said: str) -> None:
    """The limit is kept by the real runner; the program is another one."""

    def other(command: list[str], limit_s: float) -> str:
        return gpu.run_command([sys.executable, "-c", code], limit_s)

    finding = gpu.check_nccl(TWO, True, other, limit_s=0.6 if "sleep" in code else 60)
    assert finding.state == "broken"
    assert said in finding.detail
    assert "NCCL_DEBUG=INFO" in finding.remedy


@pytest.mark.full
def test_the_program_answers_without_a_gpu() -> None:
    """Runs as the doctor starts it; where torch can use a GPU, it passes."""
    done = subprocess.run([*python("mggcn.doctor.nccl_selftest"), "1"], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert ("error" in answer) != (answer.get("wrong") == [])


@pytest.mark.parametrize("lost", [None, 3])
def test_sums_of_all_gpus_are_compared(monkeypatch: pytest.MonkeyPatch, lost: int | None) -> None:
    """Fails if a GPU whose sum is wrong passes; `lost` is one that NCCL forgets."""
    full = torch.full
    monkeypatch.setattr(nccl_selftest.torch, "full", lambda shape, value, device: full(shape, value))

    def all_reduce(buffers: list[torch.Tensor]) -> None:
        total = torch.stack(buffers).sum(0)
        for rank, buffer in enumerate(buffers):
            if rank != lost:
                buffer.copy_(total)

    monkeypatch.setattr(nccl_selftest.nccl, "all_reduce", all_reduce)
    monkeypatch.setattr(nccl_selftest.nccl, "version", lambda: (2, 27, 3))
    assert nccl_selftest.main(5) == {"version": "2.27.3", "wrong": [] if lost is None else [lost]}
