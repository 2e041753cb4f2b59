"""Free memory of the GPUs, asked of the driver's management library: no CUDA context, no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable

from mggcn.errors import BackendError


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_free_bytes(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> int:
    """Return the free bytes of the GPU that has least, among those that CUDA_VISIBLE_DEVICES leaves.

    Raises: BackendError if the machine has no NVIDIA driver or no GPU.
    """
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError as error:
        raise BackendError(
            "run.device cuda needs an NVIDIA GPU and its driver, and this machine has none (no libnvidia-ml.so.1); "
            "use --device cpu, or plan for another machine with --memory-limit"
        ) from error
    _release_cached()
    _checked(nvml.nvmlInit_v2(), "start")
    try:
        count = ctypes.c_uint(0)
        _checked(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "count the GPUs")
        free = [_free_bytes(nvml, index) for index in _visible(count.value)]
    finally:
        nvml.nvmlShutdown()
    if not free:
        raise BackendError("no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu")
    return min(free)


def _release_cached() -> None:
    """Give back what torch's allocator keeps of finished runs of this process; nothing if it has used no GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _visible(count: int) -> list[int]:
    """Indices of the GPUs that CUDA would show; all where CUDA_VISIBLE_DEVICES names them otherwise than by number."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    parts = [] if setting is None else [part.strip() for part in setting.split(",")]
    if setting is None or not all(part.isdigit() for part in parts if part):
        return list(range(count))
    return [int(part) for part in parts if part and int(part) < count]


def _free_bytes(nvml: ctypes.CDLL, index: int) -> int:
    handle, memory = ctypes.c_void_p(), _Memory()
    _checked(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)), f"find GPU {index}")
    _checked(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), f"read the memory of GPU {index}")
    return int(memory.free)


def _checked(status: int, what: str) -> None:
    if status != 0:
        raise BackendError(f"NVIDIA's management library could not {what} (status {status}); look at nvidia-smi")
