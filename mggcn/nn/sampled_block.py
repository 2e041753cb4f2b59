"""A layer of a sampled batch as a graph: what the functions of this room take instead of a rank's part of a graph.

T targets, S sources, which begin with the targets, E drawn edges, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mggcn.aggregate.edge_op import SUM, EdgeOp, Target, single_tile
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.errors import GraphError
from mggcn.feed.batch import BlockEdges, Scales
from mggcn.graph.csr import Graph
from mggcn.interop.sampled import dgl_block
from mggcn.nn.devices import BackendOf
from mggcn.nn.rank_aggregation import padded_rows


class SampledBlock:
    """The edges that a batch drew for one layer, which `batches` makes: from S source rows to the first T of them.

    `aggregate`, `reduce`, `attend` and `attend_dynamic` take it instead of a `PartitionedGraph`: they read rows (S, D) of
    the sources and return (T, D); what they take of destinations has T rows. `dropout` takes the rows of the sources. Batch
    norm is torch's own: its statistics are those of the batch.
    """

    def __init__(
        self,
        edges: BlockEdges,
        ids: Tensor,
        scales: tuple[Scales, Scales],
        *,
        graph: Graph,
        dtype: torch.dtype,
        backend_of: BackendOf,
        clock: Tensor,
        sites: Iterator[int],
    ) -> None:
        self._edges, self._graph, self._sites = edges, graph, sites
        self._backend_of, self._scales = backend_of, scales
        self.num_targets: int = edges.indptr.size - 1
        """Number of target rows, T."""
        self.num_rows: int = ids.shape[0]
        """Number of source rows, S."""
        self.num_edges: int = edges.indices.size
        """Number of edges, E."""
        self.num_relations: int = 0
        """Types of edges are not drawn."""
        self.dtype: torch.dtype = dtype
        """Type of the rows that are aggregated."""
        self.ids: Tensor = ids
        """Vertex of each source row, int64 (S,); the first T are those of the targets."""
        self.device: torch.device = ids.device
        """Device of the rows."""
        self.clock: Tensor = clock
        """Seed and step of masks, int64 (2,)."""

    @property
    def indptr(self) -> Tensor:
        """Where the in-edges of each target begin, int64 (T + 1,)."""
        return torch.from_numpy(self._edges.indptr).to(self.device)

    @property
    def edge_weight(self) -> Tensor | None:
        """What each edge counts in `aggregate`, before `norm`, (E,) in the order of `edge_index`; None if all count 1."""
        values = self._edges.values
        return None if values is None else torch.from_numpy(values).to(self.device)

    def edge_index(self) -> Tensor:
        """Return sources and targets, int64 (2, E), grouped by target, as PyG's layers take them: of rows, not vertices."""
        targets = np.repeat(np.arange(self.num_targets), np.diff(self._edges.indptr))
        return torch.from_numpy(np.stack([self._edges.indices, targets])).to(self.device)

    def to_pyg(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return what a bipartite layer of PyG takes for x (S, D): `conv(*block.to_pyg(x))` has a row for each target."""
        return (x, x[: self.num_targets]), self.edge_index()

    def to_dgl(self) -> Any:
        """Return the block as a DGLBlock; edata "w" is `edge_weight`, if there is any. Raises: BackendError without DGL."""
        indices = torch.from_numpy(self._edges.indices).long().to(self.device)
        return dgl_block(self.indptr, indices, self.num_rows, self.edge_weight)

    @property
    def counts_edges(self) -> bool:
        """False. Raises: GraphError if edges repeat: what drawn ones count is not their number, which attention reads."""
        if self._graph.repeats:
            raise GraphError(
                f"edges of {self._graph.name} repeat, and attention counts each of them, which batches do not keep apart; "
                'load it with options=GraphOptions(duplicates="merge")'
            )
        return False

    def next_site(self) -> int:
        """Return the number, from 1, of a layer that draws a mask in this batch."""
        return next(self._sites)

    @functools.cached_property
    def aggregation(self) -> BlockAggregation:
        """The aggregation of rows, made when it is first used."""
        back = self._edges.transposed
        assert back is not None  # the loop's slots transpose every hop
        backend, real = self._backend_of(self.dtype, 1), (self._scales[0][0], self._scales[1][1])
        matrices = [backend.sparse(each.indptr, each.indices, each.values) for each in (self._edges, back)]
        row, col = (None if scale is None else backend.upload(scale) for scale in real)
        row = None if row is None else row[: self.num_targets]
        return BlockAggregation(self, matrices, row, col)


class BlockAggregation:
    """Edge operations over a block, as `RankAggregation` has them of a rank. matrices: a row a target, a row a source."""

    def __init__(self, block: SampledBlock, matrices: Sequence[Sparse], row: Tensor | None, col: Tensor | None) -> None:
        self.rows: int = block.num_targets
        self._sizes, self._matrices = (block.num_targets, block.num_rows), matrices
        self._row, self._col, self._dtype, self._backend_of = row, col, block.dtype, block._backend_of

    @property
    def backend(self) -> KernelBackend:
        """The kernels of the device."""
        return self._backend_of(self._dtype, 1)

    def apply(self, x: Tensor, *, adjoint: bool) -> Tensor:
        """Return S_r A^T S_c x (T, D), or S_c A S_r x (S, D), as a new contiguous tensor."""
        before, after = (self._row, self._col) if adjoint else (self._col, self._row)
        h = self.filled(x.shape[1], x)
        if before is not None:
            torch.mul(x, before[:, None], out=h)
        epilogue = None if after is None else Epilogue(row_scale=after)
        return self.run(SUM, h, x.shape[1], (), backward=adjoint, epilogue=epilogue).contiguous()

    def run(
        self,
        op: EdgeOp,
        h: Tensor,
        cols: int,
        local: Sequence[Tensor],
        *,
        backward: bool,
        epilogue: Epilogue | None = None,
    ) -> Tensor:
        """Return an edge operation over the in-edges of the targets (T, cols), or the out-edges of the sources (S, cols).

        local: as EdgeOp.begin takes it; ids of the sources stand for those of the targets, too.
        """
        backend = self._backend_of(self._dtype, max(op.columns(cols)))
        backend.activate()
        out = padded_rows(self._sizes[backward], cols, h)
        single_tile(op, backend, self._matrices[backward], h, Target(out, epilogue, local))
        return out

    def padded(self, cols: int, like: Tensor) -> Tensor:
        """Return new rows of the targets, (T, cols), padded."""
        return padded_rows(self.rows, cols, like)

    def filled(self, cols: int, columns: Tensor) -> Tensor:
        """Return as many padded rows as there are given, of which the first columns are these."""
        rows = padded_rows(columns.shape[0], cols, columns)
        rows[:, : columns.shape[1]].copy_(columns)
        return rows
