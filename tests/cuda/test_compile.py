"""Every kernel compiles for every GPU that mggcn supports, and keeps its registers. Needs CUDA's compilers, no GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mggcn.backend.cuda import compile as cuda_compile
from mggcn.backend.cuda.kernels import folder
from tests.compiled import compiled
from tests.cuda import cupys, nvcc, nvrtc
from tests.cuda.nvcc import ARCHITECTURES, CompileError, Resources
from tests.cuda.units import Unit, all_units, samples

OLD, CUPYS = "sm_70", "sm_90"
NEWEST, OTHERS = ARCHITECTURES[-1:], ARCHITECTURES[:-1]
MANY_BYTES = 32
"""Spills of a thread that would be worth a look."""
F32 = ("-DMGGCN_F32",)
OPTIONS = tuple(Path(module.__file__) for module in (nvcc, nvrtc, cuda_compile))
"""Where the compilers' options stand."""
Found = TypeVar("Found")


def found_or_skip(found: Found | None, what: str) -> Found:
    """Skip without a compiler; in CI, which installs them, fail."""
    if found is None:
        reason = f"{what} is not here: make test-all installs it, or pip install --group compilers"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def compiler() -> Path:
    return found_or_skip(nvcc.find(), "nvcc")


@pytest.fixture(scope="module")
def library() -> str:
    return found_or_skip(nvrtc.find(), f"NVRTC of CUDA 12 ({nvrtc.LIBRARY})")


def in_parallel(compile_one: Callable[[int], list[Resources]], count: int) -> list[list[Resources]]:
    """Run the jobs, as many at once as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, range(count)))


def kept(version: str, unit: Unit, targets: tuple[object, ...], compile_one: Callable[[], list[Resources]]) -> Any:
    """Return what compile_one finds, or found of the same sources and options in this version of the compiler."""
    sources = [path.read_text() for path in (unit.path, *sorted(folder().glob("*.cuh")), *OPTIONS)]

    def write(target: Path) -> None:
        target.write_text(json.dumps([dataclasses.astuple(resources) for resources in compile_one()]))

    made = compiled((version, sources, unit.options, targets), "resources.json", write)
    return [Resources(*found) for found in json.loads(made.read_text())]


def spilling(units: Sequence[Unit], results: Sequence[Sequence[Resources]]) -> list[str]:
    return [f"{unit}: {r}" for unit, found in zip(units, results, strict=True) for r in found if r.spills]


def test_every_file_is_asked_for_in_every_type() -> None:
    """Fails if a .cu file is added that no launcher, or no list here, knows."""
    kinds = {unit.kind for unit in all_units()}
    types = ("-DMGGCN_F32", "-DMGGCN_F64", "-DMGGCN_BF16")
    assert kinds == {(path, option) for path in folder().glob("*.cu") for option in types}
    assert {unit.kind for unit in samples(all_units())} == kinds


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("targets", [NEWEST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["newest", "others"])
def test_nvcc_compiles_every_file_without_spills(compiler: Path, targets: tuple[int, ...], sample: Any) -> None:
    """Files and types, for each a shape, and architectures of CUDA 13; in all shapes: bench/gpu/kernel_resources.py."""
    units = samples(all_units())
    third = [unit for number, unit in enumerate(units) if number % 3 == number // 3 % 3]  # of each file a type
    assert {unit.path for unit in third} == {unit.path for unit in units}
    units = [*third, *sample(sorted({*units} - {*third}), 1)]
    version, compile_unit = nvcc.version(compiler), nvcc.compile_unit
    results = in_parallel(
        lambda i: kept(version, units[i], targets, lambda: compile_unit(compiler, units[i], targets)), len(units)
    )
    assert spilling(units, results) == []
    for unit, found in zip(units, results, strict=True):
        assert {r.arch for r in found} == set(targets), unit
        assert max(r.registers for r in found) <= 128, unit


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", [OLD, pytest.param(CUPYS, marks=pytest.mark.slow)])
def test_nvrtc_compiles_all_as_cupy_does(library: str, target: str, sample: Any) -> None:
    """What the launchers ask for. CUDA 13's nvcc knows no sm_70: the V100 is CUDA 12's."""
    units = all_units()
    units = sample(units, len(units) // 32)
    version, compile_unit = nvrtc.version(library), nvrtc.compile_unit
    results = in_parallel(
        lambda i: kept(version, units[i], (target,), lambda: compile_unit(library, units[i], target)), len(units)
    )
    assert spilling(units, results) == []
    assert {r.arch for found in results for r in found} == {int(target.removeprefix("sm_"))}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", [CUPYS, "sm_100"])
def test_the_newest_nvrtc_spills_next_to_nothing(target: str) -> None:
    """CUDA 13's comes with CuPy's wheels (make .venv/cupys): where it keeps a register less, 4 to 16 bytes spill."""
    folders = found_or_skip(cupys.find(13), "CuPy for CUDA 13 (make .venv/cupys)")
    library, units = str(next(folders.glob("nvidia/*/lib/libnvrtc.so.13"))), samples(all_units())
    results = in_parallel(lambda i: nvrtc.compile_unit(library, units[i], target), len(units))
    worst = {
        f"{unit}: {r}": max(r.spill_stores, r.spill_loads) for unit, rs in zip(units, results, strict=True) for r in rs
    }
    assert {name: nbytes for name, nbytes in worst.items() if nbytes > MANY_BYTES} == {}


def flushing(ptx: str) -> set[str]:
    """float32 instructions that take denormals for zero; exp's own is given none, with or without -ftz."""
    return {name for name in re.findall(r"[\w.]+\.ftz[\w.]*f32[\w.]*", ptx) if not name.startswith("ex2.approx.")}


