"""Dense products on the CPU: torch's, and for bfloat16 its float32 product of converted blocks where that is faster."""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn.backend.cpu_choice import GemmChoice
from mggcn.backend.cpu_memory import Workspace

BLOCK = 2048
"""Rows that are converted at a time: they stay in the cache until they are multiplied."""


class CpuGemm:
    """Products of matrices of one storage type; `choice` says how those of bfloat16 are done."""

    def __init__(self, choice: GemmChoice, workspace: Workspace) -> None:
        self._choice = choice
        self._workspace = workspace

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """As KernelBackend.matmul; out may be float32 beside operands of bfloat16: it is then summed in float32."""
        if a.dtype == out.dtype and (a.dtype != torch.bfloat16 or self._choice == "torch"):
            if accumulate:
                out.addmm_(a, b)
            else:
                torch.mm(a, b, out=out)
        elif a.shape[1] > a.shape[0]:
            self._sum_of_blocks(a, b, out, accumulate)
        else:
            self._blocks_of_rows(a, b, out, accumulate)

    def _blocks_of_rows(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        """Rows of out one block after the other."""
        rows = min(BLOCK, a.shape[0])
        with self._workspace.lock:
            left, right, sums = self._floats((rows, a.shape[1]), tuple(b.shape), (rows, out.shape[1]))
            right.copy_(b)
            for first in range(0, a.shape[0], BLOCK):
                some = a[first : first + BLOCK]
                part, result = out[first : first + BLOCK], sums[: some.shape[0]]
                torch.mm(left[: some.shape[0]].copy_(some), right, out=result)
                part.copy_(result.add_(part) if accumulate else result)

    def _sum_of_blocks(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        """The whole of out, summed over blocks of columns of a in their order."""
        inner = min(BLOCK, a.shape[1])
        with self._workspace.lock:
            left, right, sums = self._floats((inner, a.shape[0]), (inner, b.shape[1]), tuple(out.shape))
            total = out if out.dtype == torch.float32 else sums.copy_(out)
            if not accumulate:
                total.zero_()
            for first in range(0, a.shape[1], BLOCK):
                rows = b[first : first + BLOCK]
                count = rows.shape[0]
                # Gradients of weights have a transposed: its rows are then copied as they lie.
                total.addmm_(left[:count].copy_(a[:, first : first + BLOCK].t()).t(), right[:count].copy_(rows))
            if total is not out:
                out.copy_(total)

    def _floats(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Float32 matrices in the work space, each aligned to a cache line."""
        sizes = [-(-shape[0] * shape[1] // 16) * 16 for shape in shapes]
        flat = self._workspace.take(4 * sum(sizes)).view(torch.float32)
        return [part[: s[0] * s[1]].view(s) for part, s in zip(flat.split(sizes), shapes, strict=True)]
