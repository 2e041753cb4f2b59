"""MG-GCN's staged broadcast (section 5.1, figure 2): P stages, rank j sends its rows in stage j.

Every rank first multiplies its own tile, which needs no message, while the first two blocks are on the wire; then it
multiplies one tile after another, while the next block arrives in the other of two slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Literal

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations, padded_rows
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.relations import upload_tile
from mggcn.aggregate.steps import AHEAD, Stages, Step
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.events import Event
from mggcn.config import RunConfig
from mggcn.memory.arena import BufferSpec
from mggcn.partition.base import PartitionStats
from mggcn.partition.locality.reuse import UNKNOWN, Reuse
from mggcn.partition.rows.partition import row_owners, row_stats
from mggcn.partition.rows.shard import row_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


class BroadcastStrategy:
    """MG-GCN's staged broadcast over a partition of the rows."""

    name = "broadcast"
    kind: Literal["rows"] = "rows"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> BroadcastPlan:
        nnz = row_stats(stats).tiles.nnz
        forward = tuple(nnz[rank].tolist())
        # Tile (i, j) of A^T has the edges from part j to part i; tile (i, j) of A has those from part i to part j.
        backward = forward if symmetric else tuple(nnz[:, rank].tolist())
        reuse = row_stats(stats).reuse
        return BroadcastPlan(rank, stats.counts, forward, backward, symmetric, reuse=reuse)


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """Slots and messages of the staged broadcast for one rank; counts: rows of every rank; nnz, nnz_t: of its tiles."""

    rank: int
    counts: tuple[int, ...]
    nnz: tuple[int, ...]
    nnz_t: tuple[int, ...]
    symmetric: bool
    _: KW_ONLY
    reuse: Reuse = UNKNOWN
    exact = True
    index_bytes = 0
    period = 1
    by_columns = True

    @property
    def num_slots(self) -> int:
        return min(2, len(self.counts) - 1)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(map(Matrix, repeat(self.counts[self.rank]), self.nnz))

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else tuple(map(Matrix, repeat(self.counts[self.rank]), self.nnz_t))

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        width = op.columns(cols).operand
        rows = max((*self.counts[: self.rank], *self.counts[self.rank + 1 :]), default=0)
        return tuple(BufferSpec(f"{name}.bc{s + 1}", rows, width, dtype) for s in range(self.num_slots))

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        last, me, width = len(self.counts) - 1, self.rank, op.columns(cols)
        nnz = self.nnz_t if backward else self.nnz
        own = width.multiply(self.counts[me], self.counts[me], nnz[me], self.reuse.own)
        if last == 0:
            return (own,)
        row_bytes = BufferSpec("", 1, width.operand, dtype).nbytes
        stages = Stages(me, self.counts, nnz, width.operand, row_bytes, reuse=self.reuse.others, result=width.result)
        first = [stages.send(root) for root in range(AHEAD)]
        return (*first, own, stages) if me == last else (*first, own, stages, stages.product(last))

    def build(self, context: BuildContext) -> RankAggregations:
        owners, backend = row_owners(context.partition), context.backend
        tiles, tiles_t = row_tiles(context.graph, owners, context.rank, context.options, context.required)
        forward = [upload_tile(backend, tile) for tile in tiles]
        backward = forward
        if tiles_t is not tiles:
            backward = [upload_tile(backend, tile) for tile in tiles_t]
        broadcast = Broadcast(self, forward, backward, context.comm, backend)
        return RankAggregations(broadcast, broadcast)


@dataclass(frozen=True, eq=False)
class Broadcast(Aggregation):
    """The strategy on one rank; tiles and tiles_t hold one sparse matrix per owner of the columns."""

    exact = True
    plan: BroadcastPlan
    tiles: Sequence[Sparse]
    tiles_t: Sequence[Sparse]
    comm: Communicator
    backend: KernelBackend

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._staged(op, self.tiles, h, target, buffers)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._staged(op, self.tiles_t, g, target, buffers)

    def _staged(
        self, op: EdgeOp, tiles: Sequence[Sparse], dense: Tensor, target: Target, slots: Sequence[Tensor]
    ) -> None:
        me, size = self.plan.rank, len(self.plan.counts)
        remote = [j for j in range(size) if j != me]
        last = remote[-1] if remote else me
        width = dense.shape[1]
        blocks = {j: slots[k % len(slots)][: self.plan.counts[j], :width] for k, j in enumerate(remote)}
        blocks[me] = dense
        arrivals: list[Event] = []
        for root in range(min(2, size)):
            arrivals.append(self._send(blocks[root], root, self.backend.record()))
        result = op.begin(self.backend, target)
        result.tile(tiles[me], dense, last=last == me)
        for j in range(size):
            arrivals[j].wait()
            if j != me:
                result.tile(tiles[j], blocks[j], last=j == last)
            if j + 2 < size:
                # The slot of stage j + 2 fed a tile that this event has seen: stage j's, or stage j - 1's if j is ours.
                arrivals.append(self._send(blocks[j + 2], j + 2, self.backend.record()))
        result.end()

    def _send(self, block: Tensor, root: int, after: Event) -> Event:
        return self.comm.broadcast(padded_rows(block), root, after)
