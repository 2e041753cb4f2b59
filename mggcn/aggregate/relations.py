"""Sums over the neighbours of each relation, times the relation's own matrix: the edge operation of R-GCN.

out = sum over r of A_r h W_r, where A_r averages over neighbours of relation r (Schlichtkrull et al. 2018, eq. 2). For
one relation after another, the rows that have such neighbours are summed, multiplied and added to the result, a block
of rows at a time, so that a row is gathered once for each edge and no buffer has R times V rows
(docs/notes/0021-relations.md). On a GPU, relations of few rows share launches, those of products up to a size of the
matrices. V rows of this rank, D columns of h, E of the result, R relations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn.aggregate.edge_op import Columns, EdgeOp, PartialSums, Target
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.relations import chain_of
from mggcn.backend.sparse import RelationGroup, RelationRows
from mggcn.blocks.relation_order import RelationEdges
from mggcn.partition.rows.tiles import Tile

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 1 << 14
"""Rows that are summed, multiplied and added at a time: enough for a GPU, 4 MiB of a width of 64."""
GROUPED_ROWS = 1 << 10
"""Rows of a relation in a tile up to which its sums and the addition of its rows share launches with others' where a
device has kernels for that, at any width: both move the same bytes alone. So many rows occupy a GPU by themselves."""
LAUNCH_S = 4e-6
"""Seconds of a kernel that waits for the one before, on an H200 (least_s of cost/machines/hgx-h200.toml, measured)."""
GROUPED_FLOPS = 1e13
"""FLOP per second of the kernels that multiply the rows of a group, each thread in float32 with operands from shared
memory: an estimate, not measured (docs/notes/0040); cuBLAS does 48 TFLOP/s on an H200."""


def multiplied_together(rows: int, relations: int, d: int, e: int) -> bool:
    """Whether one launch multiplies the rows of a group of relations with matrices (d, e).

    Only if its arithmetic takes no longer than the launches of a product for each relation, whatever else those take.
    """
    return 2 * rows * d * e <= GROUPED_FLOPS * LAUNCH_S * relations


def num_parts(rows: int, relations: int, tile_rows: int, *, groups: bool) -> tuple[int, int]:
    """Return how many parts of `upload_relations` have one relation, and how many may have several, of a tile whose
    relations have `rows` rows in all, equally many each. groups: whether the device has kernels for groups.
    """
    size = -(-rows // relations)
    whole, rest = divmod(size, BLOCK_ROWS)
    if not groups or rest > GROUPED_ROWS:
        return relations * (whole + (rest > 0)), 0
    together = max(1, min(tile_rows, BLOCK_ROWS) // rest) if rest else relations
    return relations * whole, -(-relations // together) if rest else 0


def upload_tile(backend: KernelBackend, tile: Tile, like: Sparse | None = None) -> Sparse:
    """Return a tile on the device; if its edges have types, split by relation into blocks of at most BLOCK_ROWS rows.

    like: a similar tile, such as that of the batch before, from which the choice of kernels is taken.
    Cost: with types, a stable sort and about 25 bytes per edge on the host; the tile's entries are reordered in place.
    """
    if tile.types is None:
        return backend.sparse(tile.indptr, tile.indices, tile.values, like)
    no_entries = np.empty(0, np.int32)
    parts = tuple(upload_relations(backend, _by_relation(tile), tile.indptr.shape[0] - 1, like))
    schedule = schedule_of(parts, like)
    return Sparse(backend.upload(np.zeros_like(tile.indptr)), backend.upload(no_entries), None, schedule, parts)


def variant_of(like: Sparse | None, relation: int) -> Sparse | None:
    """Return the matrix of a relation in a similar tile, or that of another relation if it has none; None: like any."""
    if like is None or like.schedule is None:
        return None
    return next((part.matrix for part in like.relations if part.spans[0][0] == relation), like)


def schedule_of(parts: tuple[RelationRows, ...], like: Sparse | None) -> Any:
    """Return the schedule that stands for a tile where a later one is like it, also if this one has no edges."""
    return parts[0].matrix.schedule if parts else None if like is None else like.schedule


def upload_relations(
    backend: KernelBackend, parts: Iterable[RelationEdges], rows: int, like: Sparse | None
) -> Iterator[RelationRows]:
    """Yield edges by relation on the device: small relations together, where the device has kernels for groups.

    parts: in the order of their relations. rows: of the tile; no group has more, as an operation has room for so many.
    """
    waiting, count, most = list[RelationEdges](), 0, min(rows, BLOCK_ROWS)
    for part in parts:
        size = part.rows.size
        if backend.relations is None or size > GROUPED_ROWS:
            yield _together(backend, [part], like)
            continue
        # Two parts of a relation in one group would add to the same gradient at once.
        if waiting and (count + size > most or waiting[-1].relation == part.relation):
            yield _together(backend, waiting, like)
            waiting, count = [], 0
        waiting.append(part)
        count += size
    if waiting:
        yield _together(backend, waiting, like)


def _together(backend: KernelBackend, parts: Sequence[RelationEdges], like: Sparse | None) -> RelationRows:
    """Upload parts of relations as one matrix."""
    first, ends = parts[0], np.cumsum([part.rows.size for part in parts]).tolist()
    spans = tuple((part.relation, end - part.rows.size, end) for part, end in zip(parts, ends, strict=True))
    if len(parts) == 1:
        matrix = backend.sparse(first.indptr, first.indices, first.values, variant_of(like, first.relation))
        return RelationRows(spans, backend.upload(first.rows), matrix)
    rows = np.concatenate([part.rows for part in parts])
    begins = np.cumsum([0, *(part.indices.size for part in parts[:-1])])
    indptr = np.concatenate([[0], *(part.indptr[1:] + a for part, a in zip(parts, begins, strict=True))])
    indices, values = np.concatenate([part.indices for part in parts]), [part.values for part in parts]
    of = None if first.values is None else np.concatenate([some for some in values if some is not None])
    matrix = backend.sparse(indptr, indices, of, variant_of(like, first.relation))
    longest = max(part.rows.size for part in parts)
    group = RelationGroup(backend.upload(np.array(spans, np.int32)), longest, backend.upload(chain_of(rows)))
    return RelationRows(spans, backend.upload(rows), matrix, group)


def add_rows(backend: KernelBackend, source: Tensor, part: RelationRows, out: Tensor) -> None:
    """Add the rows of a part to the rows of the tile that they belong to, in the order of relations."""
    if part.group is None or backend.relations is None:
        backend.scatter_add_rows(source, part.rows, out)
    else:
        backend.relations.scatter_add(source, part.rows, part.group, out)


def _by_relation(tile: Tile) -> Iterator[RelationEdges]:
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
            yield RelationEdges(relation, rows[ends[:-1]], ends - ends[0], indices[entries], of)


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
    """Adds up rows of sums (`Relational`); every tile adds its relations in their order, but those that share launches when
    their group is full.
    """

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
        self._multiply(part, near, far, transposed=False)
        add_rows(backend, far, part, self._out)

    def _backward(self, part: RelationRows, g: Tensor) -> None:
        assert self._h is not None  # as `tile` has seen
        count, work, backend = part.rows.shape[0], self._work, self._backend
        near, far = work.near[:count], work.far[:count]
        backend.spmm(part.matrix, g, far, accumulate=False, epilogue=None)
        backend.gather_rows(self._h, part.rows, near)
        self._add_gradients(part, near, far)
        if self._op.of_rows:
            self._multiply(part, far, near, transposed=True)
            add_rows(backend, near, part, self._out)

    def _multiply(self, part: RelationRows, rows: Tensor, out: Tensor, *, transposed: bool) -> None:
        """Multiply each row by the matrix of its relation."""
        together = self._backend.relations
        if together is not None and part.group is not None and self._shares_products(part):
            together.multiply(rows, self._work.weights, part.group, out, transposed=transposed)
            return
        for relation, first, last in part.spans:
            matrix = self._work.matrix(relation)
            self._backend.matmul(rows[first:last], matrix.t() if transposed else matrix, out[first:last])

    def _shares_products(self, part: RelationRows) -> bool:
        return multiplied_together(part.rows.shape[0], len(part.spans), self._op.d_in, self._op.d_out)

    def _add_gradients(self, part: RelationRows, near: Tensor, far: Tensor) -> None:
        """Add near^T far to the gradients of the relations of a part."""
        together, gradients = self._backend.relations, self._work.gradients
        if together is not None and part.group is not None and self._shares_products(part):
            assert gradients is not None  # backwards there are some
            together.add_products(near, far, part.group, gradients)
            return
        for relation, first, last in part.spans:
            of, to = near[first:last].t(), self._work.gradient(relation)
            self._backend.matmul(of, far[first:last], to, accumulate=True)
