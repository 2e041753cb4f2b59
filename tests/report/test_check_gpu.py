"""check_gpu.py with a stand-in for the driver library: this machine need not have a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mggcn.report import check_gpu
from mggcn.report.check_gpu import Driver, Gpu
from mggcn.report.findings import Finding

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
V100 = Gpu("Tesla V100-SXM2-32GB", 32 * GIB, (7, 0))
P100 = Gpu("Tesla P100", 16 * GIB, (6, 0))


def fake_libraries(
    version: int, gpus: list[Gpu], one_way: tuple[tuple[int, int], ...] = (), status: int = 0, managed: bool = True
) -> Callable[[str], Any]:
    """Stand in for libcuda.so.1 and libnvidia-ml.so.1; the pairs of `one_way` (device, peer) have no access."""

    def write(value: int, pointer: Any) -> int:
        pointer._obj.value = value
        return 0

    def write_text(text: str, buffer: Any) -> int:
        buffer.value = text.encode()
        return 0

    def attribute(pointer: Any, number: int, device: Any) -> int:
        return write(gpus[device.value].capability[{75: 0, 76: 1}[number]], pointer)

    cuda = SimpleNamespace(
        cuDriverGetVersion=lambda pointer: write(version, pointer),
        cuInit=lambda flags: status,
        cuDeviceGetCount=lambda pointer: write(len(gpus), pointer),
        cuDeviceGet=lambda pointer, index: write(index, pointer),
        cuDeviceGetName=lambda buffer, size, device: write_text(gpus[device.value].name, buffer),
        cuDeviceTotalMem_v2=lambda pointer, device: write(gpus[device.value].nbytes, pointer),
        cuDeviceGetAttribute=attribute,
        cuDeviceCanAccessPeer=lambda pointer, device, peer: write(int((device, peer) not in one_way), pointer),
    )
    management = SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlSystemGetDriverVersion=lambda buffer, size: write_text("580.65.06", buffer)
    )
    known = {"libcuda.so.1": cuda} | ({"libnvidia-ml.so.1": management} if managed else {})

    def load(name: str) -> Any:
        if name not in known:
            raise OSError(f"{name}: cannot open shared object file")
        return known[name]

    return load


def absent(name: str) -> ctypes.CDLL:
    raise OSError(name)


def test_find_driver() -> None:
    assert check_gpu.find_driver(absent) is None
    assert check_gpu.find_driver(fake_libraries(12080, [H100, V100])) == Driver(
        (12, 8), (H100, V100), (), version="580.65.06"
    )
    assert check_gpu.find_driver(fake_libraries(13000, [H100], status=100, managed=False)) == Driver((13, 0))


def test_access_counts_only_in_both_directions() -> None:
    found = check_gpu.find_driver(fake_libraries(13000, [H100] * 4, one_way=((2, 1), (0, 3), (3, 0))))
    assert found is not None
    assert found.apart == ((0, 3), (1, 2))


def test_packages_for_the_driver_and_the_gpus() -> None:
    """CUDA 13 has no kernels for a V100, whatever the driver runs."""
    assert Driver((12, 8), (H100,)).install == "pip install cupy-cuda12x"
    assert Driver((13, 1), (H100,)).install == "pip install cupy-cuda13x"
    assert Driver((13, 0), (H100, V100)).install == "pip install cupy-cuda12x"


def test_driver_findings() -> None:
    assert check_gpu.check_driver(Driver((12, 8), (H100, H100))) == Finding("NVIDIA driver", "ok", "CUDA 12.8, 2 GPUs")
    assert check_gpu.check_driver(Driver((13, 0), (H100,), (), "580.65.06")).detail == "580.65.06, CUDA 13.0, 1 GPU"
    for driver, said in (
        (None, "runs use the CPU"),
        (Driver((12, 8)), "0 GPUs usable"),
        (Driver((11, 4), (V100,)), "12"),
    ):
        finding = check_gpu.check_driver(driver)
        assert finding.state == "missing"
        assert said in finding.detail
        assert finding.remedy


@pytest.mark.parametrize(
    ("gpus", "state", "detail"),
    [
        ((H100,) * 8, "ok", "8 x NVIDIA H100 80GB HBM3 (80.0 GiB, sm_90)"),
        (
            (V100, H100),
            "ok",
            "Tesla V100-SXM2-32GB (32.0 GiB, sm_70), NVIDIA H100 80GB HBM3 (80.0 GiB, sm_90); "
            "--precision bf16 and tf32 need sm_80 or newer",
        ),
        ((P100,), "missing", "Tesla P100 (16.0 GiB, sm_60)"),
        ((), "missing", "none here"),
    ],
)
def test_gpus(gpus: tuple[Gpu, ...], state: str, detail: str) -> None:
    finding = check_gpu.check_gpus(Driver((12, 8), gpus))
    assert (finding.state, finding.detail) == (state, detail)
    assert check_gpu.check_gpus(None).state == "missing"


def test_peers() -> None:
    def look(count: int, *apart: tuple[int, int]) -> Finding:
        return check_gpu.check_peers(Driver((13, 0), (H100,) * count, apart))

    assert (look(8).state, look(8).detail) == ("ok", "all 8 GPUs reach each other's memory")
    assert look(1).state == "ok"
    assert (look(0).state, check_gpu.check_peers(None).state) == ("missing", "missing")
    assert look(3, (0, 1), (0, 2)).detail == "2 of 3 pairs of GPUs have none: 0-1, 0-2"
    assert look(3, (0, 1), (0, 2), (1, 2)).detail == "none of the 3 GPUs reaches another's memory"
    assert "nvidia-smi topo" in look(2, (0, 1)).remedy
