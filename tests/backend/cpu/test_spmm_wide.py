"""Rows of a sparse product that are wider than the registers: the bits of their columns alone, and how they are rounded."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn import native
from mggcn.backend.base import Epilogue
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.spmm_choice import SpmmChoice
from tests.backend.cases import Case, filled, host, padded, random_dense, reals, skewed, tolerance
from tests.backend.cpu.test_spmm import TYPES, product
from tests.backend.test_spmm import epilogue_of, finished, sparse_of

WIDE, NARROW = 600, 44
"""Columns of a row that no registers hold, and of pieces that end within a vector."""


def _lengths() -> Case:
    """Rows of 0 to 40 entries: every number that is summed together, and every remainder."""
    rng = np.random.default_rng(70401)
    rows = [rng.choice(83, count, replace=False) for count in [*range(41), 7, 0, 9]]
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    return Case("all lengths", sp.csr_matrix((rng.normal(size=indptr[-1]), np.concatenate(rows), indptr), (44, 83)))


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_column_has_the_same_bits_alone(dtype: torch.dtype, isa: str) -> None:
    """Fails if a sum depends on how many columns are summed beside it, or a wide row loses an entry or an epilogue."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    backend, case = CpuBackend(dtype, 1, isa), _lengths()
    scales = (("row_scale",), ("row_scale", "bias", "relu", "out_scale"), ("bias",), ())
    for number, parts in enumerate(scales):
        weighted, accumulate = number % 2 == 0, number in (1, 2)
        adj, dense = sparse_of(backend, case, weighted)
        values = random_dense(83, WIDE, 17)
        epilogue = epilogue_of(backend, parts, 44, WIDE) if parts else Epilogue()
        before = random_dense(44, WIDE, 18)
        for make, ahead in ((padded, 0), (skewed, 5)):
            whole, pieces = [], []
            for first in (0, *range(0, WIDE, NARROW)):
                cols = WIDE if not whole else min(NARROW, WIDE - first)
                h = filled(make(backend, 83, cols)[0], values[:, first : first + cols])
                out, _ = make(backend, 44, cols)
                filled(out, before[:, first : first + cols])
                bias = None if epilogue.bias is None else epilogue.bias[first : first + cols]
                options = {"accumulate": accumulate, "epilogue": dataclasses.replace(epilogue, bias=bias)}
                backend.sparse_products.multiply(adj, h, out, choice=SpmmChoice(ahead=ahead), **options)
                (whole if not whole else pieces).append(out.clone())
            assert torch.equal(whole[0], torch.cat(pieces, 1)), (parts, make.__name__)
            inputs = filled(torch.empty(83, WIDE, dtype=dtype), values)
            added = host(filled(torch.empty(44, WIDE, dtype=dtype), before)) if accumulate else 0
            close = tolerance(backend)
            expected = finished(dense @ host(inputs) + added, epilogue)
            np.testing.assert_allclose(
                host(whole[0]), expected, rtol=max(5e-5, close["rtol"]), atol=10 * close["atol"], err_msg=str(parts)
            )


@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_vectors(dtype: torch.dtype) -> None:
    """Fails if some width has no loop of its own size, or its tiles overlap or leave columns out."""
    vectors = {"baseline": 16, "avx2": 32}
    for isa, number in itertools.product(native.isas(), (*range(1, 14), 17, 23, 24, 25, 36, 37)):
        backend = CpuBackend(dtype, 1, isa)
        close = tolerance(backend)
        cols = number * vectors[isa] // dtype.itemsize
        adj, dense = sparse_of(backend, _lengths(), number % 2 == 0)
        h = filled(padded(backend, 83, cols)[0], random_dense(83, cols, 17))
        epilogue = epilogue_of(backend, ("row_scale", "bias"), 44, cols)
        out = product(backend, adj, h, SpmmChoice(ahead=number % 3), epilogue=epilogue)
        expected = finished(dense @ host(h), epilogue)
        np.testing.assert_allclose(host(out), expected, rtol=max(5e-5, close["rtol"]), atol=10 * close["atol"])


def test_what_is_rounded_on_its_way_out() -> None:
    """Fails if a float32 is not rounded to the nearest bfloat16, ties to even, or a NaN of any kind becomes a number."""
    ties = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x00000001, 0x00008000]
    specials = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FFF8000, 0]
    bits = np.array((ties + [tie | 0x80000000 for tie in ties] + specials) * 5, np.uint32)
    rng = np.random.default_rng(7)
    bits = np.concatenate([bits, rng.integers(0, 2**32, 512, np.uint32)])
    numbers = torch.from_numpy(bits.view(np.float32).copy())
    expected = numbers.bfloat16()
    for isa, cols in itertools.product(native.isas(), (bits.size, 40)):
        backend = CpuBackend(torch.bfloat16, 1, isa)
        adj = backend.sparse(np.array([0, 1], np.int64), np.zeros(1, np.int32), None)
        h = filled(padded(backend, 1, cols)[0], np.zeros((1, cols)))
        bias = Epilogue(bias=reals(backend, numbers[:cols].numpy()))
        found = product(backend, adj, h, SpmmChoice(), epilogue=bias)[0]
        assert torch.equal(found.isnan(), expected[:cols].isnan())
        assert torch.equal(found[~found.isnan()], expected[:cols][~found.isnan()])
