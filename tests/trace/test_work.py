"""Bytes and FLOP of kernel calls, counted by hand."""

from __future__ import annotations

import numpy as np
import torch

from mggcn.backend.cpu.backend import CpuBackend
from mggcn.trace.work import Work, matmul_work, spmm_work, streamed


def padded(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(rows, 64, dtype=dtype)[:, :cols]


def test_spmm_counts_a_row_for_each_nonzero() -> None:
    """Fails if padding is counted, the result is read without being added to, or values are left out."""
    backend = CpuBackend(torch.float32, 1)
    indptr, indices = np.array([0, 2, 2, 5]), np.array([0, 3, 1, 2, 3], np.int32)
    plain, weighted = (backend.sparse(indptr, indices, v) for v in (None, np.ones(5, np.float32)))
    h, out = padded(4, 7), padded(3, 7)
    structure, gathered, result = 4 * 8 + 5 * 4, 5 * 7 * 4, 3 * 7 * 4
    assert spmm_work(plain, h, out, accumulate=False) == Work(structure + gathered + result, 2 * 5 * 7)
    assert spmm_work(weighted, h, out, accumulate=True) == Work(structure + 5 * 4 + gathered + 2 * result, 2 * 5 * 7)


def test_matmul_counts_its_operands() -> None:
    """Fails if a transposed view is taken for its storage."""
    a, b, out = padded(9, 5).t(), padded(9, 3), torch.zeros(5, 3)
    assert matmul_work(a, b, out, accumulate=False) == Work(4 * (45 + 27 + 15), 2 * 5 * 9 * 3)
    assert matmul_work(a, b, out, accumulate=True) == Work(4 * (45 + 27 + 30), 2 * 5 * 9 * 3)


def test_streams_count_each_tensor() -> None:
    """Fails if the storage type does not matter."""
    z = padded(6, 5, torch.bfloat16)
    assert streamed(z, z, torch.zeros(6, dtype=torch.uint8)) == Work(2 * 60 + 6)
