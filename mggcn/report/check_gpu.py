"""Doctor: the NVIDIA driver, the GPUs, and which of them reach each other's memory, all asked of the driver library.

No CUDA context is made and nothing is imported. A machine without a GPU is healthy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from mggcn.report.figure import format_bytes
from mggcn.report.findings import Finding

BOTH = "pip install cupy-cuda12x (driver for CUDA 12) or cupy-cuda13x (CUDA 13)"
OLDEST = (7, 0)
"""Volta: the oldest architecture that mggcn's kernels are compiled for."""
OLDEST_CUDA13 = (7, 5)
"""Turing: the oldest architecture that CUDA 13 compiles for."""
BF16 = (8, 0)
"""Ampere: the oldest architecture that computes with bfloat16."""
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*

Load = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    nbytes: int
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.nbytes)}, sm_{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this machine."""

    cuda: tuple[int, int]
    """Newest CUDA version that it runs."""
    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs of which one at least cannot access the other's memory."""
    version: str | None = None

    @property
    def cuda_major(self) -> int:
        """The CUDA major version that torch and CuPy should be built for."""
        return 13 if self.cuda >= (13, 0) and all(gpu.capability >= OLDEST_CUDA13 for gpu in self.gpus) else 12

    @property
    def install(self) -> str:
        """The command that installs CuPy."""
        return f"pip install cupy-cuda{self.cuda_major}x"


def find_driver(load: Load = ctypes.CDLL) -> Driver | None:
    """Ask the driver library for its version and devices; None without a driver."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    count = ctypes.c_int(0)
    if library.cuInit(0) == 0:
        library.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_gpu(library, index) for index in range(count.value))
    apart = tuple(pair for pair in combinations(range(count.value), 2) if not _reach_each_other(library, *pair))
    return Driver(cuda, gpus, apart, _version(load))


def _gpu(library: Any, index: int) -> Gpu:
    device, name, nbytes = ctypes.c_int(index), ctypes.create_string_buffer(100), ctypes.c_size_t(0)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return Gpu(name.value.decode(), nbytes.value, (capability[0], capability[1]))


def _reach_each_other(library: Any, one: int, other: int) -> bool:
    for device, peer in ((one, other), (other, one)):
        able = ctypes.c_int(0)
        library.cuDeviceCanAccessPeer(ctypes.byref(able), device, peer)
        if not able.value:
            return False
    return True


def _version(load: Load) -> str | None:
    """Return the driver's own version, such as 580.65.06, or None where the management library is absent."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() != 0 or library.nvmlSystemGetDriverVersion(version, len(version)) != 0:
        return None
    return version.value.decode()


def check_driver(driver: Driver | None) -> Finding:
    """Tell which driver there is."""
    name = "NVIDIA driver"
    if driver is None:
        return Finding(name, "missing", "none here; runs use the CPU", f"on a machine with NVIDIA GPUs: {BOTH}")
    shown = f"CUDA {driver.cuda[0]}.{driver.cuda[1]}, {_counted(len(driver.gpus))}"
    shown = shown if driver.version is None else f"{driver.version}, {shown}"
    if not driver.gpus:
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all"
        return Finding(name, "missing", f"{shown} usable", remedy)
    if driver.cuda < (12, 0):
        remedy = "install a newer driver (525 or later)"
        return Finding(name, "missing", f"{shown}, expected CUDA 12 or newer", remedy)
    return Finding(name, "ok", shown)


def check_gpus(driver: Driver | None) -> Finding:
    """Name the GPUs, their memory and what they cannot do."""
    if driver is None or not driver.gpus:
        return Finding("GPUs", "missing", "none here")
    runs = [(str(gpu), len(list(same))) for gpu, same in groupby(driver.gpus)]
    shown = ", ".join(f"{count} x {gpu}" if count > 1 else gpu for gpu, count in runs)
    least = min(gpu.capability for gpu in driver.gpus)
    if least < OLDEST:
        return Finding(
            "GPUs", "missing", shown, "mggcn needs sm_70 (V100) or newer: hide older ones by CUDA_VISIBLE_DEVICES"
        )
    if least < BF16:
        return Finding("GPUs", "ok", f"{shown}; --precision bf16 and tf32 need sm_80 or newer")
    return Finding("GPUs", "ok", shown)


def check_peers(driver: Driver | None) -> Finding:
    """Say which GPUs reach each other's memory; NCCL takes the path over the host's memory between the rest."""
    if driver is None or not driver.gpus:
        return Finding("peer access", "missing", "no GPU here")
    count = len(driver.gpus)
    if count == 1:
        return Finding("peer access", "ok", "one GPU: none needed")
    pairs = count * (count - 1) // 2
    if not driver.apart:
        return Finding("peer access", "ok", f"all {count} GPUs reach each other's memory")
    remedy = (
        "messages between them take the slower path over host memory; nvidia-smi topo -m shows how they are connected"
    )
    if len(driver.apart) == pairs:
        return Finding("peer access", "missing", f"none of the {count} GPUs reaches another's memory", remedy)
    shown = ", ".join(f"{one}-{other}" for one, other in driver.apart)
    return Finding("peer access", "missing", f"{len(driver.apart)} of {pairs} pairs of GPUs have none: {shown}", remedy)


def _counted(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
