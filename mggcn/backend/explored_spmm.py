"""Sparse products whose calls are timed, each in the way that finds out most about which is fastest."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cpu.explore import Exploration, Trial
from mggcn.backend.cpu.variants import SpmmChoice


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of product that was asked for, and how it is done."""

    pattern: Sparse
    width: int
    item: int
    """Bytes of a number of the operand."""
    summed: bool
    """Whether the result is of the type of sums."""
    choice: SpmmChoice
    measured: bool
    """Whether the choice is a table's, not the model's."""


class Products(Protocol):
    """The sparse products of a device, as CpuSpmm and OwnSpmm offer them."""

    def product(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Return the kind of product that these operands are."""
        ...

    def trial(self, product: Product, adj: Sparse, h: Tensor, out: Tensor) -> Trial:
        """Return a trial of the kind of product that these operands are, whose ways are ready to be timed."""
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
        """As KernelBackend.spmm. `choice` overrides the model and the table."""
        ...


class ExploredSpmm:
    """Products in the ways that an exploration asks for; what a table knows goes the table's way.

    now: the seconds of a clock, once all that was asked of the device is done.
    """

    def __init__(self, products: Products, exploration: Exploration, now: Callable[[], float]) -> None:
        self._products = products
        self._exploration = exploration
        self._now = now

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """As Products.multiply."""
        product = self._products.product(adj, h, out) if out.numel() else None
        at, trial = (None, None) if product is None or product.measured else self._trial(product, adj, h, out)
        turn = None if trial is None else self._exploration.turn(at, _kind(adj, accumulate, epilogue))
        way = None if trial is None else trial.winner if turn is None else trial.ways[turn]
        began = 0.0 if turn is None else self._now()
        self._products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, choice=way)
        if trial is not None and turn is not None:
            self._exploration.took(trial, turn, self._now() - began)

    def _trial(self, product: Product, adj: Sparse, h: Tensor, out: Tensor) -> tuple[Hashable, Trial | None]:
        """What an exploration knows the product by, and its trial."""
        at = (id(product.pattern.schedule), product.width, product.item, product.summed)
        return at, self._exploration.trial(at, lambda: self._products.trial(product, adj, h, out))


def _kind(adj: Sparse, accumulate: bool, epilogue: Epilogue | None) -> Hashable:
    """What a product does beside gathering rows: calls that differ in it take different seconds in any way."""
    weighted = adj.values is not None
    if epilogue is None:
        return weighted, accumulate
    parts = (epilogue.row_scale, epilogue.bias, epilogue.dropout, epilogue.out_scale)
    return (weighted, accumulate, epilogue.relu, *(part is not None for part in parts))
