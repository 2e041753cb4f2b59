"""Dense products of bfloat16 in AMX tiles: the kernel, on emulated tiles, has the bits of a scalar twin."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import Dropout, Epilogue, Gradient
from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.backend import PARTIALS, CpuBackend
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import gemm_sizes, segments
from mggcn.backend.team import Team
from tests.backend.cpu import amx

BF16 = torch.bfloat16
SHAPES = (
    *((1, 1, 1), (7, 3, 5), (32, 32, 32), (64, 64, 96), (31, 33, 16), (300, 16, 40), (100, 41, 17)),
    *((2100, 33, 40), (1030, 20, 9), (97, 602, 41), (513, 64, 33), (3100, 5, 70)),
)
"""Rows, and widths of an operand and of the result; whole and ragged tiles, one segment and several."""


@pytest.fixture(autouse=True)
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel", amx.kernel)


def matrix(rows: int, cols: int, seed: int, pad: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """Numbers in the first columns of rows of cols + pad; the padding is NaN, so that whoever reads it shows."""
    whole = torch.full((rows, cols + pad), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    whole[:, :cols] = torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :cols]


def tiles(threads: int = 2, isa: str = amx.EMULATED) -> CpuGemm:
    return CpuGemm("own", Team(threads), isa, Workspace())


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices have the same bits, NaN as such."""
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return torch.equal(a.contiguous().view(kind)[~nan], b.contiguous().view(kind)[~nan])


def products(rows: int, d: int, e: int, pad: int) -> Iterable[tuple[Tensor, Tensor]]:
    """h W, g W^T, and h^T g: the left operand, and the right one."""
    h, g, w = matrix(rows, d, 1, pad), matrix(rows, e, 3, pad), matrix(d, e, 2)
    return (h, w), (g, w.t()), (h.t(), g)


@pytest.mark.parametrize("isa", amx.TILES)
@pytest.mark.parametrize("result", [BF16, torch.float32], ids=str)
def test_the_kernel_has_the_bits_of_its_twin(isa: str, result: torch.dtype, sample: Callable[..., list[Any]]) -> None:
    """Fails if a tile, a step, a segment or an edge is summed in another order than the twin's, or not at all."""
    cases = sample(itertools.product(SHAPES, (0, 3), (False, True)), 10)
    for (rows, d, e), pad, accumulate in cases:
        for a, b in products(rows, d, e, pad):
            summed = a.stride(1) != 1
            parts = segments(a.shape[0], a.shape[1], b.shape[1], 4) if summed else 1
            out = matrix(a.shape[0], b.shape[1], 4, pad, result)
            start = out.float()
            if accumulate and not summed:
                expected = amx.twin(a, b, 1, start)
            else:
                expected = amx.twin(a, b, parts)
                expected = expected + start if accumulate else expected
            exact = a.double() @ b.double() + (start.double() if accumulate else 0)
            guard = out.as_strided((out.shape[0], pad), out.stride(), out.storage_offset() + out.shape[1])
            tiles(2, isa).multiply(a, b, out, accumulate=accumulate)
            assert same(out, expected.to(result)), (rows, d, e, pad, accumulate, summed)
            assert bool(guard.isnan().all())
            size = float(exact.abs().max()) * max(1.0, a.shape[1] ** 0.5 / 8)
            tolerance = 8e-3 if result == BF16 else 2e-6
            np.testing.assert_allclose(out.double(), exact, rtol=0, atol=tolerance * size)


