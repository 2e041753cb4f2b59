"""Doctor: NVIDIA driver, torch's CUDA build, CuPy and NCCL. All are optional; a machine without a GPU is healthy.

CuPy is imported only where a driver and CuPy are both installed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from mggcn.report.check_packages import installed_version
from mggcn.report.findings import Finding

_BOTH = 'pip install "mggcn[cuda12]" (driver for CUDA 12) or "mggcn[cuda13]" (CUDA 13)'
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this machine."""

    cuda: tuple[int, int]
    """Newest CUDA version that it runs."""
    num_devices: int

    @property
    def extra(self) -> str:
        """The extra of mggcn that fits."""
        return "cuda13" if self.cuda >= (13, 0) else "cuda12"


def find_driver(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> Driver | None:
    """Ask the driver library for its version and devices; None without a driver. Creates no CUDA context."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    if library.cuInit(0) == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    return Driver((version.value // 1000, version.value % 1000 // 10), count.value)


def check_driver(driver: Driver | None) -> Finding:
    """Tell which GPUs there are."""
    if driver is None:
        return Finding(
            "NVIDIA driver", "missing", "none here; runs use the CPU", f"on a machine with NVIDIA GPUs: {_BOTH}"
        )
    shown = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}, {driver.num_devices} GPU{'s' * (driver.num_devices != 1)}"
    if driver.num_devices == 0:
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all"
        return Finding("NVIDIA driver", "missing", f"{shown} usable", remedy)
    if driver.cuda < (12, 0):
        return Finding(
            "NVIDIA driver", "missing", f"{shown}, expected CUDA 12 or newer", "install a newer driver (525 or later)"
        )
    return Finding("NVIDIA driver", "ok", shown)


def check_torch_cuda(driver: Driver | None) -> Finding:
    """Tell whether torch can use the GPUs."""
    import torch

    name, built = "torch CUDA", torch.version.cuda
    if built is None:
        remedy = "install torch from its CUDA index, see pytorch.org" if driver and driver.num_devices else ""
        return Finding(name, "missing", "torch is built for the CPU", remedy)
    if driver is None or driver.num_devices == 0:
        return Finding(name, "missing", f"built for CUDA {built}, no GPU here")
    if not torch.cuda.is_available():
        remedy = f"install torch built for CUDA {driver.cuda[0]} or older, or a newer driver"
        return Finding(name, "broken", f"built for CUDA {built}, but it cannot use the GPU", remedy)
    if torch.ones(3, device="cuda").sum().item() != 3.0:
        return Finding(name, "broken", "a sum on the GPU came out wrong", "reinstall torch and look at nvidia-smi")
    return Finding(name, "ok", f"CUDA {built}, {torch.cuda.get_device_name()}")


def check_cupy(driver: Driver | None) -> Finding:
    """Import CuPy where it can work and compute with it."""
    found = [f"{name} {version}" for name in _CUPY if (version := installed_version(name))]
    usable = driver is not None and driver.num_devices > 0
    if len(found) > 1:
        remedy = f"they overwrite each other: pip uninstall {' '.join(_CUPY)}, then {_install(driver)}"
        return Finding("CuPy", "broken" if usable else "missing", f"several are installed: {', '.join(found)}", remedy)
    if not found:
        return Finding("CuPy", "missing", "not installed", f"for --device cuda: {_install(driver)}")
    if not usable:
        return Finding("CuPy", "missing", f"{found[0]} is installed, no GPU here")
    try:
        cupy = importlib.import_module("cupy")
        total = int(cupy.arange(5).sum())
    except Exception as error:  # CuPy raises its own classes, which exist only once it is imported.
        return Finding(
            "CuPy", "broken", f"{found[0]}: {error}", f"pip uninstall {' '.join(_CUPY)}, then {_install(driver)}"
        )
    if total != 10:
        return Finding("CuPy", "broken", f"{found[0]}: a sum came out as {total} instead of 10", "look at nvidia-smi")
    return Finding("CuPy", "ok", found[0])


def check_nccl(cupy: Finding) -> Finding:
    """Ask CuPy, which mggcn calls NCCL through, for its version."""
    if cupy.state != "ok":
        return Finding("NCCL", "missing", "comes with CuPy, which does not work here", "one GPU and CPUs need none")
    try:
        version = int(importlib.import_module("cupy.cuda.nccl").get_version())
    except Exception as error:  # Without libnccl the module lacks its functions or fails to load.
        return Finding(
            "NCCL", "missing", f"cannot be used: {error}", "for several GPUs: pip install nvidia-nccl-cu12 (or -cu13)"
        )
    return Finding("NCCL", "ok", f"{version // 10000}.{version // 100 % 100}.{version % 100}")


def _install(driver: Driver | None) -> str:
    return _BOTH if driver is None else f'pip install "mggcn[{driver.extra}]"'
