"""Doctor: the requirements of --device cuda besides a GPU: torch built for CUDA, one CuPy of the same major version,
and kernels that compute.

CuPy is imported only where a GPU and CuPy are both there, and after torch. CuPy's own kernels need CUDA's headers,
which runs do without, so none of them is used here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from mggcn.errors import BackendError
from mggcn.report.check_gpu import BOTH, OLDEST_CUDA13, Driver
from mggcn.report.check_packages import installed_version
from mggcn.report.findings import Finding

CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
PROBE = "rows.cu"
"""The file of the kernel that is tried."""


def cuda_version() -> tuple[int, ...] | None:
    """Return the CUDA version that torch is built for; None for a CPU build."""
    import torch

    built = torch.version.cuda
    return None if built is None else tuple(map(int, built.split(".")))


def check_torch_cuda(driver: Driver | None, compute: bool = True) -> Finding:
    """Tell whether torch can use the GPUs; without `compute` none of them is used for it."""
    import torch

    name, built = "torch CUDA", torch.version.cuda
    if built is None:
        remedy = f"install torch for CUDA {driver.cuda_major}, see pytorch.org" if driver and driver.gpus else ""
        return Finding(name, "missing", "torch is built for the CPU", remedy)
    if driver is None or not driver.gpus:
        return Finding(name, "missing", f"built for CUDA {built}, no GPU here")
    remedy = f"install torch built for CUDA {driver.cuda_major}, see pytorch.org, or a newer driver"
    if not torch.cuda.is_available():
        return Finding(name, "broken", f"built for CUDA {built}, but it cannot use the GPU", remedy)
    kernels = torch.cuda.get_arch_list()
    strange = [gpu for gpu in driver.gpus if not has_kernels(kernels, gpu.capability)]
    if strange:
        old = "install torch built for CUDA 12.6: newer builds do not support a V100"
        new = "install a newer torch, see pytorch.org"
        detail = f"built for CUDA {built}, with kernels for {', '.join(kernels)}: none for {strange[0]}"
        return Finding(name, "broken", detail, old if strange[0].capability < OLDEST_CUDA13 else new)
    try:
        total = torch.ones(3, device="cuda").sum().item() if compute else 3.0
    except RuntimeError as error:
        return Finding(name, "broken", f"built for CUDA {built}: {error}", remedy)
    if total != 3.0:
        return Finding(name, "broken", "a sum on the GPU came out wrong", "reinstall torch and look at nvidia-smi")
    return Finding(name, "ok", f"CUDA {built}, {driver.gpus[0].name}")


def installed_cupy() -> list[str]:
    """Return every CuPy that is installed, with its version."""
    return [f"{name} {version}" for name in CUPY if (version := installed_version(name))]


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build for `architectures` (sm_80, compute_120) runs on a GPU: machine code of its family, or older PTX."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int("".join(filter(str.isdigit, digits)))
        built = divmod(number, 10)
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def check_cupy(driver: Driver | None, torch_cuda: tuple[int, ...] | None, compute: bool = True) -> Finding:
    """Import CuPy where it can work, compute with it, and compare its CUDA with torch's and the driver's."""
    found = installed_cupy()
    usable = driver is not None and bool(driver.gpus)
    anew = f"pip uninstall {' '.join(CUPY)}, then {_install(driver, torch_cuda)}"
    if len(found) > 1:
        detail = f"several are installed: {', '.join(found)}"
        return Finding("CuPy", "broken" if usable else "missing", detail, f"they overwrite each other: {anew}")
    if not found:
        return Finding("CuPy", "missing", "not installed", f"for --device cuda: {_install(driver, torch_cuda)}")
    if driver is None or not usable:
        return Finding("CuPy", "missing", f"{found[0]} is installed, no GPU here")
    try:
        cupy = importlib.import_module("cupy")
        built = int(cupy.cuda.runtime.runtimeGetVersion())
        if compute:
            cupy.cuda.Stream(non_blocking=True).synchronize()
    except Exception as error:  # CuPy raises its own classes, which exist only once it is imported.
        return Finding("CuPy", "broken", f"{found[0]}: {error}", anew)
    major = built // 1000
    shown = f"{found[0]}, CUDA {major}.{built % 1000 // 10}"
    if major > driver.cuda[0]:
        return Finding("CuPy", "broken", f"{shown}; the driver has CUDA {driver.cuda[0]}.{driver.cuda[1]}", anew)
    if torch_cuda is not None and major != torch_cuda[0]:
        return Finding("CuPy", "broken", f"{shown}; torch is built for CUDA {torch_cuda[0]}", anew)
    return Finding("CuPy", "ok", shown)


def check_sources(cupy: Finding, compute: bool = True, device: str = "cuda") -> Finding:
    """Find the CUDA kernels and, where CuPy works, compile some for the GPU and compute with one."""
    name = "CUDA kernels"
    from mggcn.backend.cuda.kernels import folder

    try:
        sources = folder()
    except BackendError as error:
        remedy = "install mggcn again, see docs/install.md"
        return Finding(name, "broken" if cupy.state == "ok" else "missing", str(error), remedy)
    shown = f"{len(list(sources.glob('*.cu')))} files in {sources}"
    if cupy.state != "ok":
        return Finding(name, "missing", f"{shown}; CuPy, which compiles them, does not work here")
    if not compute:
        return Finding(name, "ok", shown)
    try:
        right = gathers(importlib.import_module("cupy"), device)
    except Exception as error:  # NVRTC's words, in a class of CuPy's
        remedy = "CuPy's NVRTC must load: see docs/install.md"
        return Finding(name, "broken", f"{PROBE} does not compile or run: {error}", remedy)
    if not right:
        return Finding(name, "broken", f"{PROBE} gathers wrong rows", "look at nvidia-smi, and for errors in dmesg")
    return Finding(name, "ok", f"{shown}, {PROBE} compiles and computes")


def gathers(cupy: Any, device: str) -> bool:
    """Gather rows by our kernel; return whether they are the right ones. Raises: what the compiler or the device raises."""
    import torch

    from mggcn.backend.cuda.compile import load_kernels
    from mggcn.backend.cuda.kernels import Kernels
    from mggcn.backend.cuda.rows import gather_rows

    source = torch.arange(96, dtype=torch.float32, device=device).view(12, 8)
    index = torch.tensor([7, 0, 11], dtype=torch.int32, device=device)
    out = torch.zeros(3, 8, device=device)
    gather_rows(Kernels(functools.partial(load_kernels, cupy), torch.float32), source, index, out)
    return torch.equal(out, source[index.long()])


def _install(driver: Driver | None, torch_cuda: tuple[int, ...] | None) -> str:
    """Return the command that installs CuPy for torch's CUDA or, if torch is a CPU build, for the driver's."""
    if torch_cuda is not None:
        return f"pip install cupy-cuda{torch_cuda[0]}x"
    return BOTH if driver is None else driver.install
