"""A strategy that the package does not have: it passes the strategies' contract, and whole runs train under it.

It waits for the rows of all ranks before it multiplies: the simplest exact strategy, with nothing behind its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np
import pytest
from torch import Tensor

import mggcn
from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations, padded_rows
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.steps import Await, Send, Step
from mggcn.assemble import plan as assemble
from mggcn.backend.base import Sparse
from mggcn.config import RunConfig
from mggcn.memory.arena import BufferSpec
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import row_owners, row_stats
from mggcn.partition.rows.shard import row_tiles
from tests.aggregate import test_contract as contract
from tests.devices import CPU
from tests.graphs import make_graph, pattern


class GatherStrategy:
    """Every rank gets the rows of all others, then multiplies."""

    name = "gather"
    kind: Literal["rows"] = "rows"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> GatherPlan:
        nnz = row_stats(stats).tiles.nnz
        forward = tuple(nnz[rank].tolist())
        return GatherPlan(
            rank, stats.counts, forward, forward if symmetric else tuple(nnz[:, rank].tolist()), symmetric
        )


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """A buffer and a message for each rank; counts: rows of every rank; nnz, nnz_t: of this rank's tiles."""

    rank: int
    counts: tuple[int, ...]
    nnz: tuple[int, ...]
    nnz_t: tuple[int, ...]
    symmetric: bool
    exact: bool = True
    index_bytes: int = 0
    period: int = 1
    by_columns: bool = True

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(map(Matrix, repeat(self.counts[self.rank]), self.nnz))

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else tuple(map(Matrix, repeat(self.counts[self.rank]), self.nnz_t))

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        others = (j for j in range(len(self.counts)) if j != self.rank)
        return tuple(BufferSpec(f"{name}.from{j}", self.counts[j], op.columns(cols).operand, dtype) for j in others)

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        columns = op.columns(cols)
        row_bytes = BufferSpec("", 1, columns.operand, dtype).nbytes
        sends = [self._send(root, row_bytes) for root in range(len(self.counts))]
        messages = [] if len(sends) == 1 else [*sends, *map(Await, range(len(sends)))]
        nnz = self.nnz_t if backward else self.nnz
        mine = self.counts[self.rank]
        return (*messages, *(columns.multiply(mine, rows, n, ()) for rows, n in zip(self.counts, nnz, strict=True)))

    def build(self, context: BuildContext) -> RankAggregations:
        owners = row_owners(context.partition)
        both = row_tiles(context.graph, owners, context.rank, context.options, context.required)
        tiles, tiles_t = ([context.backend.sparse(t.indptr, t.indices, t.values) for t in part] for part in both)
        gather = Gather(context, tiles, tiles_t)
        return RankAggregations(gather, gather)

    def _send(self, root: int, row_bytes: int) -> Send:
        nbytes, own = self.counts[root] * row_bytes, root == self.rank
        return Send("broadcast", nbytes * (len(self.counts) - 1) if own else 0, 0 if own else nbytes, root)


class Gather(Aggregation):
    """The strategy on one rank."""

    exact = True

    def __init__(self, context: BuildContext, tiles: Sequence[Sparse], tiles_t: Sequence[Sparse]) -> None:
        self._comm, self._backend, self._tiles, self._tiles_t = context.comm, context.backend, tiles, tiles_t

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._gathered(op, self._tiles, h, target, buffers)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._gathered(op, self._tiles_t, g, target, buffers)

    def _gathered(
        self, op: EdgeOp, tiles: Sequence[Sparse], own: Tensor, target: Target, buffers: Sequence[Tensor]
    ) -> None:
        blocks = [buffer[:, : own.shape[1]] for buffer in buffers]
        blocks.insert(self._comm.rank, own)
        if len(blocks) > 1:
            after = self._backend.record()
            rows = [padded_rows(block) for block in blocks]
            for arrived in [self._comm.broadcast(block, root, after) for root, block in enumerate(rows)]:
                arrived.wait()
        result = op.begin(self._backend, target)
        for j, (tile, block) in enumerate(zip(tiles, blocks, strict=True)):
            result.tile(tile, block, last=j == len(blocks) - 1)
        result.end()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings know the package's names alone: the strategy takes the place of the broadcast."""
    monkeypatch.setitem(assemble.STRATEGIES, "broadcast", GatherStrategy())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["directed", "weighted", "hub-row"])
def test_the_contract_holds(ranks: int, kind: str) -> None:
    """Fails if the contract cannot be met from outside the package: what a strategy is given does not suffice."""
    contract.test_aggregation_contract(CPU, "broadcast", ranks, kind)


@pytest.mark.usefixtures("registered")
def test_the_rest_of_the_contract_holds() -> None:
    """Fails as the tests that it calls say."""
    contract.test_wanted_rows_alone(CPU, "broadcast", 3)
    contract.test_more_ranks_than_vertices(CPU, "broadcast")
    contract.test_columns_of_wider_tensors(CPU, "broadcast")
    contract.test_bits_repeat(CPU, "broadcast")


def losses(graph: mggcn.Graph) -> list[float]:
    trainer = mggcn.Trainer(graph, mggcn.GCN((8,), dropout=0.5), ranks=3, transport="threads", threads=1, seed=31)
    return [row["loss"] for row in trainer.fit(epochs=4)]


def test_whole_runs_train_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if planning, memory or training know the package's strategies by more than their contract."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    graph = make_graph(pattern("random", 61, 12), num_features=6, num_classes=3, weighted=True, seed=5)
    expected = losses(graph)
    monkeypatch.setitem(assemble.STRATEGIES, "broadcast", GatherStrategy())
    np.testing.assert_allclose(losses(graph), expected, rtol=1e-6)
