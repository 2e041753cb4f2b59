"""Dense products on the CPU: whoever multiplies, and the bits and places of our own products."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import Dropout, Epilogue
from mggcn.backend.cpu import backend as cpu_backend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.figures import ASSUMED, DenseShape, Figures
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import MAX_SEGMENTS, SEGMENTS_BYTES, segments
from mggcn.backend.cpu.variants import GemmVariant, gemm_kernel, gemm_variant
from mggcn.backend.team import Team
from mggcn.errors import BackendError
from tests.backend.cpu import wide_tiles
from tests.machines import XEON, ZEN3, pairs_at

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3}
PRODUCERS = [("torch", "baseline"), *(("own", isa) for isa in wide_tiles.ISAS)]
"""Who multiplies, and with which instructions; only our own products have a choice of them."""
SHAPES = (
    *((1, 1, 1), (7, 3, 5), (300, 16, 40), (300, 40, 1)),
    *((2500, 33, 17), (5000, 20, 24), (70, 300, 150), (13, 601, 97)),
)
"""Rows, and widths of an operand and of the result."""


def _matrix(rows: int, cols: int, seed: int, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """Numbers in the first columns of rows of cols + pad; the padding is NaN, so that whoever reads it shows."""
    whole = torch.full((rows, cols + pad), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    whole[:, :cols] = torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :cols]


@pytest.fixture(autouse=True)
def wide_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel", wide_tiles.kernel)


def _own(dtype: torch.dtype, threads: int, isa: str = "") -> CpuBackend:
    """A backend whose dense products are our own, whatever would be chosen here."""
    backend = CpuBackend(dtype, threads)
    backend.dense_products = CpuGemm("own", Team(threads), isa or native.dense_isa(), Workspace())
    return backend


@pytest.mark.covering(1)
@pytest.mark.parametrize(("way", "isa"), PRODUCERS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_products_match_float64(dtype: torch.dtype, way: GemmVariant, isa: str) -> None:
    """Fails if products get transposes, padded rows, narrow sides or accumulation wrong, or writes beside its result."""
    gemm = CpuGemm(way, Team(2), isa, Workspace())
    for (rows, width, out_width), pad in itertools.product(SHAPES, (0, 3)):
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


@pytest.mark.full
@pytest.mark.parametrize("isa", wide_tiles.ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_no_bit_depends_on_the_threads_or_on_the_rows_beside(dtype: torch.dtype, isa: str) -> None:
    """Fails if a row's product changes with the number of threads or with its place among other rows."""
    h, w, g = _matrix(3000, 70, 1, dtype, 2), _matrix(70, 41, 2, dtype), _matrix(3000, 41, 3, dtype, 1)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for threads in (1, 2, 5):
        backend = _own(dtype, threads, isa)
        forward, grad = torch.empty(3000, 41, dtype=dtype), torch.empty(70, 41, dtype=real)
        backend.matmul(h, w, forward)
        backend.matmul(h.t(), g, grad)
        some = torch.empty(77, 41, dtype=dtype)
        backend.matmul(h[1013:1090], w, some)
        assert torch.equal(some, forward[1013:1090])
        results.append((forward, grad))
    assert all(torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0], strict=True))


@pytest.mark.covering(2)
@pytest.mark.parametrize("isa", wide_tiles.ISAS)
@pytest.mark.parametrize("cols", [1, 40, 41, 512])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_fused_epilogue_is_that_of_a_pass_of_its_own(dtype: torch.dtype, cols: int, isa: str) -> None:
    """Fails if the rows of a block take scales or masks of other rows, or a fused result is rounded twice."""
    rows, first, backend = 500, 37, _own(dtype, 2, isa)
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
    backend.dense_products.variant = "torch"
    blockwise = torch.empty(rows, cols, dtype=dtype)
    backend.matmul(h, w, blockwise, epilogue=epilogue, first_row=first)
    torch.testing.assert_close(blockwise.double(), fused.double(), rtol=2e-2, atol=2e-2)


def test_nothing_to_sum_and_nothing_to_write() -> None:
    """Fails if a sum of no numbers keeps what was in memory, or an empty result is an error."""
    for dtype, isa in itertools.product(TOLERANCE, wide_tiles.ISAS):
        backend = _own(dtype, 2, isa)
        for a, b in ((torch.ones(5, 0), torch.ones(0, 3)), (torch.ones(0, 5).t(), torch.ones(0, 3))):
            out = torch.full((5, 3), float("nan"), dtype=dtype)
            backend.matmul(a.to(dtype).t().contiguous().t() if a.stride(1) != 1 else a.to(dtype), b.to(dtype), out)
            assert not out.any()
        for rows, cols in ((0, 3), (3, 0)):
            backend.matmul(torch.ones(rows, 4, dtype=dtype), torch.ones(4, cols, dtype=dtype), torch.ones(rows, cols))


