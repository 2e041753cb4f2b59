"""Products that are finished block by block, for a backend that cannot do both at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import Gradient, KernelBackend


def product_grad_by_blocks(
    backend: KernelBackend,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    block: Tensor,
    gradient: Gradient,
    out: Tensor | None = None,
) -> None:
    """Implement KernelBackend.product_grad block by block: as many rows at a time as `block` has stay in the cache."""
    step = max(1, block.shape[0])
    # The loop runs once even without rows: the first call initialises the column sums.
    for first in range(0, max(1, h.shape[0]), step):
        rows = h[first : first + step]
        part = block[: rows.shape[0]]
        backend.matmul(a[first : first + step], b, part)
        backend.activation_grad(part, rows, gradient, first, None if out is None else out[first : first + step])
