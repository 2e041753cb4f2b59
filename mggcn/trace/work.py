"""Bytes and FLOP of a kernel call, from the shapes of its operands: for the timeline's GB/s and GFLOP/s.

Every operand is counted as read or written once, padding not at all; a sparse product reads one row of the dense operand
for each nonzero. Caches make the true traffic smaller, so GB/s may pass what the memory can do.
V rows, N rows of the dense operand, D its width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mggcn.backend.base import Sparse


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and floating-point operations of one call; 0: not known or none."""

    nbytes: int = 0
    flop: int = 0


def spmm_work(adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool) -> Work:
    """Adj (V, N) @ h (N, D): nnz gathered rows, the CSR arrays, the result (read too if it is added to)."""
    cols = h.shape[1]
    structure = adj.indptr.nbytes + adj.indices.nbytes + (0 if adj.values is None else adj.values.nbytes)
    gathered = adj.nnz * cols * h.itemsize
    return Work(structure + gathered + out.nbytes * (1 + accumulate), 2 * adj.nnz * cols)


def matmul_work(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> Work:
    """A @ b: both operands and the result."""
    return Work(a.nbytes + b.nbytes + out.nbytes * (1 + accumulate), 2 * out.numel() * a.shape[1])


def streamed(*tensors: Tensor) -> Work:
    """One pass over each tensor; name one twice that is read and written."""
    return Work(sum(t.nbytes for t in tensors))
