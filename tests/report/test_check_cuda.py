"""check_cuda.py with stand-ins for torch's CUDA and for CuPy."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mggcn.backend.cuda import compile as cuda_compile
from mggcn.backend.cuda import kernels as cuda_kernels
from mggcn.errors import BackendError
from mggcn.report import check_cuda
from mggcn.report.check_gpu import Driver, Gpu
from mggcn.report.findings import Finding
from tests.backend.fake_cupy import FakeCupy
from tests.emulator.module import EmulatedModule
from tests.report.test_check_gpu import H100, V100

GPU = Driver((12, 8), (H100, H100))
NEW = Driver((13, 0), (H100,))
FINE = Finding("CuPy", "ok", "")
ABSENT = Finding("CuPy", "missing", "not installed")


def fake_cupy(cuda: int = 12090, usable: bool = True) -> Any:
    """CuPy without arrays or kernels of its own."""
    cupy: Any = FakeCupy()
    cupy.runs_on = cuda

    def synchronize() -> None:
        if not usable:
            raise RuntimeError("cudaErrorInsufficientDriver")

    cupy.cuda.Stream = lambda non_blocking: SimpleNamespace(synchronize=synchronize)
    return cupy


def install(monkeypatch: pytest.MonkeyPatch, names: list[str], cupy: Any = None) -> None:
    """Pretend that distributions are installed and that importing cupy gives `cupy`."""
    monkeypatch.setattr(check_cuda, "installed_version", lambda name: "13.6.0" if name in names else None)

    def load(name: str) -> Any:
        if cupy is None or name != "cupy":
            raise ImportError(f"no {name}")
        return cupy

    monkeypatch.setattr(importlib, "import_module", load)


def test_cupy_is_not_imported_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    for driver in (None, Driver((12, 8))):
        finding = check_cuda.check_cupy(driver, (12, 8))
        assert finding.detail == "cupy-cuda12x 13.6.0 is installed, no GPU here"
    assert "cupy" not in sys.modules


def test_remedy_names_the_cupy_of_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [])
    assert check_cuda.check_cupy(NEW, (12, 6)).remedy.endswith("pip install cupy-cuda12x")
    assert check_cuda.check_cupy(NEW, None).remedy.endswith("pip install cupy-cuda13x")
    assert check_cuda.check_cupy(GPU, None).remedy.endswith("pip install cupy-cuda12x")
    remedy = check_cuda.check_cupy(None, None).remedy
    assert "cupy-cuda12x" in remedy
    assert "cupy-cuda13x" in remedy


def test_two_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x", "cupy-cuda13x"], fake_cupy())
    finding = check_cuda.check_cupy(GPU, (12, 8))
    assert finding.state == "broken"
    assert "cupy-cuda12x 13.6.0, cupy-cuda13x 13.6.0" in finding.detail
    assert check_cuda.check_cupy(None, None).state == "missing", "a CPU machine is healthy all the same"


def test_cupy_must_import_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    assert check_cuda.check_cupy(GPU, (12, 8)).detail == "cupy-cuda12x 13.6.0: no cupy"
    install(monkeypatch, ["cupy-cuda12x"], fake_cupy(usable=False))
    finding = check_cuda.check_cupy(GPU, (12, 8))
    assert (finding.state, finding.detail) == ("broken", "cupy-cuda12x 13.6.0: cudaErrorInsufficientDriver")
    install(monkeypatch, ["cupy-cuda12x"], fake_cupy())
    assert check_cuda.check_cupy(GPU, (12, 8)) == Finding("CuPy", "ok", "cupy-cuda12x 13.6.0, CUDA 12.9")


@pytest.mark.parametrize(
    ("cuda", "driver", "torch_cuda", "said"),
    [
        (13000, GPU, (12, 8), "CUDA 13.0; the driver has CUDA 12.8"),
        (12090, NEW, (13, 0), "CUDA 12.9; torch is built for CUDA 13"),
        (12090, NEW, None, "CUDA 12.9"),
        (12090, NEW, (12, 4), "CUDA 12.9"),
    ],
)
def test_cupy_fits_torch_and_driver(
    monkeypatch: pytest.MonkeyPatch, cuda: int, driver: Driver, torch_cuda: tuple[int, int] | None, said: str
) -> None:
    install(monkeypatch, ["cupy"], fake_cupy(cuda))
    finding = check_cuda.check_cupy(driver, torch_cuda)
    assert finding.detail == f"cupy 13.6.0, {said}"
    assert finding.state == ("broken" if ";" in said else "ok")


def pretend_torch(monkeypatch: pytest.MonkeyPatch, cuda: str | None, *kernels: str) -> None:
    """Pretend that torch is built for a CUDA version and architectures; without any it cannot use the GPU."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(kernels))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(kernels))


