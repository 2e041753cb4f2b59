"""The table of bench/gpu/kernel_resources.py; what it compiles is tested in tests/cuda."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import kernel_resources
from tests.cuda.nvcc import Resources
from tests.cuda.units import Unit


@pytest.mark.parametrize(
    ("registers", "arch", "warps"),
    [(64, 90, 32), (32, 90, 64), (16, 120, 48), (33, 80, 48), (255, 100, 8), (96, 75, 20)],
)
def test_warps_by_registers(registers: int, arch: int, warps: int) -> None:
    """As NVIDIA's occupancy tables have it: registers are given to a warp by 256, in four parts of a multiprocessor."""
    assert kernel_resources.warps(registers, arch) == warps


def test_a_line_per_kernel() -> None:
    unit = Unit(Path("rows.cu"), ("-DMGGCN_F32", "-DMGGCN_TIGHT"))
    found = [
        Resources("gather", 80, 32, 0, 0, 0, 512),
        Resources("gather", 90, 64, 8, 4, 12, 256),
        Resources("finish", 90, 20, 0, 0, 0, 0),
    ]
    assert kernel_resources.rows(unit, found) == [
        ["rows.cu", "finish", "F32 TIGHT", "-", "-", "-", 20, "-", "-", 0, "100%", 0],
        ["rows.cu", "gather", "F32 TIGHT", "-", "-", 32, 64, "-", "-", 512, "50%", 16],
    ]
