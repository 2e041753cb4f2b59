"""Sums over the neighbours of each relation, times the relation's own matrix: the edge operation of R-GCN.

out = sum over r of A_r h W_r, where A_r averages over neighbours of relation r (Schlichtkrull et al. 2018, eq. 2). For
one relation after another, the rows that have such neighbours are summed, multiplied and added to the result, a block
of rows at a time, so that a row is gathered once for each edge and no buffer has R times V rows
(docs/notes/0021-relations.md). V rows of this rank, D columns of h, E of the result, R relations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn.aggregate.edge_op import Columns, EdgeOp, PartialSums, Target
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.sparse import RelationRows
from mggcn.partition.rows.tiles import Tile

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 1 << 14
"""Rows that are summed, multiplied and added at a time: enough for a GPU, 4 MiB of a width of 64."""


def upload_tile(backend: KernelBackend, tile: Tile, like: Sparse | None = None) -> Sparse:
    """Return a tile on the device; if its edges have types, split by relation into blocks of at most BLOCK_ROWS rows.

    like: a similar tile, such as that of the batch before, from which the choice of kernels is taken.
    Cost: with types, a stable sort and about 25 bytes per edge on the host; the tile's entries are reordered in place.
    """
    if tile.types is None:
        return backend.sparse(tile.indptr, tile.indices, tile.values, like)
    no_entries = np.empty(0, np.int32)
    parts = tuple(_by_relation(backend, tile, like))
    schedule = schedule_of(parts, like)
    return Sparse(backend.upload(np.zeros_like(tile.indptr)), backend.upload(no_entries), None, schedule, parts)


def variant_of(like: Sparse | None, relation: int) -> Sparse | None:
    """Return the matrix of a relation in a similar tile, or that of another relation if it has none; None: like any."""
    if like is None or like.schedule is None:
        return None
    return next((part.matrix for part in like.relations if part.relation == relation), like)


def schedule_of(parts: tuple[RelationRows, ...], like: Sparse | None) -> Any:
    """Return the schedule that stands for a tile where a later one is like it, also if this one has no edges."""
    return parts[0].matrix.schedule if parts else None if like is None else like.schedule


def _by_relation(backend: KernelBackend, tile: Tile, like: Sparse | None) -> Iterator[RelationRows]:
    assert tile.types is not None  # upload_tile has looked
    order = np.argsort(tile.types, kind="stable")  # entries of a relation keep the order of rows and columns
    types = tile.types[order]
    rows = np.repeat(np.arange(tile.indptr.shape[0] - 1, dtype=np.int32), np.diff(tile.indptr))[order]
    fresh = np.ones(rows.shape[0], bool)
    fresh[1:] = (types[1:] != types[:-1]) | (rows[1:] != rows[:-1])
    starts = np.append(np.flatnonzero(fresh), rows.shape[0])
    bounds = np.searchsorted(types[starts[:-1]], np.arange(int(types[-1]) + 2)) if rows.size else np.zeros(1, np.int64)
    # In place: a sorted copy would leave freed memory behind that the process keeps.
    indices, values = tile.indices, tile.values
    indices[:] = indices[order]
    if values is not None:
        values[:] = values[order]
    for relation in range(bounds.shape[0] - 1):
        last = int(bounds[relation + 1])
        for a in range(int(bounds[relation]), last, BLOCK_ROWS):
            ends = starts[a : min(a + BLOCK_ROWS, last) + 1]
            entries = slice(int(ends[0]), int(ends[-1]))
            of = None if values is None else values[entries]
            matrix = backend.sparse(ends - ends[0], indices[entries], of, variant_of(like, relation))
            yield RelationRows(relation, backend.upload(rows[ends[:-1]]), matrix)


@dataclass(frozen=True, slots=True)
class RelationWork:
    """The weights, work space and gradients of a `Relational`, on the device.

    weights (R, D E): W_r in row r. near (n, D), far (n, E): room for a block of n rows. gradients (R, D E): the backward
    pass adds the gradient of W_r to row r.
    """

    weights: Tensor
    near: Tensor
    far: Tensor
    gradients: Tensor | None = None

    def matrix(self, relation: int) -> Tensor:
        """Return W_r (D, E)."""
        return self.weights[relation].view(self.near.shape[1], self.far.shape[1])

    def gradient(self, relation: int) -> Tensor:
        """Return the gradient of W_r (D, E)."""
        assert self.gradients is not None  # asked for backwards alone, where there are some
        return self.gradients[relation].view(self.near.shape[1], self.far.shape[1])


@dataclass(frozen=True, slots=True)
class Relational(EdgeOp):
    """Computes sum_r A_r h W_r, from rows of d_in columns to rows of d_out; backward: its gradient, over the transposed
    tiles.

    The backward pass sends rows of the gradient, and computes the gradients of h and of all W_r from one sum over each
    relation's edges: Z_r = A_r^T g gives dh += Z_r W_r^T and dW_r += h^T Z_r; h is `local`. of_rows: whether to compute
    dh; otherwise the result stays zero. work: set by the node that runs the op.
    """

    d_in: int
    d_out: int
    backward: bool = False
    of_rows: bool = True
    work: RelationWork | None = field(default=None, compare=False, repr=False)

    name = "relations"
    columnwise = False
    # Partial results do add up, but are of another width than what copies exchange backwards.
    additive = False

    @property
    def adjoint(self) -> Relational:
        return replace(self, backward=not self.backward)

    def columns(self, cols: int) -> Columns:
        return Columns(self.d_out, cols, self.d_out) if self.backward else Columns(self.d_in, cols, cols)

    def begin(self, backend: KernelBackend, target: Target) -> RelationSums:
        return RelationSums(self, backend, target)


class RelationSums(PartialSums):
    """Adds up rows of sums (`Relational`); every tile adds its relations in their order."""

    def __init__(self, op: Relational, backend: KernelBackend, target: Target) -> None:
        assert op.work is not None  # ops that run have their room
        super().__init__(backend, target)
        self._op, self._work = op, op.work
        self._h = target.local[0] if op.backward else None
        target.out.zero_()

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        step = self._forward if self._h is None else self._backward
        for part in matrix.relations:
            step(part, rows)

    def _forward(self, part: RelationRows, h: Tensor) -> None:
        count, work, backend = part.rows.shape[0], self._work, self._backend
        near, far = work.near[:count], work.far[:count]
        backend.spmm(part.matrix, h, near, accumulate=False, epilogue=None)
        backend.matmul(near, work.matrix(part.relation), far)
        backend.scatter_add_rows(far, part.rows, self._out)

    def _backward(self, part: RelationRows, g: Tensor) -> None:
        assert self._h is not None  # as `tile` has seen
        count, work, backend = part.rows.shape[0], self._work, self._backend
        near, far = work.near[:count], work.far[:count]
        backend.spmm(part.matrix, g, far, accumulate=False, epilogue=None)
        backend.gather_rows(self._h, part.rows, near)
        backend.matmul(near.t(), far, work.gradient(part.relation), accumulate=True)
        if self._op.of_rows:
            backend.matmul(far, work.matrix(part.relation).t(), near)
            backend.scatter_add_rows(near, part.rows, self._out)