FLOAT32 = [unit for unit in samples(all_units()) if "-DMGGCN_F64" not in unit.options]
SOME_SLOW = [
    pytest.param(unit, marks=pytest.mark.slow if i % 5 else pytest.mark.full) for i, unit in enumerate(FLOAT32)
]
"""NVRTC takes seconds for each, and what it is told is the same for all."""


@pytest.mark.parametrize("unit", SOME_SLOW, ids=str)
def test_no_instruction_takes_denormals_for_zero(library: str, unit: Unit) -> None:
    """Fails if kernels differ on a GPU, for numbers below 1.2e-38, from the same text in the emulator and on CPUs."""
    assert flushing(nvrtc.ptx(library, unit, "compute_90")) == set()


@pytest.mark.full
def test_flushing_would_be_seen(library: str) -> None:
    """Fails if the test above passes whatever NVRTC is told."""
    (unit,) = (u for u in samples(all_units()) if u.path.name == "spmm.cu" and u.options[0] == F32[0])
    assert flushing(nvrtc.ptx(library, unit, "compute_90", "-ftz=true"))


def planted(folder: Path, body: str, bounds: str = "") -> Unit:
    head = f'extern "C" __global__ void {bounds} fault(const real_t* x, real_t* out)'
    path = folder / "fault.cu"
    path.write_text(f'#include "common.cuh"\n{head} {{\n{body}\n}}\n')
    return Unit(path, F32)


HOARD = """
  real_t held[48];
  #pragma unroll
  for (int i = 0; i < 48; ++i) held[i] = x[threadIdx.x + 64 * i];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 48; ++i) out[threadIdx.x + 64 * i] = held[i] * held[(7 * i + 5) % 48];
"""


@pytest.mark.full
def test_planted_spill_is_seen(compiler: Path, library: str, tmp_path: Path) -> None:
    """48 values per thread do not fit into the 32 registers that two blocks of 1024 threads leave it."""
    free, tight = planted(tmp_path, HOARD), "__launch_bounds__(1024, 2)"
    assert spilling([free], [nvcc.compile_unit(compiler, free, (90,))]) == []
    unit = planted(tmp_path, HOARD, tight)
    for found in (nvcc.compile_unit(compiler, unit, (80, 90)), nvrtc.compile_unit(library, unit, OLD)):
        assert found[0].spills
        assert found[0].registers <= 32
        assert found[0].stack > 0
        assert f"{unit}: Resources(kernel='fault'" in spilling([unit], [found])[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "said"),
    [("out[0] = x[0]", "expected a"), ("int unused = 3;", "unused"), ("out[0] = missing(x[0]);", "missing")],
)
def test_planted_error_is_seen(compiler: Path, library: str, tmp_path: Path, body: str, said: str) -> None:
    """Neither a lacking semicolon nor a warning passes."""
    unit = planted(tmp_path, body)
    with pytest.raises(CompileError, match=said):
        nvcc.compile_unit(compiler, unit, (75, 120))
    with pytest.raises(CompileError, match=said):
        nvrtc.compile_unit(library, unit, OLD)


@pytest.mark.full
def test_shared_memory_is_reported(compiler: Path, tmp_path: Path) -> None:
    body = "__shared__ real_t kept[96]; kept[threadIdx.x] = x[threadIdx.x]; __syncthreads(); out[0] = kept[5];"
    (found,) = nvcc.compile_unit(compiler, planted(tmp_path, body), (100,))
    assert (found.kernel, found.arch, found.shared, found.spills) == ("fault", 100, 384, False)


def test_figures_that_are_missing_are_an_error() -> None:
    with pytest.raises(CompileError, match="too little of rows for sm_90"):
        nvcc.parse("ptxas info    : Compiling entry function 'rows' for 'sm_90'\n    Used 12 registers\n")
    with pytest.raises(CompileError, match="names no kernel"):
        nvcc.parse("nothing here")
