"""Products that are finished block by block, for a backend that cannot do both at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import KernelBackend


def product_grad(
    backend: KernelBackend,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    block: Tensor,
    *,
    masked: bool,
    keep_scale: float,
    h_scale: Tensor | None,
    out_scale: Tensor | None,
    partials: Tensor | None,
) -> None:
    """As KernelBackend.product_grad: as many rows at a time as `block` has, which finds them in the cache."""
    for first in range(0, h.shape[0], max(1, block.shape[0])):
        rows = h[first : first + block.shape[0]]
        part = block[: rows.shape[0]]
        backend.matmul(a[first : first + block.shape[0]], b, part)
        backend.activation_grad(
            part,
            rows,
            masked=masked,
            keep_scale=keep_scale,
            h_scale=h_scale,
            out_scale=out_scale,
            partials=partials,
            first_row=first,
        )
