"""Brings batches to a rank's device: ids, scales, features and targets of their rows, and the edges of their blocks.

N vertices, V rows of a row set, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from mggcn.aggregate.local import LocalBlock
from mggcn.backend.base import KernelBackend
from mggcn.blocks.block import RowSet, Stack
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges
from mggcn.feed.features import FeatureReader
from mggcn.memory.arena import BufferSpec
from mggcn.model.runtime import Rows, Target
from mggcn.train.runtime import DTYPES, RankRuntime

Vector = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoader:
    """Loads the batches of a feed. row_scale, col_scale (N,) or None: S_r, S_c of the whole graph.

    target: makes that of the seeds, given their ids and the number of all ranks' seeds. dtype: of activations.
    """

    runtime: RankRuntime
    stack: Stack
    features: FeatureReader
    row_scale: Vector | None
    col_scale: Vector | None
    target: Callable[[Vector, int], Target]
    dtype: str

    def load(self, batch: Batch) -> None:
        """Make the training program run over this batch. Raises: PlanError if the plan has no room for it."""
        batch.check(self.stack)
        runtime, backend = self.runtime, self.runtime.backend
        # Targets are the first of a block's sources, so every row set is the beginning of the input's.
        dense = self._dense(batch.rows[self.stack.blocks[0].sources])
        rows = {name: self._rows(name, ids, dense, batch.num_seeds) for name, ids in batch.rows.items()}
        runtime.inputs = dataclasses.replace(runtime.inputs, rows={**runtime.inputs.rows, **rows})
        train = runtime.programs["train"]
        for block, edges in batch.edges.items():
            aggregation = train.aggregations[block]
            if not isinstance(aggregation, LocalBlock):
                raise PlanError(f"block {block.name!r} does not take edges from a batch")
            num_sources = batch.rows[block.sources].size
            aggregation.load(*_matrices(backend, edges, num_sources, self._real))
        counts = {name: ids.size for name, ids in batch.rows.items()}
        runtime.programs = {**runtime.programs, "train": train.cut(counts)}

    @property
    def _real(self) -> npt.DTypeLike:
        return np.float64 if self.dtype == "fp64" else np.float32

    def _rows(self, name: RowSet, ids: Vector, dense: Tensor, num_seeds: int) -> Rows:
        backend = self.runtime.backend
        scales = [
            None if scale is None else backend.upload(scale[ids].astype(self._real))
            for scale in (self.row_scale, self.col_scale)
        ]
        return Rows(
            ids=backend.upload(ids),
            row_scale=scales[0],
            col_scale=scales[1],
            dense=dense[: ids.size],
            target=self.target(ids, num_seeds) if name == self.stack.seeds else None,
        )

    def _dense(self, ids: Vector) -> Tensor:
        """Return the features (V, D) in rows that are padded as those of the arena."""
        backend, spec = self.runtime.backend, BufferSpec("", ids.size, self.features.num_features, self.dtype)
        flat = backend.allocate(spec.nbytes).view(DTYPES[self.dtype])
        dense = torch.as_strided(flat, (spec.rows, spec.cols), (spec.ld, 1))
        backend.write(self.features.gather(ids), dense)
        return dense


def _matrices(backend: KernelBackend, edges: BlockEdges, num_sources: int, dtype: npt.DTypeLike) -> tuple[Any, Any]:
    """Return a block's matrix, a row for each target, and its transpose, with rows in the order of targets."""
    num_targets = edges.indptr.size - 1
    values = None if edges.values is None else edges.values.astype(dtype)
    places = np.arange(1, edges.indices.size + 1)
    transposed = sp.csr_array((places, edges.indices, edges.indptr), (num_targets, num_sources)).tocsc()
    order = transposed.data - 1
    values_t = None if values is None else values[order]
    matrix = backend.sparse(edges.indptr, edges.indices, values)
    return matrix, backend.sparse(transposed.indptr.astype(np.int64), transposed.indices.astype(np.int32), values_t)
