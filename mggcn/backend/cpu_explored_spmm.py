"""Sparse products on the CPU whose calls are timed, each in the way that finds out most about which is fastest."""

from __future__ import annotations

import time
from collections.abc import Hashable

import torch
from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cpu_choice import MatrixTraits, key_of
from mggcn.backend.cpu_explore import Exploration, Trial, proposals
from mggcn.backend.cpu_machine import Caches
from mggcn.backend.cpu_memory import Workspace
from mggcn.backend.cpu_shape import way_bytes
from mggcn.backend.cpu_spmm import CpuSpmm, Product


class ExploredSpmm:
    """CpuSpmm's products in the ways that an exploration asks for; what a table knows goes the table's way."""

    def __init__(
        self, products: CpuSpmm, exploration: Exploration, dtype: torch.dtype, caches: Caches, workspace: Workspace
    ) -> None:
        self._products = products
        self._exploration = exploration
        self._item = dtype.itemsize
        self._caches = caches
        self._workspace = workspace

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """As CpuSpmm.multiply, with the same bits."""
        product = self._products.product(adj, h, out) if out.numel() else None
        at, trial = (None, None) if product is None or product.measured else self._trial(product)
        turn = None if trial is None else self._exploration.turn(at, _kind(adj, accumulate, epilogue))
        way = None if trial is None else trial.winner if turn is None else trial.ways[turn]
        began = time.perf_counter()
        self._products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, choice=way)
        if trial is not None and turn is not None:
            self._exploration.took(trial, turn, time.perf_counter() - began)

    def _trial(self, product: Product) -> tuple[Hashable, Trial | None]:
        """What an exploration knows the product by, and its trial."""
        at = (id(product.pattern.schedule), product.width, product.summed)
        return at, self._exploration.trial(at, lambda: self._new_trial(product))

    def _new_trial(self, product: Product) -> Trial:
        """A trial whose work space is touched already, so that no way pays for the first use of pages."""
        traits: MatrixTraits = product.pattern.schedule.traits
        ways = proposals(traits, product.width, self._item, self._caches, product.choice, summed=product.summed)
        largest = max(way_bytes(traits, product.width, self._item, way) for way in ways)
        with self._workspace.lock:
            self._workspace.take(largest).zero_()
        return Trial(key_of(traits, product.width, self._item, summed=product.summed), ways)


def _kind(adj: Sparse, accumulate: bool, epilogue: Epilogue | None) -> Hashable:
    """What a product does beside gathering rows: calls that differ in it take different seconds in any way."""
    weighted = adj.values is not None
    if epilogue is None:
        return weighted, accumulate
    parts = (epilogue.row_scale, epilogue.bias, epilogue.dropout, epilogue.out_scale)
    return (weighted, accumulate, epilogue.relu, *(part is not None for part in parts))
