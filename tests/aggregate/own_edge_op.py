"""An edge operation that the package does not have, the maximum of neighbours, and one that watches its calls.

Written for the CPU, row by row, as its definition says. V rows of a rank, D columns of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mggcn.aggregate.edge_op import Accumulation, Columns, EdgeOp, Target
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec

NOBODY = -1.0
"""The winner of a row without neighbours."""


@dataclass(frozen=True)
class Maximum:
    """z[v] = the maximum of h[u] over the edges u -> v, column by column; of equal rows the one of the least vertex wins.

    A row travels with its vertex as a column of its own. The winners are kept: the gradient goes to them alone. trains:
    False leaves out both, so that nothing but the operand's columns is read.
    """

    trains: bool = True
    name = "maximum"
    by_head = None
    additive = False

    @property
    def columnwise(self) -> bool:
        return not self.trains

    @property
    def adjoint(self) -> MaximumGrad:
        return MaximumGrad()

    def columns(self, cols: int) -> Columns:
        return Columns(cols + 1, 2 * cols, 2 * cols) if self.trains else Columns(cols, cols, cols)

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return (BufferSpec(f"{name}.winners", rows, cols, dtype, "kept"),) if self.trains else ()

    def begin(self, backend: KernelBackend, target: Target) -> Largest:
        return Largest(backend, target)


class Largest:
    """The Accumulation of Maximum: the largest rows so far, and who they are."""

    def __init__(self, backend: KernelBackend, target: Target) -> None:
        self._backend, self._target = backend, target
        self._best = target.out.numpy()
        self._cols = self._best.shape[1]
        self._winners = target.local[0].numpy() if target.local else None
        self._best[:] = -np.inf
        if self._winners is not None:
            self._winners[:] = NOBODY

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        block, cols = rows.numpy(), self._cols
        for row, entries in entries_of(matrix):
            values = block[entries, :cols]
            ids = np.broadcast_to(block[entries, cols:], values.shape) if self._winners is not None else None
            for place in range(entries.size):
                self._take(row, values[place], None if ids is None else ids[place])

    def _take(self, row: int, values: np.ndarray, winners: np.ndarray | None) -> None:
        better = values > self._best[row]
        if winners is not None and self._winners is not None:
            better |= (values == self._best[row]) & (winners < self._winners[row])
            self._winners[row, better] = winners[better]
        self._best[row, better] = values[better]

    def gather(self, index: Tensor, message: Tensor) -> None:
        rows = index.numpy()
        message.numpy()[:, : self._cols] = self._best[rows]
        if self._winners is not None:
            message.numpy()[:, self._cols :] = self._winners[rows]

    def combine(self, message: Tensor, index: Tensor) -> None:
        for row, whole in zip(index.tolist(), message.numpy(), strict=True):
            self._take(row, whole[: self._cols], whole[self._cols :] if self._winners is not None else None)

    def scatter(self, message: Tensor, index: Tensor) -> None:
        rows = index.numpy()
        self._best[rows] = message.numpy()[:, : self._cols]
        if self._winners is not None:
            self._winners[rows] = message.numpy()[:, self._cols :]

    def end(self) -> None:
        self._best[np.isneginf(self._best)] = 0.0
        if self._target.epilogue is not None:
            self._backend.finish(self._target.out, self._target.out, self._target.epilogue)


@dataclass(frozen=True)
class MaximumGrad:
    """b[u] = the sum of g[v] over the edges u -> v, where u won. operand [g | winners]; local: vertices (V, 1)."""

    name = "gradient of the maximum"
    columnwise = False
    by_head = None
    additive = False

    @property
    def adjoint(self) -> EdgeOp:
        raise PlanError("the gradient of the maximum has no derivative here")

    def columns(self, cols: int) -> Columns:
        # Copies have parts of g, and the same winners.
        return Columns(2 * cols, cols, cols)

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def begin(self, backend: KernelBackend, target: Target) -> Won:
        return Won(backend, target)


class Won:
    """The Accumulation of MaximumGrad."""

    def __init__(self, backend: KernelBackend, target: Target) -> None:
        self._backend, self._target = backend, target
        target.out.zero_()

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        out, vertices, cols = self._target.out.numpy(), self._target.local[0].numpy(), self._target.out.shape[1]
        g, winners = rows.numpy()[:, :cols], rows.numpy()[:, cols:]
        for row, entries in entries_of(matrix):
            out[row] += (g[entries] * (winners[entries] == vertices[row])).sum(0)

    def gather(self, index: Tensor, message: Tensor) -> None:
        raise AssertionError("gradients of copies are summed before the op")

    def combine(self, message: Tensor, index: Tensor) -> None:
        raise AssertionError("gradients of copies are summed before the op")

    def scatter(self, message: Tensor, index: Tensor) -> None:
        raise AssertionError("gradients of copies are summed before the op")

    def end(self) -> None:
        if self._target.epilogue is not None:
            self._backend.finish(self._target.out, self._target.out, self._target.epilogue)


def entries_of(matrix: Sparse) -> Iterator[tuple[int, np.ndarray]]:
    """Yield every row that has entries, and their columns."""
    indptr, indices = matrix.indptr.numpy(), matrix.indices.numpy()
    for row in range(matrix.num_rows):
        if indptr[row] < indptr[row + 1]:
            yield row, indices[indptr[row] : indptr[row + 1]].astype(np.int64)


@dataclass(frozen=True)
class Watched:
    """An op whose calls are checked against the contract: made by a strategy, for one aggregation after the other."""

    inner: EdgeOp
    begun: list[WatchedAccumulation] = field(default_factory=list, compare=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, backend: KernelBackend, target: Target) -> WatchedAccumulation:
        self.begun.append(WatchedAccumulation(self.inner.begin(backend, target), target.out))
        return self.begun[-1]

    def check(self, nnz: int, elements: int) -> None:
        """Fail unless all results were ended, of `elements` elements together, from tiles of `nnz` entries together."""
        assert all(one.ended for one in self.begun if one.out.shape[0]), "a result was not ended"
        assert sum(one.out.numel() for one in self.begun) == elements, "a row was computed twice, or never"
        assert sum(one.nnz for one in self.begun) == nnz, "a tile came twice, or never"
        self.begun.clear()


class WatchedAccumulation:
    def __init__(self, inner: Accumulation, out: Tensor) -> None:
        self.inner, self.out = inner, out
        self.nnz, self.closed, self.ended = 0, False, False

    def _open(self) -> None:
        assert not self.ended, "a result was changed after its end"
        assert not self.closed, "something followed the last tile"

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        self._open()
        self.inner.tile(matrix, rows, last=last)
        self.nnz, self.closed = self.nnz + matrix.nnz, last

    def gather(self, index: Tensor, message: Tensor) -> None:
        self._open()
        self.inner.gather(index, message)

    def combine(self, message: Tensor, index: Tensor) -> None:
        self._open()
        assert len(set(index.tolist())) == index.shape[0], "a row was combined with two rows at once"
        self.inner.combine(message, index)

    def scatter(self, message: Tensor, index: Tensor) -> None:
        self._open()
        self.inner.scatter(message, index)

    def end(self) -> None:
        assert not self.ended, "a result was ended twice"
        self.inner.end()
        self.ended = True


@dataclass(frozen=True)
class Faulty:
    """What an op sees of a strategy with a fault: one that ends twice, skips a begin, forgets an end or drops a tile."""

    inner: EdgeOp
    fault: str
    first: list[Any] = field(default_factory=list, compare=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, backend: KernelBackend, target: Target) -> Any:
        if self.fault != "skips begin" or not self.first:
            self.first[:] = [FaultyAccumulation(self.inner.begin(backend, target), self.fault)]
        return self.first[0]


class FaultyAccumulation:
    def __init__(self, inner: Accumulation, fault: str) -> None:
        self.inner, self.fault, self.tiles = inner, fault, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        self.tiles += 1
        if not (self.fault == "drops a tile" and self.tiles == 1):
            self.inner.tile(matrix, rows, last=last or self.fault == "calls a tile the last too early")
        if self.fault == "repeats a tile" and self.tiles == 1:
            self.inner.tile(matrix, rows, last=last)

    def end(self) -> None:
        if self.fault != "forgets the end":
            self.inner.end()
        if self.fault == "ends twice":
            self.inner.end()


def maximum_of(adj: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """z and its winners, dense: adj[u, v] is not zero for an edge u -> v."""
    z, winners = np.zeros_like(h), np.full(h.shape, NOBODY)
    for v in range(h.shape[0]):
        sources = np.flatnonzero(adj[:, v])
        if sources.size:
            z[v] = h[sources].max(0)
            winners[v] = sources[h[sources].argmax(0)]
    return z, winners


def gradient_of(winners: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The adjoint: g of every row goes to its winners."""
    out = np.zeros_like(g)
    for v, c in zip(*np.nonzero(winners != NOBODY), strict=True):
        out[int(winners[v, c]), c] += g[v, c]
    return out


def to_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
