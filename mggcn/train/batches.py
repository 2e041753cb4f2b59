"""Brings batches to a rank's device: ids, scales, features and targets of their rows, and the edges of their blocks.

V rows of a row set, D features.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.aggregate.base import BatchEdges
from mggcn.aggregate.halo import Side
from mggcn.aggregate.relations import schedule_of, upload_relations, upload_tile
from mggcn.aggregate.shared import SharedBlock
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import RowSet, Stack
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges, SparseFeatures, transposed
from mggcn.feed.features import VertexFeatures
from mggcn.feed.norm_scales import NormScales
from mggcn.memory.arena import BufferSpec
from mggcn.model.rewrite.first_sums import FirstSums
from mggcn.model.runtime import Rows, SparseInput, Target
from mggcn.partition.rows.tiles import Tile
from mggcn.train.runtime import DTYPES, RankRuntime
from mggcn.train.targets import StepTargets

Vector = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoader:
    """Loads the batches of a feed. norm: the scales of the whole graph, None if rows have none. sparse: how rows of X lie
    in a batch, None where they are dense; dropped: memory for their values under input dropout.

    first: what a model reads instead of the first layer's edges, None if it reads them. stored (N, D): X where it is
    stored, if the first sums read it there; None: batches bring their rows. targets: makes that of the seeds; None: pairs
    of seeds have one, not rows. dtype: of activations.
    """

    runtime: RankRuntime
    stack: Stack
    features: VertexFeatures
    norm: NormScales | None
    sparse: SparseRowsPlan | None
    dropped: Tensor | None
    first: FirstSums | None
    stored: Tensor | None
    targets: StepTargets | None
    dtype: str
    typed: bool
    """Whether the model reads the types of edges."""

    def load(self, batch: Batch) -> None:
        """Make the training program run over this batch. Raises: PlanError if the plan has no room for it."""
        batch.check(self.stack)
        if batch.stored != (0 if self.stored is None else self.stored.shape[0]):
            raise PlanError(f"the first block's edges name {batch.stored} vertices, and the step reads X otherwise")
        runtime, backend = self.runtime, self.runtime.backend
        # Targets are the first of a block's sources, so every row set is the beginning of the input's.
        is_dense = self.sparse is None and self.stored is None and (self.first is None or self.first.itself)
        dense = self._features(batch) if is_dense else None
        sums = None if self.first is None else self._device(batch.sums, batch)
        rows = {name: self._rows(name, ids, dense, sums, batch) for name, ids in batch.rows.items()}
        for name, sparse in self._sparse_inputs(batch).items():
            rows[name] = dataclasses.replace(rows[name], sparse=sparse)
        runtime.inputs = dataclasses.replace(runtime.inputs, rows={**runtime.inputs.rows, **rows})
        train = runtime.programs["train"]
        for block, edges in batch.edges.items():
            aggregation = train.aggregations[block]
            if isinstance(aggregation, SharedBlock) and edges.remote is not None:
                aggregation.load(*_sides(backend, edges, self._real, aggregation))
                continue
            aggregation.take(batch.halo.get(block), whole=batch.last)
            own = aggregation.edges
            if own is None:
                raise PlanError(f"block {block.name!r} does not take edges from a batch")
            if self.typed and edges.types is None:
                raise PlanError(
                    f"the model has weights for each relation, and edges of block {block.name!r} have no types"
                )
            num_sources = batch.rows[block.sources].size
            own.load(*_matrices(backend, edges, num_sources, self._real, own))
        counts = {name: ids.size for name, ids in batch.rows.items()}
        runtime.programs = {**runtime.programs, "train": train.cut(counts)}

    @property
    def _real(self) -> npt.DTypeLike:
        return np.float64 if self.dtype == "fp64" else np.float32

    def _rows(self, name: RowSet, ids: Vector, dense: Tensor | None, sums: Tensor | None, batch: Batch) -> Rows:
        backend = self.runtime.backend
        row, col = None, None
        if batch.scales is not None:
            row, col = batch.scales[name]
        elif self.norm is not None:
            row, col = self.norm.of(np.ascontiguousarray(ids, np.int64))
        return Rows(
            ids=backend.upload(ids),
            row_scale=None if row is None else backend.upload(row),
            col_scale=None if col is None else backend.upload(col),
            dense=None if dense is None else dense[: ids.size],
            sums=None if sums is None else sums[: ids.size],
            gradient=None if self.runtime.learned is None else self.runtime.learned.gradient[: ids.size],
            everyone=self.stored if name == self.stack.blocks[0].sources else None,
            target=self._target(ids, batch.seeds) if name == self.stack.seeds else None,
        )

    def _target(self, ids: Vector, seeds: Vector) -> Target | None:
        if self.targets is None:
            return None
        found, backend = self.targets.read(ids, seeds), self.runtime.backend
        return self.targets.target(backend.upload(found.labels), backend.upload(found.mask), found.inv_count)

    def _sparse_inputs(self, batch: Batch) -> dict[RowSet, SparseInput]:
        """Return the sparse features of the row sets that products read; none where features are dense.

        Raises: PlanError if the feed gave none.
        """
        if self.sparse is None:
            return {}
        names = [name for name, _, _ in self.sparse.sizes]
        if batch.sparse.keys() != set(names):
            raise PlanError("the first layer multiplies sparse features, and the feed gathers none")
        old = {name: rows.sparse for name, rows in self.runtime.inputs.rows.items()}
        return {name: self._sparse_input(batch.sparse[name], old.get(name)) for name in names}

    def _sparse_input(self, features: SparseFeatures, old: SparseInput | None) -> SparseInput:
        """Return sparse features as products read them. old: those of the batch before, whose variants they take."""
        backend, like = self.runtime.backend, (None, None) if old is None else (old.rows, old.rows_t or old.dropped_t)
        rows, rows_t = (
            backend.sparse(tile.indptr, tile.indices, tile.values, before)
            for tile, before in zip((features.rows, features.rows_t), like, strict=True)
        )
        if features.order is None or self.dropped is None:
            return SparseInput(rows=rows, rows_t=rows_t)
        # The values of all row sets begin alike. Those of the transpose are rewritten in the memory of the batch.
        dropped = dataclasses.replace(rows, values=self.dropped[: features.rows.nnz])
        return SparseInput(rows=rows, dropped=dropped, dropped_t=rows_t, position=backend.upload(features.order))

    def _features(self, batch: Batch) -> Tensor:
        """Return the features (V, D) of the input's rows, or their learned rows, which ranks then exchange."""
        if self.runtime.learned is not None:
            return self.runtime.learned.fetch(batch.rows[self.stack.blocks[0].sources])
        if batch.features is not None:
            return self._device(batch.features, batch)
        dense = self._room(batch)
        self.runtime.backend.write(self.features.gather(batch.rows[self.stack.blocks[0].sources]), dense)
        return dense

    def _device(self, gathered: Tensor | None, batch: Batch) -> Tensor:
        """Return rows of the input on the device. Raises: PlanError if the feed gave none."""
        if gathered is None:
            raise PlanError("the first layer's sums are read from A X, and the feed gathers none of its rows")
        return gathered if gathered.device == self.runtime.clock.device else self._room(batch).copy_(gathered)

    def _room(self, batch: Batch) -> Tensor:
        """Return memory of the device for the input's rows (V, D), which are padded as those of the arena."""
        ids = batch.rows[self.stack.blocks[0].sources]
        spec = BufferSpec("", ids.size, self.features.num_features, self.dtype)
        flat = self.runtime.backend.allocate(spec.nbytes).view(DTYPES[self.dtype])
        return torch.as_strided(flat, (spec.rows, spec.cols), (spec.ld, 1))


