"""Where the CPU kernels are looked for, and how a checkout builds them without an installation."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from mggcn import native
from mggcn.errors import BackendError


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout whose mggcn is not installed; the folder in which it builds."""

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(native, "BUILD", tmp_path / "checkout")
    return tmp_path / "checkout"


def test_what_is_missing_and_what_helps(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the hint to build in place comes where there is nothing to build."""
    with pytest.raises(
        BackendError, match=r"not installed.*pip install \..* or, in a checkout, python -m mggcn.native"
    ):
        native.path()
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    with pytest.raises(BackendError, match=r"apt-get install g\+\+\)$"):
        native.path()


def test_kernels_older_than_their_sources(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if kernels of other sources are called: their arguments may lie elsewhere."""
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    source, library = tmp_path / "cpu" / "spmm.cpp", not_installed / "libmggcn_cpu.so"
    for file, age in ((source, 1), (library, 2)):
        file.parent.mkdir()
        file.touch()
        os.utime(file, (age, age))
    assert native.path() == library
    os.utime(source, (3, 3))
    with pytest.raises(BackendError, match=r"cpu/spmm\.cpp is newer than .* python -m mggcn\.native"):
        native.path()


@pytest.mark.slow
def test_built_in_place(not_installed: Path) -> None:
    """Fails if the build differs from an installation's in name or kernels, or is not found afterwards."""
    built = native.installed_or_built()
    assert built == not_installed / "libmggcn_cpu.so"
    assert native.path() == built
    library = ctypes.CDLL(str(built))
    assert all(hasattr(library, f"mggcn_spmm_{kind}_{isa}") for kind in ("f32", "f64") for isa in native.isas())
    assert all(hasattr(library, f"mggcn_gemm_{kind}_{isa}") for kind in ("f32", "f64") for isa in native.dense_isas())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one instruction set of kernels")
def test_every_instruction_set_is_compiled() -> None:
    """Fails if a processor with wider vectors than this one would find no dense product."""
    for isa in ("baseline", "avx2", "avx512", "avx512_bf16"):
        assert all(hasattr(native.library(), f"mggcn_gemm_{kind}_{isa}") for kind in ("f32", "f64", "bf16", "bf16_f32"))


def test_an_installation_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if tests of an installation compile for minutes what they do not load."""
    library = tmp_path / "libmggcn_cpu.so"
    library.touch()
    monkeypatch.setattr(native.metadata, "distribution", lambda name: SimpleNamespace(locate_file=lambda file: library))
    monkeypatch.setattr(native, "build", lambda: pytest.fail("built"))
    assert native.installed_or_built() == native.path() == library


def test_what_the_compiler_says_is_told(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such thing")')
    monkeypatch.setattr(native, "CHECKOUT", broken)
    with pytest.raises(BackendError, match="no such thing"):
        native.installed_or_built()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="needs CMake"):
        native.build()