def test_torch_that_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, None)
    assert check_cuda.cuda_version() is None
    assert check_cuda.check_torch_cuda(None).remedy == ""
    assert check_cuda.check_torch_cuda(NEW).remedy == "install torch for CUDA 13, see pytorch.org"
    pretend_torch(monkeypatch, "13.0")
    assert check_cuda.cuda_version() == (13, 0)
    assert check_cuda.check_torch_cuda(None).state == "missing"
    finding = check_cuda.check_torch_cuda(GPU)
    assert (finding.state, finding.detail) == ("broken", "built for CUDA 13.0, but it cannot use the GPU")
    assert "CUDA 12" in finding.remedy


def test_torch_without_kernels_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that such a GPU is available; its first kernel fails."""
    pretend_torch(monkeypatch, "12.8", "sm_75", "sm_80", "sm_90")
    finding = check_cuda.check_torch_cuda(Driver((13, 0), (H100, V100)))
    assert finding.state == "broken"
    assert "with kernels for sm_75, sm_80, sm_90: none for Tesla V100" in finding.detail
    assert "CUDA 12.6" in finding.remedy
    blackwell = Gpu("NVIDIA B200", 2**37, (10, 0))
    assert "newer torch" in check_cuda.check_torch_cuda(Driver((13, 0), (blackwell,))).remedy


def test_torch_that_fails_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*shape: int, device: str) -> None:
        raise RuntimeError("out of memory")

    pretend_torch(monkeypatch, "12.8", "sm_90")
    monkeypatch.setattr(torch, "ones", fail)
    assert check_cuda.check_torch_cuda(GPU).detail == "built for CUDA 12.8: out of memory"
    fine = Finding("torch CUDA", "ok", "CUDA 12.8, NVIDIA H100 80GB HBM3")
    assert check_cuda.check_torch_cuda(GPU, compute=False) == fine, "the GPU is not used"


@pytest.mark.parametrize(
    ("kernels", "capability", "enough"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["sm_90a", "sm_100"], (10, 3), True),
        (["compute_120"], (10, 0), False),
        ([], (9, 0), False),
    ],
)
def test_kernels_for_a_gpu(kernels: list[str], capability: tuple[int, int], enough: bool) -> None:
    assert check_cuda.has_kernels(kernels, capability) is enough


def emulated(monkeypatch: pytest.MonkeyPatch, path: Path | None = None) -> Any:
    """Have the emulator compile what the doctor asks for, or another file in its place."""
    cupy = fake_cupy()
    install(monkeypatch, ["cupy-cuda12x"], cupy)

    def load(given: Any, asked: Path, options: tuple[str, ...]) -> EmulatedModule:
        assert given is cupy
        return EmulatedModule(path or asked, options)

    monkeypatch.setattr(cuda_compile, "load_kernels", load)
    return cupy


def test_sources_are_found_compiled_and_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the doctor needs kernels of CuPy's own, or believes in kernels without running one."""
    emulated(monkeypatch)
    finding = check_cuda.check_sources(FINE, device="cpu")
    assert finding.state == "ok", finding.detail
    assert finding.detail.endswith("rows.cu compiles and computes")
    assert check_cuda.check_sources(ABSENT).state == "missing"


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for header in cuda_kernels.folder().glob("*.cuh"):
        shutil.copy(header, tmp_path)
    text = (cuda_kernels.folder() / "rows.cu").read_text()
    assert "in + index[i] * ld_in" in text
    (tmp_path / "rows.cu").write_text(text.replace("in + index[i] * ld_in", "in + i * ld_in"))
    emulated(monkeypatch, tmp_path / "rows.cu")
    finding = check_cuda.check_sources(FINE, device="cpu")
    assert (finding.state, finding.detail) == ("broken", "rows.cu gathers wrong rows")


def test_nothing_is_computed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(usable=False)
    install(monkeypatch, ["cupy-cuda12x"], cupy)
    assert check_cuda.check_cupy(GPU, (12, 8), compute=False).state == "ok"
    assert check_cuda.check_sources(FINE, compute=False).state == "ok"
    assert cupy.compiled == []


def test_sources_that_are_missing_or_do_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, ["cupy-cuda12x"])
    finding = check_cuda.check_sources(FINE, device="cpu")
    assert finding.state == "broken"
    assert "rows.cu does not compile or run: no cupy" in finding.detail

    def nowhere() -> Path:
        raise BackendError("the CUDA sources are not in /nowhere")

    monkeypatch.setattr(cuda_kernels, "folder", nowhere)
    assert check_cuda.check_sources(FINE) == Finding(
        "CUDA kernels", "broken", "the CUDA sources are not in /nowhere", "install mggcn again, see docs/install.md"
    )
    assert check_cuda.check_sources(ABSENT).state == "missing"
