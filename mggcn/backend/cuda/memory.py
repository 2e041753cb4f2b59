"""Free memory of the GPUs that a run will use: asked of NVIDIA's management library, which makes no CUDA context."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mggcn.backend.cuda.driver import Gpu, Load, free_bytes_in_child, visible_gpus
from mggcn.errors import BackendError


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_free_bytes(
    num_gpus: int, load: Load = ctypes.CDLL, ask_driver: Callable[[int], list[int]] = free_bytes_in_child
) -> int:
    """Return the least free bytes of any of the first `num_gpus` GPUs that CUDA shows to this process.

    If the management library is missing or gives no answer, CUDA's driver is asked, at the cost of a process.
    Raises: BackendError if the machine has no NVIDIA driver or no GPU.
    """
    gpus = visible_gpus(load)[:num_gpus]
    _release_cached()
    try:
        return min(_told_by_management(load("libnvidia-ml.so.1"), gpus))
    except OSError:  # images that mount the driver may leave it out of the loader's path
        return min(ask_driver(len(gpus)))
    except BackendError as refusal:
        try:
            return min(ask_driver(len(gpus)))
        except BackendError as error:
            raise BackendError(f"{refusal}; {error}") from error


def _told_by_management(nvml: Any, gpus: Sequence[Gpu]) -> list[int]:
    """Return the free bytes of each. Its numbers of GPUs follow their PCI addresses, CUDA's need not: UUIDs name them."""
    _checked(nvml.nvmlInit_v2(), "start")
    try:
        return [_free_bytes(nvml, gpu) for gpu in gpus]
    finally:
        nvml.nvmlShutdown()


def _free_bytes(nvml: Any, gpu: Gpu) -> int:
    handle, memory = ctypes.c_void_p(), _Memory()
    for kind in ("GPU", "MIG"):
        status = nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{gpu.uuid}".encode(), ctypes.byref(handle))
        if status == 0:
            break
    _checked(status, f"find the GPU {gpu.uuid}")
    _checked(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), f"read the memory of the GPU {gpu.uuid}")
    return int(memory.free)


def _release_cached() -> None:
    """Free the memory that torch's allocator keeps from finished runs of this process; do nothing if it has used no GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _checked(status: int, what: str) -> None:
    if status != 0:
        raise BackendError(f"NVIDIA's management library could not {what} (status {status}); look at nvidia-smi")
