"""Sparse products whose arrays end where memory ends: a read or write behind one kills this process.

    python -m tests.backend.cpu.guard_pages [COUNT]

Run by backend/cuda/test_spmm.py in a process of its own; COUNT: how many of the checks, drawn at random, if not all.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch

from mggcn.backend.base import Sparse
from mggcn.backend.cuda.kernels import Kernels
from mggcn.backend.cuda.sizes import H100
from mggcn.backend.cuda.spmm import OwnSpmm, make_schedule
from mggcn.backend.cuda.variants import Variant
from tests.covering import drawn
from tests.emulator.device import EmulatedDevice

T = TypeVar("T")
PAGE = mmap.PAGESIZE
VARIANTS = (None, Variant("simple"), Variant("groups", 8, 2, 4), Variant("balanced", 4, 3, 2))


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous tensor that ends at a page which nobody may touch."""
    pages = -(-tensor.nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + pages * PAGE), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    if tensor.numel() == 0:
        return tensor
    offset = pages * PAGE - tensor.nbytes
    return (
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        .view(tensor.shape)
        .copy_(tensor)
    )


def upload(array: Any) -> torch.Tensor:
    return guarded(torch.from_numpy(np.ascontiguousarray(array)))


def matrix() -> Any:
    """Short, long and hub rows; 65 are not empty, so that the empty ones at the end share a warp with another."""
    rng = np.random.default_rng(4417)
    lengths = np.concatenate([rng.integers(1, 9, 61), [150, 33, 90], [3, 0, 0, 0]])
    columns = [np.sort(rng.choice(160, n, replace=False)) for n in lengths]
    columns[-4][-1] = 159
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return sp.csr_matrix((rng.normal(size=indptr[-1]), np.concatenate(columns), indptr), (lengths.size, 160))


def check(case: Any, cols: int, ld: int, first: int, *, weighted: bool, variant: Variant | None) -> None:
    """Multiply columns `first` to first + cols of an operand with `ld` columns."""
    indptr = case.indptr.astype(np.int64)
    values = upload(case.data.astype(np.float32)) if weighted else None
    schedule = make_schedule(indptr, upload, shortest=4, segment=40)
    adj = Sparse(upload(indptr), upload(case.indices.astype(np.int32)), values, schedule)
    h = guarded(torch.randn(case.shape[1], ld, generator=torch.Generator().manual_seed(ld)))[:, first : first + cols]
    out = guarded(torch.zeros(case.shape[0], ld))[:, first : first + cols]
    own = OwnSpmm(Kernels(EmulatedDevice(5).compile, torch.float32), H100, guarded(torch.zeros(2048)))
    own.multiply(adj, h, out, accumulate=False, epilogue=None, variant=variant)
    dense = case.toarray() if weighted else (case.toarray() != 0).astype(float)
    np.testing.assert_allclose(out.numpy(), dense @ h.numpy().astype(float), rtol=2e-5, atol=1e-4)


def chosen(checks: Iterable[T]) -> list[T]:
    """Return as many of the checks as the command says."""
    return drawn(checks, int(sys.argv[1]), "guard pages") if len(sys.argv) > 1 else list(checks)


def main() -> None:
    # Columns, those of the tensor that they are part of, and the first: the last are the last columns of wider tensors.
    shapes = ((16, 16, 0), (41, 48, 0), (41, 44, 0), (40, 40, 0), (41, 41, 0), (7, 7, 0), (44, 300, 256), (8, 64, 56))
    case = matrix()
    for shape, variant, weighted in chosen(itertools.product(shapes, VARIANTS, (False, True))):
        if variant is None or shape[1] % 4 == 0 or not variant.aligned or variant.kernel == "simple":
            check(case, *shape, weighted=weighted, variant=variant)


if __name__ == "__main__":
    main()
