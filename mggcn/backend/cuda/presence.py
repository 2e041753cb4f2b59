"""Requirements of run.device cuda on a machine, and what is missing, in one line each."""

from __future__ import annotations

from typing import Any

import torch

from mggcn.backend.cpu.machine import Host
from mggcn.backend.cuda.triton_kernels import available
from mggcn.errors import BackendError

MIXED_PRODUCTS = "2.10"
"""First torch whose products of bf16 add to float32 (compared as torch.__version__ compares)."""


def gpu_name() -> str:
    """Return the name of the first GPU; "" if there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def fuses_products() -> bool:
    """Return whether the first GPU multiplies by kernels that do what follows, too: `CudaBackend.fuses_products`."""
    return torch.cuda.is_available() and available(torch.cuda.get_device_capability(0))


def gpu_host() -> Host:
    """Return the first GPU as the key of measured variants of products; `threads` are its multiprocessors.

    Raises: BackendError if there is none.
    """
    missing = missing_for_cuda()
    if missing:
        raise BackendError(missing)
    figures = torch.cuda.get_device_properties(0)
    return Host(figures.name, f"sm_{figures.major}{figures.minor}", figures.multi_processor_count, "")


def import_cupy() -> Any:
    """Return CuPy on a machine where it and torch can use a GPU. Raises: BackendError that names what is missing."""
    missing = missing_for_cuda()
    if missing:
        raise BackendError(missing)
    import cupy

    return cupy


def check_cuda(precision: str) -> None:
    """Raise BackendError, in one line, if this machine lacks what run.device cuda with this precision needs."""
    missing = missing_for_cuda()
    if missing:
        raise BackendError(missing)
    capability = torch.cuda.get_device_capability()
    if precision in ("bf16", "tf32") and capability < (8, 0):
        raise BackendError(
            f"run.precision {precision} needs a GPU of compute capability 8.0 or later (A100, H100 ...), "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}; use --precision fp32"
        )
    if precision == "bf16" and torch.__version__ < MIXED_PRODUCTS:
        raise BackendError(
            f"run.precision bf16 needs torch {MIXED_PRODUCTS} or later for products of bf16 with float32 results, found "
            f"{torch.__version__}; use --precision fp32 or a newer torch"
        )


def missing_for_cuda() -> str:
    """Return in one line what --device cuda lacks on this machine and how to get it; "" if it lacks nothing."""
    if torch.version.cuda is None:
        return (
            f"run.device cuda needs a torch built for CUDA, but this one ({torch.__version__}) is built for the CPU; "
            "install torch from its CUDA index (docs/install.md) or use --device cpu"
        )
    if not torch.cuda.is_available():
        return (
            "run.device cuda found no usable NVIDIA GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES, run mggcn doctor, "
            "or use --device cpu"
        )
    try:
        import cupy
    except ImportError as error:
        package = f"cupy-cuda{torch.version.cuda.partition('.')[0]}x"
        return f"run.device cuda needs CuPy ({error}); pip install {package}, or use --device cpu"
    refusal = "CuPy cannot use the GPU that torch sees"
    try:
        return "" if cupy.cuda.is_available() else f"{refusal}; run mggcn doctor"
    except RuntimeError as error:  # of a class of CuPy's: a driver that is too old for CuPy's CUDA, but not for torch's
        return f"{refusal} ({error}); run mggcn doctor"