@pytest.mark.parametrize("isa", wide_tiles.ISAS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_what_is_not_finite_stays_in_its_row_and_column(dtype: torch.dtype, isa: str) -> None:
    """Fails if padding to whole tiles or pairs mixes rows or columns: zeros times infinity are not zero."""
    h, w = _matrix(9, 21, 1, dtype), _matrix(21, 11, 2, dtype)
    h[4, 7], w[3, 10] = float("inf"), float("nan")
    h[7, 0] = float("inf")  # behind the last number of row 6, which has no partner
    w[:, 9] = 0
    out = torch.empty(9, 11, dtype=dtype)
    _own(dtype, 1, isa).matmul(h, w, out)
    finite = out.isfinite()
    assert not finite[[4, 7]].any()
    assert not finite[:, 10].any()
    assert finite[[0, 1, 2, 3, 5, 6, 8], :10].all()
    # The last vertex without a partner, and columns in which infinity lies beside zeros.
    h, g = _matrix(2049, 9, 1, dtype), _matrix(2049, 11, 2, dtype)
    h[2048, 4] = float("inf")
    g[:, 9] = 0
    out = torch.empty(9, 11, dtype=dtype)
    _own(dtype, 1, isa).matmul(h.t(), g, out)
    assert not out[4].isfinite().any()
    assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


PAIRED = [isa for isa in wide_tiles.ISAS if isa.startswith("avx512_bf16")]


@pytest.mark.parametrize("isa", PAIRED)
def test_pairs_of_bfloat16_are_summed_in_order(isa: str) -> None:
    """Fails if the products of a pair are added at once or in the other order, or tiny numbers are not taken for zero."""
    gemm, out = CpuGemm("own", Team(1), isa, Workspace()), torch.empty(1, 1)
    big, one = 2.0**24, 1.0
    for numbers, expected in (
        ([big, 0.0, one, -big], one),  # the lower first: the one is lost
        ([big, 0.0, one, one], big),  # both at once: two more
        ([2.0**-130, one], one),
        ([2.0**-130], 0.0),
    ):
        a = torch.tensor([numbers], dtype=torch.bfloat16)
        gemm.multiply(a, torch.ones(len(numbers), 1, dtype=torch.bfloat16), out, accumulate=False)
        assert out.item() == expected, numbers


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


SETS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.mark.parametrize(
    ("figures", "count", "way", "floats", "bfloats"),
    [
        (ASSUMED, 1, "torch", "baseline", "baseline"),
        (ASSUMED, 2, "own", "avx2", "avx2"),
        (ASSUMED, 5, "own", "avx512", "avx512"),
        (ZEN3, 2, "own", "avx2", "avx2"),
        (XEON, 2, "own", "avx2", "avx2"),
        (XEON, 4, "own", "avx512", "avx512"),
        (XEON, 5, "own", "avx512", "amx"),
        (pairs_at(XEON, 255), 4, "own", "avx512", "avx512_bf16"),
        (pairs_at(XEON, 140), 4, "own", "avx512", "avx512"),
    ],
)
def test_who_multiplies(figures: Figures, count: int, way: str, floats: str, bfloats: str) -> None:
    """Fails if bfloat16 is multiplied by torch, by instructions that are not there, or by slow ones.

    Nor may other bits be the price of a gain that is within the noise."""
    usable = SETS[:count]
    assert gemm_variant(usable[-1]) == way
    for shape in get_args(DenseShape):
        assert [gemm_kernel(figures, item, shape, usable) for item in (4, 8, 2)] == [floats, floats, bfloats]


def test_a_backend_multiplies_as_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run does not multiply as the figures say for its type, or one shape goes by the other's figures."""
    monkeypatch.setattr(cpu_backend, "dense_kernels", lambda: SETS)
    slow_rows = tuple(r for r in XEON.dense if (r.kernel, r.shape) != ("amx", "rows"))
    mixed = dataclasses.replace(XEON, dense=slow_rows)
    for dtype, figures, name in (
        (torch.bfloat16, XEON, "amx"),
        (torch.bfloat16, mixed, "avx512, sums amx"),
        (torch.float32, XEON, "avx512"),
    ):
        assert CpuBackend(dtype, 1, figures=figures).dense_products.name == name
    monkeypatch.setattr(cpu_backend, "dense_kernels", lambda: SETS[:1])
    assert CpuBackend(torch.bfloat16, 1).dense_products.name == "torch"


@pytest.mark.full
def test_products_keep_to_their_memory(part: list[str]) -> None:
    """Fails if a product reads or writes behind an array that ends where memory ends."""
    command = [sys.executable, "-m", "tests.backend.cpu.gemm_guard_pages", *part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
