"""Dense products on the CPU: whoever multiplies, and the bits and places of our own products."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import Dropout, Epilogue
from mggcn.backend.cpu import CpuBackend
from mggcn.backend.cpu_choice import GemmWay, gemm_way
from mggcn.backend.cpu_gemm import CpuGemm
from mggcn.backend.cpu_memory import Workspace
from mggcn.backend.cpu_shape import MAX_SEGMENTS, SEGMENTS_BYTES, segments
from mggcn.errors import BackendError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3}
WAYS: tuple[GemmWay, ...] = get_args(GemmWay)


def _matrix(rows: int, cols: int, seed: int, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """Numbers in the first columns of rows of cols + pad; the padding is NaN, so that whoever reads it shows."""
    whole = torch.full((rows, cols + pad), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    whole[:, :cols] = torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :cols]


def _own(dtype: torch.dtype, threads: int, isa: str = "") -> CpuBackend:
    """A backend whose dense products are our own, whatever would be chosen here."""
    backend = CpuBackend(dtype, threads, isa)
    backend.dense_products.way = "own"
    return backend


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_products_match_float64(dtype: torch.dtype, way: GemmWay, isa: str) -> None:
    """Fails if products get transposes, padded rows, narrow sides or accumulation wrong, or writes beside its result."""
    if (way == "converted" and dtype != torch.bfloat16) or (way != "own" and isa != native.isa()):
        pytest.skip("only bfloat16 is converted, and only our own products have instruction sets")
    gemm = CpuGemm(way, 2, isa, Workspace())
    for (rows, width, out_width), pad in itertools.product(
        [(1, 1, 1), (7, 3, 5), (300, 16, 40), (300, 40, 1), (2500, 33, 17), (5000, 20, 24), (70, 300, 150)], (0, 3)
    ):
        h, w = _matrix(rows, width, 1, dtype, pad), _matrix(width, out_width, 2, dtype)
        g = _matrix(rows, out_width, 3, dtype, pad)
        for a, b, accumulate in ((h, w, False), (g, w.t(), True), (h.t(), g, False), (h.t(), g, True)):
            out = _matrix(a.shape[0], b.shape[1], 4, dtype, pad)
            guard = out.as_strided((out.shape[0], pad), out.stride(), out.storage_offset() + out.shape[1])
            expected = a.double() @ b.double() + (out.double() if accumulate else 0)
            gemm.multiply(a, b, out, accumulate=accumulate)
            size = float(expected.abs().max()) * max(1.0, a.shape[1] ** 0.5 / 8)
            np.testing.assert_allclose(out.double(), expected, rtol=0, atol=TOLERANCE[dtype] * size)
            assert bool(guard.isnan().all())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_no_bit_depends_on_the_threads_or_on_the_rows_beside(dtype: torch.dtype) -> None:
    """Fails if a row's product changes with the number of threads or with its place among other rows."""
    h, w, g = _matrix(3000, 70, 1, dtype, 2), _matrix(70, 41, 2, dtype), _matrix(3000, 41, 3, dtype, 1)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for threads in (1, 2, 5):
        backend = _own(dtype, threads)
        forward, grad = torch.empty(3000, 41, dtype=dtype), torch.empty(70, 41, dtype=real)
        backend.matmul(h, w, forward)
        backend.matmul(h.t(), g, grad)
        some = torch.empty(77, 41, dtype=dtype)
        backend.matmul(h[1013:1090], w, some)
        assert torch.equal(some, forward[1013:1090])
        results.append((forward, grad))
    assert all(torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize("cols", [1, 40, 41, 512])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_fused_epilogue_is_that_of_a_pass_of_its_own(dtype: torch.dtype, cols: int) -> None:
    """Fails if the rows of a block take scales or masks of other rows, or a fused result is rounded twice."""
    rows, first, backend = 500, 37, _own(dtype, 2)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(77)
    scale = torch.rand(rows + first, generator=generator, dtype=real)
    ids = torch.randperm(rows + first, generator=generator)
    bias = torch.randn(cols, generator=generator, dtype=real)
    dropout = Dropout(0.4, torch.tensor([5, 6]), 2)
    epilogue = Epilogue(scale, bias, True, dropout, ids, 2 * scale)
    h, w = _matrix(rows, 300, 1, dtype, 1), _matrix(300, cols, 2, dtype)
    apart = torch.empty(rows, cols, dtype=real)
    backend.matmul(h, w, apart)
    CpuBackend(real, 2).finish(apart, apart, epilogue, first)
    fused = torch.empty(rows, cols, dtype=dtype)
    backend.matmul(h, w, fused, epilogue=epilogue, first_row=first)
    assert torch.equal(fused, apart.to(dtype))
    backend.dense_products.way = "torch" if dtype != torch.bfloat16 else "converted"
    blockwise = torch.empty(rows, cols, dtype=dtype)
    backend.matmul(h, w, blockwise, epilogue=epilogue, first_row=first)
    torch.testing.assert_close(blockwise.double(), fused.double(), rtol=2e-2, atol=2e-2)


def test_nothing_to_sum_and_nothing_to_write() -> None:
    """Fails if a sum of no numbers keeps what was in memory, or an empty result is an error."""
    for dtype in TOLERANCE:
        backend = _own(dtype, 2)
        for a, b in ((torch.ones(5, 0), torch.ones(0, 3)), (torch.ones(0, 5).t(), torch.ones(0, 3))):
            out = torch.full((5, 3), float("nan"), dtype=dtype)
            backend.matmul(a.to(dtype).t().contiguous().t() if a.stride(1) != 1 else a.to(dtype), b.to(dtype), out)
            assert not out.any()
        for rows, cols in ((0, 3), (3, 0)):
            backend.matmul(torch.ones(rows, 4, dtype=dtype), torch.ones(4, cols, dtype=dtype), torch.ones(rows, cols))


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    """Fails if padding to whole tiles mixes rows or columns: zeros times infinity are not zero."""
    h, w = _matrix(9, 20, 1, torch.float32), _matrix(20, 11, 2, torch.float32)
    h[4, 7], w[3, 10] = float("inf"), float("nan")
    out = torch.empty(9, 11)
    _own(torch.float32, 1).matmul(h, w, out)
    finite = out.isfinite()
    assert not finite[4].any()
    assert not finite[:, 10].any()
    assert finite[[0, 1, 2, 3, 5, 6, 7, 8], :10].all()


def test_operands_that_no_kernel_reads_are_refused() -> None:
    """Fails if a left operand with gaps in both directions is read as if it had none."""
    with pytest.raises(BackendError, match=r"got strides \(6, 2\); pass a contiguous copy"):
        _own(torch.float32, 1).matmul(torch.rand(5, 6)[:, ::2], torch.rand(3, 2), torch.empty(5, 2))


def test_a_sum_is_cut_by_its_shape_alone() -> None:
    """Fails if the parts of a gradient take more memory than they may, or too few of them keep threads idle."""
    for rows, inner, cols in (
        (1, 1, 1),
        (512, 169_343, 40),
        (128, 169_343, 512),
        (1433, 2708, 16),
        (4000, 10**6, 4000),
    ):
        for real in (4, 8):
            count = segments(rows, inner, cols, real)
            assert 1 <= count <= MAX_SEGMENTS
            assert count == 1 or count * rows * cols * real <= SEGMENTS_BYTES
    assert segments(512, 169_343, 40, 4) >= 16


@pytest.mark.parametrize(
    ("item", "isa", "wide", "has_bf16", "way"),
    [
        (4, "avx2", False, False, "own"),
        (2, "avx2", False, False, "own"),
        (8, "avx2", False, False, "own"),
        (4, "avx2", True, False, "torch"),
        (2, "avx2", True, False, "converted"),
        (2, "avx2", True, True, "torch"),
        (2, "avx2", False, True, "torch"),
        (4, "baseline", False, False, "torch"),
        (2, "baseline", False, False, "converted"),
    ],
)
def test_who_multiplies(item: int, isa: str, *, wide: bool, has_bf16: bool, way: str) -> None:
    """Fails if bfloat16 is left to instructions that are not there, or narrower vectors than the processor has multiply."""
    assert gemm_way(item, isa, wide=wide, has_bf16=has_bf16) == way


def test_products_keep_to_their_memory() -> None:
    """Fails if a product reads or writes behind an array that ends where memory ends."""
    command = [sys.executable, "-m", "tests.backend.gemm_guard_pages"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