def _matrices(
    backend: KernelBackend, edges: BlockEdges, num_sources: int, dtype: npt.DTypeLike, block: BatchEdges
) -> tuple[Sparse, Sparse | None]:
    """Return a block's matrix, a row for each target, and where it is read its transpose, with rows in that order."""
    like, like_t = block.loaded or (None, None)
    matrix = _sparse(backend, edges, dtype, like)
    if not block.back:
        return matrix, None
    return matrix, _sparse(backend, edges.transposed or transposed(edges, num_sources), dtype, like_t)


def _sides(
    backend: KernelBackend, edges: BlockEdges, dtype: npt.DTypeLike, block: SharedBlock
) -> tuple[Side, Side | None]:
    """Return both directions of a block that ranks share; backwards None where nothing reads it."""
    like, like_t = block.loaded or (None, None)
    forward = _side(backend, edges, dtype, like)
    if not block.back or edges.transposed is None:
        return forward, None
    return forward, _side(backend, edges.transposed, dtype, like_t)


def _side(backend: KernelBackend, edges: BlockEdges, dtype: npt.DTypeLike, like: Side | None) -> Side:
    remote, of = edges.remote, (None, None) if like is None else (like.own, like.halo)
    if remote is None:
        raise PlanError("a block that ranks share needs the edges from other ranks' rows in both directions")
    own, halo = (_sparse(backend, part, dtype, old) for part, old in zip((edges, remote.edges), of, strict=True))
    return Side(own, halo, backend.upload(remote.rows), remote.sent, remote.received)


def _sparse(backend: KernelBackend, edges: BlockEdges, dtype: npt.DTypeLike, like: Sparse | None) -> Sparse:
    values = None if edges.values is None else edges.values.astype(dtype, copy=False)
    if edges.relations:
        # As of other blocks, products keep the variants of the first batch: each choice would be recorded by its sizes.
        parts = tuple(upload_relations(backend, edges.relations, edges.indptr.shape[0] - 1, like))
        return Sparse(
            backend.upload(edges.indptr), backend.upload(edges.indices[:0]), None, schedule_of(parts, like), parts
        )
    if edges.types is not None:
        # Entries are put in the order of their relations, in place: the feed's arrays stay as they are.
        own = None if values is None else values.copy()
        return upload_tile(backend, Tile(edges.indptr, edges.indices.copy(), own, edges.types), like)
    return backend.sparse(edges.indptr, edges.indices, values, like)
