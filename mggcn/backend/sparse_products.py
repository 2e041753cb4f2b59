"""A device's sparse products, as `mggcn tune --store` times their variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of product that was called, and the variant that runs it."""

    pattern: Sparse
    width: int
    item: int
    """Bytes of a number of the operand."""
    summed: bool
    """Whether the result is of the type of sums."""
    choice: SpmmChoice


class Spmm(Protocol):
    """A sparse product of a device: our kernels, cuSPARSE, or what is wrapped around them."""

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Implement KernelBackend.spmm."""
        ...


class SparseProducts(Protocol):
    """The sparse products of a device, as CpuSpmm and OwnSpmm offer them."""

    def product(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Return the kind of product that these operands are."""
        ...

    def proposals(
        self, product: Product, adj: Sparse, h: Tensor, out: Tensor
    ) -> tuple[SpmmKey, tuple[SpmmChoice, ...]]:
        """Return the product's key in a table, and all variants, ready to be timed: the model's choice, then the others,
        the one that it expects to be fastest first.
        """
        ...

    def multiply(
        self,
        adj: Sparse,
        h: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
        epilogue: Epilogue | None,
        choice: SpmmChoice | None = None,
    ) -> None:
        """Implement KernelBackend.spmm. `choice` overrides the model and the table."""
        ...


WrapSpmm = Callable[[SparseProducts], Spmm]
"""Wraps a device's sparse products, such as to note which of them an epoch calls."""
