"""Halo exchange: every rank receives the rows that its own rows multiply, and no others, in one uneven all-to-all.

Meanwhile each rank multiplies its own tile. V rows of this rank, K rows of its halo, S rows that it sends, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations, padded_rows
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target, single_tile
from mggcn.aggregate.relations import upload_tile
from mggcn.aggregate.steps import Await, Copy, Send, Step
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.config import RunConfig
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec
from mggcn.partition.base import PartitionStats
from mggcn.partition.locality.reuse import UNKNOWN, Reuse
from mggcn.partition.rows.halo import Halo, build_halos
from mggcn.partition.rows.partition import row_owners, row_stats

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator

INDEX_BYTES = 4


class HaloStrategy:
    """The halo exchange over a partition of the rows."""

    name = "halo"
    kind: Literal["rows"] = "rows"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> HaloPlan:
        tiles = row_stats(stats).tiles
        forward = _exchange(tiles.nnz, tiles.rows_needed, rank)
        backward = forward if symmetric else _exchange(tiles.nnz.T, tiles.rows_needed_t, rank)
        return HaloPlan(rank, stats.counts, forward, backward, symmetric, reuse=row_stats(stats).reuse)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One direction on one rank: rows sent to and received from every rank, nonzeros of the own tile and of the others."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    own_nnz: int
    halo_nnz: int

    @property
    def num_sent(self) -> int:
        return sum(self.sent)

    @property
    def num_received(self) -> int:
        return sum(self.received)


def _exchange(nnz: npt.NDArray[np.int64], needed: npt.NDArray[np.int64], rank: int) -> Exchange:
    """Return one rank's direction from all tiles' statistics; entry (i, j) counts rows of rank j that rank i needs."""
    others = np.arange(nnz.shape[0]) != rank
    own = int(nnz[rank, rank])
    return Exchange(
        _numbers(needed[:, rank] * others), _numbers(needed[rank] * others), own, int(nnz[rank].sum()) - own
    )


def _numbers(row: npt.NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(row.tolist())


def _check(halo: Halo, exchange: Exchange, rank: int) -> None:
    """Raise PlanError unless the lists are as long as planned; otherwise ranks would disagree about their messages."""
    if (halo.sent, halo.received) != (exchange.sent, exchange.received):
        raise PlanError(
            f"rank {rank} was planned to send {exchange.sent} rows to the ranks and to receive {exchange.received}, its "
            f"part of the graph needs {halo.sent} and {halo.received}; plan this graph and partition again"
        )


@dataclass(frozen=True, slots=True)
class HaloPlan:
    """Slots and messages of the halo exchange for one rank; counts: rows of every rank."""

    rank: int
    counts: tuple[int, ...]
    forward: Exchange
    backward: Exchange
    symmetric: bool
    _: KW_ONLY
    reuse: Reuse = UNKNOWN
    exact = True
    period = 1
    by_columns = True

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self._matrices(self.forward)

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else self._matrices(self.backward)

    @property
    def index_bytes(self) -> int:
        return INDEX_BYTES * (self.forward.num_sent + (0 if self.symmetric else self.backward.num_sent))

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        if len(self.counts) == 1:
            return ()
        width = op.columns(cols).operand
        sent = max(self.forward.num_sent, self.backward.num_sent)
        received = max(self.forward.num_received, self.backward.num_received)
        return BufferSpec(f"{name}.sent", sent, width, dtype), BufferSpec(f"{name}.halo", received, width, dtype)

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        exchange, rows = self.backward if backward else self.forward, self.counts[self.rank]
        width = op.columns(cols)
        own = width.multiply(rows, rows, exchange.own_nnz, self.reuse.own)
        if len(self.counts) == 1:
            return (own,)
        row = BufferSpec("", 1, width.operand, dtype).nbytes
        return (
            Copy(exchange.num_sent, width.operand),
            Send("all_to_all", row * exchange.num_sent, row * exchange.num_received),
            own,
            Await(0),
            width.multiply(rows, exchange.num_received, exchange.halo_nnz, self.reuse.others),
        )

    def build(self, context: BuildContext) -> RankAggregations:
        owners, backend = row_owners(context.partition), context.backend
        halos = build_halos(context.graph, owners, context.rank, context.options, context.required)
        for halo, exchange in zip(halos, (self.forward, self.backward), strict=True):
            _check(halo, exchange, context.rank)
        forward = _upload(halos[0], backend)
        backward = forward if halos[1] is halos[0] else _upload(halos[1], backend)
        halo_exchange = HaloExchange(forward, backward, context.comm, backend)
        return RankAggregations(halo_exchange, halo_exchange)

    def _matrices(self, exchange: Exchange) -> tuple[Matrix, ...]:
        rows = self.counts[self.rank]
        own, halo = Matrix(rows, exchange.own_nnz), Matrix(rows, exchange.halo_nnz)
        return (own, halo) if len(self.counts) > 1 else (own,)


@dataclass(frozen=True, slots=True)
class Side:
    """One direction on the device: own (V, V), halo (V, K), None on a single rank; rows int32 (S,): those that are sent, in
    order of the receiver. sent, received: how many to and from each rank.
    """

    own: Sparse
    halo: Sparse | None
    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def aggregate(
        self,
        op: EdgeOp,
        dense: Tensor,
        target: Target,
        buffers: Sequence[Tensor],
        comm: Communicator,
        backend: KernelBackend,
    ) -> None:
        """Compute target.out: exchange rows, and multiply the own tile meanwhile. Collective. buffers: sent, halo."""
        if self.halo is None:
            single_tile(op, backend, self.own, dense, target)
            return
        width = dense.shape[1]
        sent, halo = buffers[0][: sum(self.sent)], buffers[1][: sum(self.received)]
        backend.gather_rows(dense, self.rows, sent[:, :width])
        arrival = comm.all_to_all(padded_rows(halo), padded_rows(sent), self.received, self.sent, backend.record())
        result = op.begin(backend, target)
        result.tile(self.own, dense, last=False)
        arrival.wait()
        result.tile(self.halo, halo[:, :width], last=True)
        result.end()


def _upload(halo: Halo, backend: KernelBackend) -> Side:
    tiles = (halo.own, halo.halo) if len(halo.sent) > 1 else (halo.own,)
    own, *others = (upload_tile(backend, tile) for tile in tiles)
    return Side(own, others[0] if others else None, backend.upload(halo.rows), halo.sent, halo.received)


@dataclass(frozen=True, eq=False)
class HaloExchange(Aggregation):
    """The strategy on one rank; a symmetric graph has one side for both directions."""

    exact = True
    side: Side
    side_t: Side
    comm: Communicator
    backend: KernelBackend

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self.side.aggregate(op, h, target, buffers, self.comm, self.backend)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self.side_t.aggregate(op, g, target, buffers, self.comm, self.backend)
