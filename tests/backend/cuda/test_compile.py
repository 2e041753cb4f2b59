"""What NVRTC is told, and what is kept of its work, with a stand-in for CuPy; tests/cuda asks the real compiler."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mggcn.backend.cuda.compile import cache_folder, load_kernels
from mggcn.backend.cuda.kernels import folder
from tests.backend.fake_cupy import CompileException, FakeCupy

F32 = ("-DMGGCN_F32",)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "twice.cu"
    path.write_text('extern "C" __global__ void twice(float* x) { x[0] *= 2; }')
    return path


def test_denormals_are_kept(source: Path) -> None:
    """Fails if NVRTC is told to flush them, as cupy.RawModule tells it, or is told less than RawModule told it."""
    cupy = FakeCupy()
    load_kernels(cupy, source, F32)
    ((text, options, name),) = cupy.compiled
    assert (text, name) == (source.read_text(), "twice.cu")
    assert options == ("--std=c++17", f"-I{folder()}", "-DMGGCN_F32")
    assert not [option for option in options if "ftz" in option or "fast" in option]


def test_a_process_compiles_and_loads_once(source: Path) -> None:
    """Fails if ranks that are threads load a file each, or one GPU's module is used on another."""
    cupy = FakeCupy()
    module = load_kernels(cupy, source, F32)
    assert load_kernels(cupy, source, F32) is module
    assert module.get_function("twice") == (b"code 1 of twice.cu", "twice")
    cupy.device = 1
    assert load_kernels(cupy, source, F32) is not module
    assert (len(cupy.compiled), len(cupy.loaded)) == (1, 2)


def test_the_next_process_compiles_nothing(source: Path, cache: Path) -> None:
    """Fails if what was compiled is not found again, or something is left behind beside it."""
    load_kernels(FakeCupy(), source, F32)
    cupy = FakeCupy()
    load_kernels(cupy, source, F32)
    assert (cupy.compiled, cupy.loaded) == ([], [b"code 1 of twice.cu"])
    assert [path.name[:6] for path in cache.iterdir()] == ["mggcn-"]


@pytest.mark.parametrize(
    "other", [FakeCupy("13.4.0"), FakeCupy(nvrtc=(13, 0)), FakeCupy(capability="80")], ids=["CuPy", "NVRTC", "GPU"]
)
def test_code_of_another_compiler_or_gpu_is_not_taken(source: Path, other: FakeCupy) -> None:
    load_kernels(FakeCupy(), source, F32)
    load_kernels(other, source, F32)
    assert len(other.compiled) == 1


def test_code_of_another_text_or_other_options_is_not_taken(source: Path) -> None:
    """Fails if an edited kernel, or one for another type, runs as it was compiled before."""
    cupy = FakeCupy()
    load_kernels(cupy, source, F32)
    load_kernels(cupy, source, ("-DMGGCN_F64",))
    source.write_text(source.read_text().replace("2", "3"))
    load_kernels(cupy, source, F32)
    assert len(cupy.compiled) == 3


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 32 + b"code 1 of twice.cu"])
def test_damaged_code_is_compiled_again(source: Path, cache: Path, damage: bytes) -> None:
    """Fails if a file that a full disk cut short is loaded."""
    load_kernels(FakeCupy(), source, F32)
    (kept,) = cache.iterdir()
    kept.write_bytes(damage)
    cupy = FakeCupy()
    load_kernels(cupy, source, F32)
    assert len(cupy.compiled) == 1
    assert kept.read_bytes().endswith(b"code 1 of twice.cu")


def test_a_cache_that_cannot_be_written_is_said_and_not_needed(
    source: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a home that is read only stops a run, or every process compiles anew without a word."""
    cache.write_text("a file where the folder should be")
    cupy = FakeCupy()
    with caplog.at_level(logging.WARNING):
        load_kernels(cupy, source, F32)
    assert cupy.loaded == [b"code 1 of twice.cu"]
    assert "cannot be kept for later processes" in caplog.text


def test_a_compiler_that_refuses_is_heard(source: Path, cache: Path) -> None:
    """Fails if its words get lost, or what it refused is kept."""
    source.write_text("an error")
    with pytest.raises(CompileException, match="expected a ;"):
        load_kernels(FakeCupy(), source, F32)
    assert not cache.exists()


def test_kernels_lie_where_cupys_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert cache_folder() == Path.home() / ".cupy" / "kernel_cache"
