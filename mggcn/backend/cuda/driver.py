"""The GPUs that CUDA shows to this process, in CUDA's own order, asked of the driver library: no context, no torch.

Run as a program, it prints their free bytes, for which the driver needs a context: the process ends and frees it at once.

    python -m mggcn.backend.cuda.driver NUM_GPUS
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mggcn.errors import BackendError
from mggcn.host import python

Load = Callable[[str], Any]
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: also what CUDA_VISIBLE_DEVICES="" leads to."""
CHILD_S = 60.0
"""A driver that has to wake eight GPUs takes some seconds."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one instance of a GPU that is divided (MIG).

    uuid: without the GPU- or MIG- in front. pci: address of the GPU as Linux writes it, such as 0000:1b:00.0.
    """

    uuid: str
    pci: str


def visible_gpus(load: Load = ctypes.CDLL) -> list[Gpu]:
    """Return the GPUs of this process: device i of CUDA, torch and CuPy is the i-th.

    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are the driver's to read: it knows numbers, UUIDs, their prefixes and MIG.
    Raises: BackendError if the machine has no NVIDIA driver, or the driver no GPU.
    """
    driver = _started(load)
    return [Gpu(_uuid(driver, device), _pci(driver, device)) for device in _devices(driver)]


def free_bytes_in_child(num_gpus: int) -> list[int]:
    """Return the free bytes of the first GPUs, as a separate process reports them, whose contexts end with it.

    Its contexts count as taken: the result is a few hundred MiB less than NVML reports. Cost: the start of a Python.
    Raises: BackendError.
    """
    command = [*python(__name__), str(num_gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, check=True)
        return [int(nbytes) for nbytes in json.loads(done.stdout)]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise BackendError(f"CUDA's driver did not report the free memory of the GPUs: {last}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise BackendError(f"CUDA's driver did not report the free memory of the GPUs: {error}") from error


def free_bytes(num_gpus: int, load: Load = ctypes.CDLL) -> list[int]:
    """Return the free bytes of the first GPUs. Makes a context on each meanwhile. Raises: BackendError."""
    driver = _started(load)
    found = []
    for device in _devices(driver)[:num_gpus]:
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(0), ctypes.c_size_t(0)
        _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "make a context")
        try:
            _checked(driver.cuCtxSetCurrent(context), "use a context")
            _checked(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "tell free memory")
        finally:
            driver.cuDevicePrimaryCtxRelease_v2(device)
        found.append(free.value)
    return found


def _started(load: Load) -> Any:
    try:
        driver = load("libcuda.so.1")
    except OSError as error:
        raise BackendError(
            "run.device cuda needs an NVIDIA GPU and driver; none found (no libcuda.so.1); "
            "use --device cpu, or plan for another machine with --memory-limit"
        ) from error
    _checked(driver.cuInit(0), "start")
    return driver


def _devices(driver: Any) -> list[ctypes.c_int]:
    count = ctypes.c_int(0)
    _checked(driver.cuDeviceGetCount(ctypes.byref(count)) or (not count.value and NO_DEVICE), "count the GPUs")
    devices = []
    for number in range(count.value):
        device = ctypes.c_int(0)
        _checked(driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(number)), f"find GPU {number}")
        devices.append(device)
    return devices


def _uuid(driver: Any, device: ctypes.c_int) -> str:
    number = (ctypes.c_ubyte * 16)()
    _checked(driver.cuDeviceGetUuid_v2(ctypes.byref(number), device), "tell a GPU's UUID")
    return str(uuid.UUID(bytes=bytes(number)))


def _pci(driver: Any, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(32)
    _checked(driver.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), device), "tell a GPU's PCI address")
    return text.value.decode().lower()


def _checked(status: int, what: str) -> None:
    if status == NO_DEVICE:
        raise BackendError("no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu")
    if status != 0:
        raise BackendError(f"CUDA's driver could not {what} (CUDA error {status}); look at nvidia-smi")


def main() -> int:
    """Print the free bytes of the first NUM_GPUS GPUs, the argument of the command line."""
    try:
        print(json.dumps(free_bytes(int(sys.argv[1]))))
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
