"""Free memory of GPUs as the driver's management library tells it, with a stand-in for the library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mggcn.backend.gpu_memory import gpu_free_bytes
from mggcn.errors import BackendError


class Nvml:
    """libnvidia-ml with GPUs that have `free` bytes left; `failing` calls return an error."""

    def __init__(self, free: list[int], failing: str = "") -> None:
        self._free = free
        self._failing = failing
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == self._failing:
                return 15
            if name == "nvmlInit_v2":
                self.open += 1
            elif name == "nvmlShutdown":
                self.open -= 1
            elif name == "nvmlDeviceGetCount_v2":
                args[0]._obj.value = len(self._free)
            elif name == "nvmlDeviceGetHandleByIndex_v2":
                args[1]._obj.value = args[0].value + 1
            elif name == "nvmlDeviceGetMemoryInfo":
                args[1]._obj.free = self._free[args[0].value - 1]
            return 0

        return call


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 3), ("0,2", 5), ("2", 5), (" 1 ", 3), ("GPU-4f2a,1", 3), ("0,1,7", 3)]
)
def test_the_visible_gpu_with_least_counts(visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a hidden GPU is asked, or a full one overlooked."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml([9, 3, 5])
    assert gpu_free_bytes(lambda _name: nvml) == expected  # type: ignore[arg-type, return-value]
    assert nvml.open == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine without driver, without GPU or with a broken library ends in a traceback."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    with pytest.raises(BackendError, match="needs an NVIDIA GPU and its driver"):
        gpu_free_bytes(absent)
    nvml = Nvml([4])
    with pytest.raises(BackendError, match="no GPU is visible"):
        gpu_free_bytes(lambda _name: nvml)  # type: ignore[arg-type, return-value]
    assert nvml.open == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    broken = Nvml([4], failing="nvmlDeviceGetMemoryInfo")
    with pytest.raises(BackendError, match=r"could not read the memory of GPU 0 \(status 15\)"):
        gpu_free_bytes(lambda _name: broken)  # type: ignore[arg-type, return-value]
    assert broken.open == 0
