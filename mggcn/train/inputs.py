"""Loads a rank's constant inputs onto its device: dense X (to become A_hat X) or sparse X in both orders.

V rows of this rank, D features.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import OWNED
from mggcn.feed.features import FeatureReader, aggregated, transposed
from mggcn.memory.arena import BufferSpec
from mggcn.model.runtime import Inputs, Rows, SparseInput, Target, require
from mggcn.partition.order import whole_graph
from mggcn.partition.rows.shard import Shard
from mggcn.partition.rows.tiles import Tile, degrees, scales
from mggcn.planning.run import RankPlan
from mggcn.train.runtime import DTYPES


def load_inputs(
    backend: KernelBackend, shard: Shard, reader: FeatureReader, plan: RankPlan, threads: int, target: Target | None
) -> Inputs:
    """Read this rank's features as the model keeps them. target: None where links are predicted, not rows.

    Dense features are read once, straight to their place; "setup" then turns X into A_hat X there.
    """
    rows = Rows(
        row_scale=None if shard.row_scale is None else backend.upload(shard.row_scale),
        col_scale=None if shard.col_scale is None else backend.upload(shard.col_scale),
        ids=backend.upload(shard.global_ids),
        target=target,
        owned=None if shard.owned is None else backend.upload(np.flatnonzero(shard.owned)),
    )
    on_disk = plan.disk is not None and not plan.input.sparse
    if plan.by_blocks is not None or plan.learned is not None or on_disk:
        # Features are read where they are, or written to disk later; learned rows are the trainer's.
        return Inputs(rows={OWNED: rows})
    if not plan.input.sparse:
        return Inputs(rows={OWNED: dataclasses.replace(rows, dense=_dense(backend, reader, plan))})
    sparse = _sparse(backend, shard, reader, plan, threads)
    return Inputs(rows={OWNED: dataclasses.replace(rows, sparse=sparse)})


def _dense(backend: KernelBackend, reader: FeatureReader, plan: RankPlan) -> torch.Tensor:
    dtype = plan.sizes.dtype
    spec = BufferSpec("features", plan.sizes.owned, plan.values.num_features, dtype)
    flat = backend.allocate(spec.nbytes).view(DTYPES[dtype])
    dense = flat.as_strided((spec.rows, spec.cols), (spec.ld, 1))
    for local, block in reader.dense():
        if local.size:
            # The local ids of a range are consecutive unless the order is a full permutation.
            if int(local[-1]) - int(local[0]) + 1 == local.size and (np.diff(local) == 1).all():
                backend.write(block, dense[int(local[0]) : int(local[-1]) + 1])
            else:
                rows = torch.empty(block.shape, dtype=dense.dtype, device=dense.device)
                backend.write(block, rows)
                dense[torch.from_numpy(local.astype(np.int64))] = rows
    return dense


def _upload(backend: KernelBackend, tile: Tile) -> Sparse:
    return backend.sparse(tile.indptr, tile.indices, tile.values)


def _sparse(backend: KernelBackend, shard: Shard, reader: FeatureReader, plan: RankPlan, threads: int) -> SparseInput:
    dtype = np.float64 if plan.sizes.dtype == "fp64" else np.float32
    values, config = plan.values, plan.values.config
    if values.input.aggregated:
        whole = whole_graph(reader.graph.num_vertices)
        degree = degrees(reader.graph.adj_t, whole, 0, self_loops=config.self_loops, threads=threads)
        row_scale, col_scale = scales(degree, config.norm)
        mine = row_scale[shard.global_ids]
        matrix = aggregated(reader, (mine, col_scale), self_loops=config.self_loops, dtype=dtype)
    else:
        matrix = reader.sparse(dtype, shard.col_scale if values.input_scaled else None)
    rows = _upload(backend, matrix)
    if not values.trains_whole:
        return SparseInput(rows=rows)
    matrix_t, position = transposed(matrix, reader.num_features)
    if not config.input_dropout:
        return SparseInput(rows=rows, rows_t=_upload(backend, matrix_t))
    dropped = dataclasses.replace(rows, values=torch.zeros_like(require(rows.values)))
    # The transposed values are rewritten from the dropped ones: their constant copy is not needed.
    back = _upload(backend, matrix_t)
    return SparseInput(rows=rows, dropped=dropped, dropped_t=back, position=backend.upload(position))
