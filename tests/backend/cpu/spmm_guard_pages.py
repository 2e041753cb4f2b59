"""Sparse products on the CPU whose arrays end where memory ends: a read or write behind one kills this process.

    python -m tests.backend.cpu.spmm_guard_pages

Run by test_cpu_spmm.py in a process of its own.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from mggcn import native
from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.spmm import make_schedule
from mggcn.backend.spmm_choice import SpmmChoice
from tests.backend.cases import numpy_reals
from tests.backend.cpu.guard_pages import guarded, matrix, upload

SHAPES = ((16, 16, 16), (41, 64, 64), (41, 44, 44), (41, 41, 41), (7, 7, 7), (41, 41, 64), (41, 64, 41), (41, 41, 48))
"""Columns, and the leading dimensions of operand and result."""


def main() -> None:
    case = matrix()
    indptr, indices = case.indptr.astype(np.int64), case.indices.astype(np.int32)
    dense, number = case.toarray(), 0
    for dtype, isa in itertools.product((torch.float32, torch.float64, torch.bfloat16), native.isas()):
        backend = CpuBackend(dtype, 2, isa)
        line = 64 // dtype.itemsize
        schedule = make_schedule(indptr, indices, 2, isa, hub=40)
        adj = Sparse(upload(indptr), upload(indices), upload(numpy_reals(backend, case.data)), schedule)
        choices = [SpmmChoice(ahead=2), SpmmChoice(ahead=30), SpmmChoice("panels", line, 1, 30)]
        choices += [SpmmChoice("blocks", 0, 3)] if dtype != torch.bfloat16 else []
        for (cols, ld, ld_out), choice in itertools.product(SHAPES, choices):
            number += 1
            h = guarded(torch.randn(160, ld, generator=torch.Generator().manual_seed(ld)).to(dtype))[:, :cols]
            out = guarded(torch.ones(case.shape[0], ld_out, dtype=dtype))[:, :cols]
            bias = upload(numpy_reals(backend, np.arange(cols) / 8)) if number % 5 > 1 else None
            epilogue = None if bias is None else Epilogue(bias=bias)
            accumulate = number % 2 == 0
            backend.sparse_products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, choice=choice)
            rounding = 2.0**-8 if dtype == torch.bfloat16 else 2e-5
            added = (np.arange(cols) / 8 if bias is not None else 0) + (1 if accumulate else 0)
            expected = dense @ h.double().numpy() + added
            np.testing.assert_allclose(out.double().numpy(), expected, rtol=rounding, atol=1e-4)


if __name__ == "__main__":
    main()
