"""Dense products on the CPU, and those of bfloat16 in float32 of converted blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mggcn.backend.cpu import CpuBackend
from mggcn.backend.cpu_choice import converts_bf16

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3}


def _matrix(rows: int, cols: int, seed: int, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """Numbers in the first columns of rows of cols + pad; the padding is NaN, so that whoever reads it shows."""
    whole = torch.full((rows, cols + pad), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    whole[:, :cols] = torch.randn(rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :cols]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_products_match_float64(dtype: torch.dtype) -> None:
    """Fails if products get transposes, padded rows, narrow sides or accumulation wrong, or writes beside its result."""
    backend = CpuBackend(dtype, 2)
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


def test_bfloat16_is_converted_where_the_processor_cannot_multiply_it() -> None:
    """Fails if bfloat16 is left to instructions that are not there, or converted where they are."""
    assert (converts_bf16(False), converts_bf16(True)) == (True, False)
