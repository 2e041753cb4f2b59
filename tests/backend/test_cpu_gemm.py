"""Dense products on the CPU: by torch, by NumPy's BLAS, in float32 of converted bfloat16; threads of both libraries."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
import torch

from mggcn.backend import cpu_machine
from mggcn.backend.cpu import CpuBackend
from mggcn.backend.cpu_choice import choose_gemm, converts_bf16
from mggcn.backend.cpu_machine import TORCH_ALONE, Blas, numpy_blas, processor_name, vendor
from mggcn.backend.cpu_threads import set_threads, threads_set

OPENBLAS = Blas("openblas", "AuthenticAMD")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3}


def _matrix(rows: int, cols: int, seed: int, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """Numbers in the first columns of rows of cols + pad; the padding is NaN, so that whoever reads it shows."""
    whole = torch.full((rows, cols + pad), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    whole[:, :cols] = torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :cols]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("blas", [TORCH_ALONE, OPENBLAS], ids=["torch", "numpy"])
def test_products_match_float64(blas: Blas, dtype: torch.dtype) -> None:
    """Fails if a library gets transposes, padded rows, narrow sides or accumulation wrong, or writes beside its result."""
    backend = CpuBackend(dtype, 2, blas=blas)
    for (rows, width, out_width), pad in itertools.product(
        [(1, 1, 1), (7, 3, 5), (300, 16, 40), (300, 40, 1), (2500, 33, 17), (5000, 20, 24)], (0, 3)
    ):
        h, w = _matrix(rows, width, 1, dtype, pad), _matrix(width, out_width, 2, dtype)
        g = _matrix(rows, out_width, 3, dtype, pad)
        for a, b, accumulate in ((h, w, False), (g, w.t(), True), (h.t(), g, False), (h.t(), g, True)):
            out = _matrix(a.shape[0], b.shape[1], 4, dtype, pad)
            guard = out.as_strided((out.shape[0], pad), out.stride(), out.storage_offset() + out.shape[1])
            expected = a.double() @ b.double() + (out.double() if accumulate else 0)
            backend.matmul(a, b, out, accumulate=accumulate)
            size = float(expected.abs().max()) * max(1.0, a.shape[1] ** 0.5 / 8)
            np.testing.assert_allclose(out.double(), expected, rtol=0, atol=TOLERANCE[dtype] * size)
            assert bool(guard.isnan().all())


def test_numpy_multiplies_where_it_is_faster() -> None:
    """Fails if a product goes to the library that was slower, or to NumPy's where it is not known to be faster."""
    forward, gradient, narrow = (169_343, 128, 256), (512, 169_343, 512), (256, 169_343, 40)
    assert [choose_gemm(*sizes, OPENBLAS) for sizes in (forward, gradient, narrow)] == ["numpy", "torch", "numpy"]
    for other in (TORCH_ALONE, Blas("mkl", "AuthenticAMD"), Blas("openblas", "GenuineIntel"), Blas("openblas", "")):
        assert {choose_gemm(*sizes, other) for sizes in (forward, gradient, narrow)} == {"torch"}


def test_bfloat16_is_converted_where_the_processor_cannot_multiply_it() -> None:
    """Fails if bfloat16 is left to instructions that are not there, or converted where they are."""
    assert (converts_bf16(False), converts_bf16(True)) == (True, False)


def test_numpy_really_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the choice is made and not followed."""
    called = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *args, **kwargs: called.append(args) or matmul(*args, **kwargs))
    for blas, expected in ((OPENBLAS, 1), (TORCH_ALONE, 1)):
        a, out = torch.ones(40, 20), torch.empty(40, 8)
        CpuBackend(torch.float32, 1, blas=blas).matmul(a, torch.ones(20, 8), out)
        assert len(called) == expected
        assert bool((out == 20).all())


def test_one_setting_of_threads() -> None:
    """Fails if a library computes with other threads than it was given, or keeps the setting of a finished run."""

    def now() -> tuple[int, set[int]]:
        pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        return torch.get_num_threads(), set(pools)

    with threads_set(1):
        before = now()
        with threads_set(2):
            assert now() == (2, {2})
        assert now() == before == (1, {1})
        set_threads(2)
        assert now() == (2, {2})


def test_without_threadpoolctl_torch_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a checkout on a machine without it does not run, or BLAS multiplies with threads that nobody set."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numpy_blas.cache_clear()
    try:
        with threads_set(torch.get_num_threads()):
            assert numpy_blas() == TORCH_ALONE
    finally:
        monkeypatch.undo()
        numpy_blas.cache_clear()


def test_what_is_told_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the maker is misread, or a system without these files stops a run."""
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: the 4th\nflags\t\t: fpu avx2 amx_bf16\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "cpuinfo")
    assert (vendor(), processor_name()) == ("GenuineIntel", "Xeon: the 4th")
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "absent")
    numpy_blas.cache_clear()
    try:
        assert numpy_blas().vendor == ""
        assert choose_gemm(10, 10, 10, numpy_blas()) == "torch"
    finally:
        # What is found without these files must not stay for the tests that follow.
        monkeypatch.undo()
        numpy_blas.cache_clear()
    assert numpy_blas().name in ("", "openblas", "mkl", "blis", "accelerate")
