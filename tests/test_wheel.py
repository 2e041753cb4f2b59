"""`make wheel`: what it holds, and that it trains where there is no compiler. The kernels are compiled for it: slow."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as the commands of `make wheel` make it."""
    if not shutil.which("make"):
        pytest.skip("make wheel needs make")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    done = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (ROOT / "dist").glob("mggcn-*.whl")
    return made


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_is_for_many_machines(wheel: Path) -> None:
    """Fails if it is for this machine alone, names a folder of it, or lacks kernels or CUDA's sources."""
    assert re.fullmatch(rf"mggcn-.*-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name)
    assert wheel.stat().st_size < 4 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert not [name for name, data in files.items() if os.fsencode(ROOT) in data]
    assert not [name for name in files if "libgomp" in name]
    library = files["mggcn/libmggcn_cpu.so"]
    assert b"$ORIGIN/../torch/lib\0" in library
    sets = ("baseline", "avx2", "avx512", "avx512_bf16") if platform.machine() == "x86_64" else ("baseline",)
    assert all(f"mggcn_gemm_f32_{isa}\0".encode() in library for isa in sets)
    assert {path.name for path in (ROOT / "cuda").glob("*.cu*")} <= {Path(name).name for name in files}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_trains_in_an_empty_environment_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """Fails if a dependency is missing, or if the kernels need a library that neither torch nor the system has."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    programs = tmp_path / "env" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints-cpu.txt")]
    subprocess.run([*pip, str(wheel)], check=True)
    alone = {"PATH": str(programs), "HOME": str(tmp_path)}
    for command in ("generate community store", "train store --epochs 3 --quiet --out run"):
        done = subprocess.run([str(programs / "mggcn"), *command.split()], cwd=tmp_path, env=alone, check=False)
        assert done.returncode == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_cibuildwheel_repairs_as_make_does() -> None:
    """Fails if one of them brings a second OpenMP runtime along."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    repair = "auditwheel repair --exclude libgomp.so.1"
    assert repair in tools["linux"]["repair-wheel-command"]
    assert repair in (ROOT / "Makefile").read_text()
