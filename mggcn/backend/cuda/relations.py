"""Products with the matrices of several relations on a GPU: launches of cuda/relations.cu."""

from __future__ import annotations

from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels, out_option, strided
from mggcn.backend.cuda.rows import row_shape, vector
from mggcn.backend.sparse import RelationGroup

TILE = (64, 32)
"""Rows and columns of a block's results (kTileRows, kTileCols of cuda/relations.cu)."""
THREADS = 128


def _grid(group: RelationGroup, rows: int, cols: int) -> tuple[tuple[int, int, int], tuple[int]]:
    """Return grid and block: spans, and the tiles of a result of so many rows and columns."""
    return (group.spans.shape[0], -(-rows // TILE[0]), -(-cols // TILE[1])), (THREADS,)


class CudaRelations:
    """The kernels for one storage type on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def multiply(self, rows: Tensor, weights: Tensor, group: RelationGroup, out: Tensor, *, transposed: bool) -> None:
        inner, cols = rows.shape[1], out.shape[1]
        args = (*strided(rows), *strided(weights), group.spans, *strided(out), inner, cols, int(transposed))
        self._kernels.launch("relations", "relation_products", *_grid(group, group.longest, cols), *args)

    def add_products(self, a: Tensor, b: Tensor, group: RelationGroup, gradients: Tensor) -> None:
        sizes = a.shape[1], b.shape[1]
        args = (*strided(a), *strided(b), group.spans, *strided(gradients), *sizes)
        self._kernels.launch("relations", "relation_gradients", *_grid(group, *sizes), *args)

    def scatter_add(self, source: Tensor, index: Tensor, group: RelationGroup, out: Tensor) -> None:
        rows, cols = index.shape[0], out.shape[1]
        args = (*strided(source), index, group.chain, *strided(out), rows, cols)
        shape, options = row_shape(rows, cols, vector(source.dtype)), out_option(source, out)
        self._kernels.launch("rows", "scatter_add_chains", *shape, *args, options=options)
