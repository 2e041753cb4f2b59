"""Gradients that are not differentiated again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mggcn.errors import BackendError


class Once(torch.autograd.Function):
    """A gradient that raises an error when it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, name: str, *made_of: Tensor | None) -> Tensor:
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise BackendError(
            f"{ctx.name} has no second derivative; take gradients without create_graph=True, or write it with "
            "torch.index_select and scatter operations"
        )


def once(grad: Tensor, name: str, *made_of: Tensor | None) -> Tensor:
    """Return a gradient of the function `name`; if torch records, one that raises an error when differentiated."""
    if not torch.is_grad_enabled():
        return grad
    marked: Tensor = Once.apply(grad, name, *made_of)  # type: ignore[no-untyped-call]
    return marked
