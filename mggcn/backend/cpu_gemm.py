"""Dense products on the CPU: torch's, for bfloat16 its float32 products of converted blocks where these are faster."""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn.backend.cpu_memory import Workspace
from mggcn.backend.cpu_shape import GEMM_ROWS, aligned, converted_shapes


class CpuGemm:
    """Products of matrices of one storage type; converted: those of bfloat16 are done in float32."""

    def __init__(self, converted: bool, workspace: Workspace) -> None:
        self._converted = converted
        self._workspace = workspace

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """As KernelBackend.matmul; out may be float32 beside operands of bfloat16: it is then summed in float32."""
        if a.dtype == out.dtype and (a.dtype != torch.bfloat16 or not self._converted):
            if accumulate:
                out.addmm_(a, b)
            else:
                torch.mm(a, b, out=out)
        else:
            shapes = converted_shapes(a.shape[0], a.shape[1], b.shape[1], summed=out.dtype == torch.float32)
            with self._workspace.lock:
                floats = self._floats(shapes)
                if a.shape[1] > a.shape[0]:
                    _sum_of_blocks(a, b, out, accumulate, *floats)
                else:
                    _blocks_of_rows(a, b, out, accumulate, *floats)

    def _floats(self, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        """Float32 matrices in the work space, each aligned to a cache line."""
        sizes = [aligned(4 * shape[0] * shape[1]) // 4 for shape in shapes]
        flat = self._workspace.take(4 * sum(sizes)).view(torch.float32)
        return [part[: s[0] * s[1]].view(s) for part, s in zip(flat.split(sizes), shapes, strict=True)]


def _blocks_of_rows(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool, left: Tensor, right: Tensor, sums: Tensor
) -> None:
    """Rows of out one block after the other."""
    right.copy_(b)
    for first in range(0, a.shape[0], GEMM_ROWS):
        some = a[first : first + GEMM_ROWS]
        part, result = out[first : first + GEMM_ROWS], sums[: some.shape[0]]
        torch.mm(left[: some.shape[0]].copy_(some), right, out=result)
        part.copy_(result.add_(part) if accumulate else result)


def _sum_of_blocks(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool, left: Tensor, right: Tensor, sums: Tensor | None = None
) -> None:
    """The whole of out, summed over blocks of columns of a in their order; sums: unless out is float32."""
    total = out if sums is None else sums.copy_(out)
    if not accumulate:
        total.zero_()
    for first in range(0, a.shape[1], GEMM_ROWS):
        rows = b[first : first + GEMM_ROWS]
        count = rows.shape[0]
        # Gradients of weights have a transposed: its rows are then copied as they lie.
        total.addmm_(left[:count].copy_(a[:, first : first + GEMM_ROWS].t()).t(), right[:count].copy_(rows))
    if total is not out:
        out.copy_(total)
