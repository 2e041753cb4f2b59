"""A dense product taken back through an activation at once: g W^T, its mask, its scales and its column sums."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import Gradient, KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.team import Team
from tests.backend.cases import (
    filled,
    guards_hold,
    host,
    padded,
    real_type,
    reals,
    tight,
    tolerance,
    zeros,
)
from tests.backend.cpu import wide_tiles

SHAPES = ((0, 3, 5), (1, 1, 1), (37, 7, 41), (700, 129, 50), (4200, 7, 9))
"""Rows, the inner dimension and columns; 4200 rows are more than a block in each of the chunks that are summed apart."""


def own_products(dtype: torch.dtype, isa: str, threads: int) -> CpuBackend:
    """A backend whose dense products are our own kernels of an instruction set."""
    backend = CpuBackend(dtype, threads)
    backend.dense_products = CpuGemm("own", Team(threads), isa, Workspace())
    return backend


def check(backend: KernelBackend, rows: int, inner: int, cols: int) -> list[torch.Tensor]:
    """Compare with float64, all combinations of mask, scales and sums; return the results."""
    rng = np.random.default_rng(rows + 7)
    found = []
    for masked, scaled, outer, summed in itertools.product((False, True), repeat=4):
        g = filled(padded(backend, rows, inner)[0], rng.normal(size=(rows, inner)))
        w = filled(tight(backend, cols, inner)[0], rng.normal(size=(cols, inner)) / inner**0.5)
        h, whole = padded(backend, rows, cols)
        filled(h, rng.normal(size=(rows, cols)) * (rng.random((rows, cols)) > 0.4))
        h_scale, out_scale = (reals(backend, rng.random(rows) + 0.5) for _ in range(2))
        partials = zeros(backend, backend.partials, cols, dtype=torch.float64).fill_(float("nan") if summed else 0.0)
        block = zeros(backend, max(1, rows // 3), cols, dtype=backend.dtype)
        before = host(h)
        gradient = Gradient(
            masked, 1.25, h_scale if scaled else None, out_scale if outer else None, partials if summed else None
        )
        backend.product_grad(g, w.t(), h, block, gradient)
        expected = host(g) @ host(w).T * 1.25 * ((before != 0) if masked else 1)
        expected *= host(h_scale)[:, None] if scaled else 1
        bias = zeros(backend, cols, dtype=real_type(backend))
        backend.sum_partials(partials, bias)
        # Products that come in blocks are rounded to bfloat16 before they are summed.
        exact = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 8e-3}[backend.dtype] * (rows + 1) ** 0.5
        np.testing.assert_allclose(host(bias), expected.sum(0) * summed, rtol=exact, atol=10 * exact)
        expected *= host(out_scale)[:, None] if outer else 1
        close = tolerance(backend)
        np.testing.assert_allclose(host(h), expected, rtol=2 * close["rtol"], atol=2 * close["atol"])
        assert guards_hold(whole, h, 1)
        found += [h.clone(), bias]
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_grad(backend: KernelBackend, shape: tuple[int, int, int]) -> None:
    """Fails on a wrong mask, factor or row, a row that is left out between blocks, or sums of other rows."""
    check(backend, *shape)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("isa", wide_tiles.ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_tiles_of_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, isa: str, sample: Any
) -> None:
    """Fails if a tile's rows meet other rows' mask, or bits depend on the number of threads."""
    monkeypatch.setattr(native, "kernel", wide_tiles.kernel)
    for shape in sample(SHAPES, 3):
        results = [check(own_products(dtype, isa, threads), *shape) for threads in (1, 2, 5)]
        assert all(torch.equal(a, b) for more in results[1:] for a, b in zip(results[0], more, strict=True))
