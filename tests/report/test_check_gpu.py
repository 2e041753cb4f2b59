"""check_gpu.py with stand-ins for the driver library and CuPy: this machine need not have a GPU."""

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mggcn.report import check_gpu
from mggcn.report.check_gpu import Driver
from mggcn.report.findings import Finding

GPU = Driver((12, 8), 2)


def fake_driver(version: int, devices: int, status: int = 0) -> Any:
    """Stand in for libcuda.so.1."""

    def write(value: int, pointer: Any) -> int:
        pointer._obj.value = value
        return 0

    return lambda name: SimpleNamespace(
        cuDriverGetVersion=lambda pointer: write(version, pointer),
        cuInit=lambda flags: status,
        cuDeviceGetCount=lambda pointer: write(devices, pointer),
    )


def install_cupy(monkeypatch: pytest.MonkeyPatch, names: list[str], modules: dict[str, Any]) -> None:
    """Pretend that distributions are installed and that importing them gives `modules`."""
    monkeypatch.setattr(check_gpu, "installed_version", lambda name: "13.6.0" if name in names else None)

    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"no {name}")
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", load)


def test_find_driver() -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert check_gpu.find_driver(absent) is None
    assert check_gpu.find_driver(fake_driver(12080, 2)) == GPU
    assert check_gpu.find_driver(fake_driver(13000, 4, status=100)) == Driver((13, 0), 0)
    assert (GPU.extra, Driver((13, 0), 1).extra) == ("cuda12", "cuda13")


def test_driver_findings() -> None:
    assert check_gpu.check_driver(GPU) == Finding("NVIDIA driver", "ok", "CUDA 12.8, 2 GPUs")
    assert check_gpu.check_driver(Driver((13, 0), 1)).detail == "CUDA 13.0, 1 GPU"
    for driver in (None, Driver((12, 8), 0), Driver((11, 4), 1)):
        assert check_gpu.check_driver(driver).state == "missing"


def test_cupy_is_not_imported_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cupy(monkeypatch, ["cupy-cuda12x"], {})
    for driver in (None, Driver((12, 8), 0)):
        assert check_gpu.check_cupy(driver).detail == "cupy-cuda12x 13.6.0 is installed, no GPU here"
    install_cupy(monkeypatch, [], {})
    assert 'pip install "mggcn[cuda12]"' in check_gpu.check_cupy(GPU).remedy
    assert 'pip install "mggcn[cuda13]"' in check_gpu.check_cupy(Driver((13, 1), 1)).remedy
    assert check_gpu.check_cupy(None).state == "missing"
    assert "cupy" not in sys.modules


def test_cupy_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cupy(monkeypatch, ["cupy-cuda12x", "cupy-cuda13x"], {})
    assert check_gpu.check_cupy(GPU).state == "broken"
    assert check_gpu.check_cupy(None).state == "missing", "a CPU machine is healthy all the same"
    install_cupy(monkeypatch, ["cupy-cuda12x"], {})
    assert check_gpu.check_cupy(GPU).detail == "cupy-cuda12x 13.6.0: no cupy"
    for total, state in ((10, "ok"), (11, "broken")):
        array = SimpleNamespace(sum=lambda total=total: total)
        install_cupy(monkeypatch, ["cupy-cuda12x"], {"cupy": SimpleNamespace(arange=lambda n, a=array: a)})
        assert check_gpu.check_cupy(GPU).state == state


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cupy(monkeypatch, [], {"cupy.cuda.nccl": SimpleNamespace(get_version=lambda: 22703)})
    assert check_gpu.check_nccl(Finding("CuPy", "ok", "")) == Finding("NCCL", "ok", "2.27.3")
    assert check_gpu.check_nccl(Finding("CuPy", "missing", "")).state == "missing"
    install_cupy(monkeypatch, [], {"cupy.cuda.nccl": SimpleNamespace()})
    assert "nvidia-nccl" in check_gpu.check_nccl(Finding("CuPy", "ok", "")).remedy


def test_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check_gpu.check_torch_cuda(None).remedy == ""
    assert "pytorch.org" in check_gpu.check_torch_cuda(GPU).remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert check_gpu.check_torch_cuda(None).state == "missing"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.check_torch_cuda(GPU).state == "broken"
