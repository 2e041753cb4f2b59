"""A device's sparse products, as the search for their fastest variants uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    measured: bool
    """Whether the choice is a table's, not the model's."""


class Spmm(Protocol):
    """A sparse product of a device: our kernels, cuSPARSE, or products that are explored."""

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Implement KernelBackend.spmm."""
        ...


class SparseProducts(Protocol):
    """The sparse products of a device, as CpuSpmm and OwnSpmm offer them."""

    def product(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Return the kind of product that these operands are."""
        ...

    def proposals(
        self, product: Product, adj: Sparse, h: Tensor, out: Tensor, slowest: float
    ) -> tuple[SpmmKey, Mapping[SpmmChoice, float]]:
        """Return the product's key in a table, and the variants to be timed, ready for it, the model's choice first.

        With each variant what the model expects it to take, in a unit of its own. slowest: how many times its own choice's
        seconds at most; infinite: all variants.
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


class Explorer(Protocol):
    """Finds out from the calls of a run which variants are fastest (`tuning/exploration.py`)."""

    def explored(self, products: SparseProducts, now: Callable[[], float]) -> Spmm:
        """Return products that run each call in the variant whose time is most worth knowing.

        now: returns the seconds of a clock once all work queued on the device is done.
        """
        ...