def bits_of(low: int, high: int, rows: int, cols: int, seed: int) -> Tensor:
    """Random bits with exponents in [low, high]: 0 are subnormal numbers, 255 infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(low, high + 1, (rows, cols), generator=generator) << 7
    rest = torch.randint(0, 128, (rows, cols), generator=generator)
    sign = torch.randint(0, 2, (rows, cols), generator=generator) * -(2**15)
    return (exponent + rest + sign).to(torch.int16).view(BF16)


@pytest.mark.parametrize("isa", amx.TILES)
@pytest.mark.parametrize(
    ("left", "right"),
    [((0, 254), (0, 254)), ((60, 66), (58, 66)), ((0, 0), (120, 254)), ((120, 255), (120, 255))],
    ids=["any finite", "results near 2^-126", "subnormal operands", "infinities and NaN"],
)
def test_numbers_at_the_edges_of_the_format(isa: str, left: tuple[int, int], right: tuple[int, int]) -> None:
    """Fails if numbers below the normal ones are kept, or infinities and NaN come out elsewhere than by the twin."""
    a, b = bits_of(*left, 70, 66, 5), bits_of(*right, 66, 34, 6)
    out = torch.empty(70, 34)
    tiles(2, isa).multiply(a, b, out, accumulate=False)
    assert same(out, amx.twin(a, b, 1))
    assert not bool(((out != 0) & (out.abs() < 2.0**-126)).any())
    g = bits_of(*right, 70, 34, 7)
    out = torch.empty(66, 34)
    tiles(2, isa).multiply(a.t(), g, out, accumulate=False)
    assert same(out, amx.twin(a.t(), g, 1))


def test_no_bit_depends_on_the_threads_or_on_the_rows_beside() -> None:
    """Fails if a row's product changes with the number of threads or with its place, or columns that threads share do."""
    h, w, g = matrix(2100, 70, 1, 2), matrix(70, 130, 2), matrix(2100, 130, 3, 1)
    found = []
    for threads in (1, 2, 5):
        forward, grad = torch.empty(2100, 130, dtype=BF16), torch.empty(70, 130)
        tiles(threads).multiply(h, w, forward, accumulate=False)
        tiles(threads).multiply(h.t(), g, grad, accumulate=False)
        some = torch.empty(77, 130, dtype=BF16)
        tiles(threads).multiply(h[1013:1090], w, some, accumulate=False)
        assert torch.equal(some, forward[1013:1090])
        found.append((forward, grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("cols", [1, 40, 70])
def test_what_follows_a_product_is_that_of_a_pass_of_its_own(cols: int) -> None:
    """Fails if a fused epilogue or gradient takes scales, masks or sums of other rows, or a result is rounded twice."""
    rows, first, inner = 300, 37, 50
    generator = torch.Generator().manual_seed(77)
    scale = torch.rand(rows + first, generator=generator)
    ids = torch.randperm(rows + first, generator=generator)
    bias = torch.randn(cols, generator=generator)
    epilogue = Epilogue(scale, bias, True, Dropout(0.4, torch.tensor([5, 6]), 2), ids, 2 * scale)
    h, w = matrix(rows, inner, 1, 1), matrix(inner, cols, 2)
    apart, fused = torch.empty(rows, cols), torch.empty(rows, cols, dtype=BF16)
    tiles().multiply(h, w, apart, accumulate=False)
    CpuBackend(torch.float32, 2).finish(apart, apart, epilogue, first)
    tiles().multiply(h, w, fused, accumulate=False, epilogue=epilogue, first_row=first)
    assert torch.equal(fused, apart.to(BF16))

    backend = CpuBackend(BF16, 2)
    backend.dense_products = tiles()
    activation = matrix(rows, cols, 8).relu()
    product = torch.empty(rows, cols)
    tiles().multiply(h, w, product, accumulate=False)
    partials, found = (torch.zeros(PARTIALS, cols, dtype=torch.float64) for _ in range(2))
    out = activation.clone()
    backend.product_grad(h, w, out, torch.empty(0), Gradient(True, 1.25, scale[:rows], 2 * scale[:rows], found))
    expected = torch.where(activation != 0, product * (1.25 * scale[:rows, None]), torch.zeros(()))
    partials.copy_(torch.stack([part.double().sum(0) for part in chunks(expected)]))
    torch.testing.assert_close(found, partials, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.float(), expected * (2 * scale[:rows, None]), rtol=8e-3, atol=1e-6)


def chunks(rows: Tensor) -> list[Tensor]:
    """The rows of each partial sum, as cpu/common.h shares them out."""
    ends = [rows.shape[0] * k // PARTIALS for k in range(PARTIALS + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(ends)]


def test_nothing_to_sum_and_nothing_to_write() -> None:
    """Fails if a sum of no numbers keeps what was in memory, or an empty result is an error."""
    for a, b in ((torch.ones(5, 0), torch.ones(0, 3)), (torch.ones(0, 5).t(), torch.ones(0, 3))):
        out = torch.full((5, 3), float("nan"), dtype=BF16)
        tiles().multiply(
            a.to(BF16).t().contiguous().t() if a.stride(1) != 1 else a.to(BF16), b.to(BF16), out, accumulate=False
        )
        assert not out.any()
    tiles().multiply(torch.ones(0, 4, dtype=BF16), torch.ones(4, 3, dtype=BF16), torch.ones(0, 3), accumulate=False)


def test_products_work_in_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a product packs behind its part of the work space, or a plan leaves the tiles' out."""
    filled, original = 0, Workspace.take
    for rows, d, e in SHAPES:
        for a, b in products(rows, d, e, 0):
            summed = a.stride(1) != 1
            sizes = gemm_sizes(*a.shape, b.shape[1], 2, 4, transposed=summed, tiles=True)
            planned = cpu_sizes.gemm_bytes(rows, d, e, 2, 4, 1, "own", tiles=True)
            assert sizes.total(1) <= planned
            guarded = torch.full((sizes.total(1) + 4096,), 77, dtype=torch.uint8)

            def take(self: Workspace, nbytes: int, guarded: Tensor = guarded) -> Tensor:
                assert nbytes == guarded.shape[0] - 4096
                return guarded[:nbytes]

            monkeypatch.setattr(Workspace, "take", take)
            tiles(1).multiply(a, b, torch.empty(a.shape[0], b.shape[1]), accumulate=False)
            assert bool((guarded[-4096:] == 77).all()), (rows, d, e, summed)
            filled += int((guarded[sizes.packed : -4096] != 77).any()) + int((guarded[: sizes.packed] != 77).any())
    monkeypatch.setattr(Workspace, "take", original)
    assert filled >= 3 * len(SHAPES)


def test_a_plan_reserves_what_tiles_work_in() -> None:
    """Fails if AMX, where it is granted, gets the work space of other instructions."""
    sizes = (4096, 3, 5, 2, 4, 4, "own")
    assert cpu_sizes.gemm_bytes(*sizes, tiles=True) > cpu_sizes.gemm_bytes(*sizes)
    floats = (4096, 3, 5, 4, 4, 4, "own")
    assert cpu_sizes.gemm_bytes(*floats, tiles=True) == cpu_sizes.gemm_bytes(*floats)
