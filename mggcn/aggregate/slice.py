"""Feature slices: every rank holds the whole matrix and multiplies it with some of the columns (GNN-RDM, IPDPS 2023).

Rows are redistributed into slices of columns, multiplied without any message, and redistributed back: two all-to-alls of
about V D values per rank, whatever the graph, with equal work on all ranks under any order of the vertices. Columns are
dealt in units of 16 bytes, one after the other; a rank beyond the number of units has none and still takes part. Of
attention whole heads are dealt (slice_heads.py).

On GPUs wide rows are sent in two halves: the second is on the wire while the first is multiplied, and the product of the
first returns while the second is multiplied.

N vertices, V rows of this rank, D width of a piece (all columns, or a half of them), w columns of this rank's slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target, single_tile
from mggcn.aggregate.relations import upload_tile
from mggcn.aggregate.slice_columns import UNIT_BYTES, ColumnPartition, Part, parts
from mggcn.aggregate.slice_heads import HeadExchange, HeadSlices
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Step
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.config import RunConfig
from mggcn.errors import GraphError
from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES, BufferSpec
from mggcn.memory.device import DEVICES
from mggcn.partition.base import PartitionStats
from mggcn.partition.locality.reuse import Shares
from mggcn.partition.order import concatenated_by_rank
from mggcn.partition.rows.partition import row_owners, row_stats
from mggcn.partition.rows.shard import row_tiles
from mggcn.partition.rows.tiles import MAX_TILE_NNZ

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.events import Event
    from mggcn.comm.base import Communicator

COPY = Epilogue()


class SliceStrategy:
    """Feature slices over a partition of the rows."""

    name = "slice"
    kind: Literal["rows"] = "rows"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> SlicePlan:
        rows = row_stats(stats)
        nnz, own = rows.num_entries, int(rows.tiles.nnz.trace())
        if nnz > MAX_TILE_NNZ:
            raise GraphError(
                f"run.strategy slice keeps the whole matrix on every rank, and its {nnz:,} nonzeros exceed the limit of "
                f"{MAX_TILE_NNZ:,}; choose halo or broadcast"
            )
        reuse = rows.reuse.together(own, nnz - own)
        # On a CPU the cores that multiply move the messages, too: nothing would overlap.
        return SlicePlan(rank, stats.counts, nnz, symmetric, reuse=reuse, overlaps=not DEVICES[run.device].is_host)


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Slots and messages of the feature slices for one rank; counts: rows of every rank; nnz: of the whole matrix.

    overlaps: whether messages overlap products, so that sending halves pays off.
    """

    rank: int
    counts: tuple[int, ...]
    nnz: int
    symmetric: bool
    _: KW_ONLY
    reuse: Shares = ()
    overlaps: bool = False
    exact = True
    index_bytes = 0
    period = 1
    by_columns = False  # kernels sum the last columns of a row in another order, and each rank has others of a panel

    @property
    def num_vertices(self) -> int:
        return sum(self.counts)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix(self.num_vertices, self.nnz),)

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else self.matrices

    def parts(self, cols: int, item_bytes: int) -> tuple[Part, ...]:
        """Return this rank's part of every piece; each piece is a message of its own."""
        return parts(cols, len(self.counts), item_bytes, self.rank, halved=self.overlaps)

    def slot_units(self, part: Part) -> int:
        """Return the units that a piece takes of each slot. All pieces of a larger width take at least as many."""
        return max(self.counts[self.rank] * (part.every - part.units), self.num_vertices * part.units)

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        if len(self.counts) == 1:
            return ()
        item = ITEM_BYTES[dtype]
        if not op.columnwise:
            return self.heads(op, item).buffers(name, dtype)
        units = sum(map(self.slot_units, self.parts(cols, item)))
        lines = -(-units * UNIT_BYTES // ALIGNMENT)
        return tuple(BufferSpec(f"{name}.slice{k}", lines, ALIGNMENT // item, dtype) for k in (1, 2))

    def heads(self, op: EdgeOp, item_bytes: int) -> HeadSlices:
        """Return which rank computes which heads of an op."""
        return HeadSlices.of(op, self.rank, self.counts, item_bytes)

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        num_vertices, rows = self.num_vertices, self.counts[self.rank]

        def tile(width: int) -> Multiply:
            return op.columns(width).multiply(num_vertices, num_vertices, self.nnz, self.reuse)

        if len(self.counts) == 1:
            return (tile(cols),)
        if not op.columnwise:
            return self.heads(op, ITEM_BYTES[dtype]).steps(cols, self.nnz, self.reuse)
        packed: list[Step] = []
        multiplied: list[Step] = []
        unpacked: list[Step] = []
        pieces = self.parts(cols, ITEM_BYTES[dtype])
        for number, part in enumerate(pieces):
            away = UNIT_BYTES * rows * (part.every - part.units)
            here = UNIT_BYTES * (num_vertices - rows) * part.units
            product = (tile(part.width),) if part.width else ()
            packed += (Copy(rows, part.cols), Send("all_to_all", away, here))
            multiplied += (Await(number), *product, Send("all_to_all", here, away))
            unpacked += (Await(len(pieces) + number), Copy(rows, part.cols))
        return (*packed, *multiplied, *unpacked)

    def build(self, context: BuildContext) -> RankAggregations:
        # This rank's vertices first, then the other ranks': one tile with all rows and all columns.
        vertices, backend = concatenated_by_rank(row_owners(context.partition), self.rank), context.backend
        (forward,), (backward,) = row_tiles(context.graph, vertices, 0, context.options, context.required)
        matrix = upload_tile(backend, forward)
        matrix_t = matrix
        if backward is not forward:
            matrix_t = upload_tile(backend, backward)
        slices = Slice(self, matrix, matrix_t, context.comm, backend)
        return RankAggregations(slices, slices)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Columns that are sent together, and their part of both slots, flat."""

    deal: ColumnPartition
    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class Slice(Aggregation):
    """The strategy on one rank; matrix, matrix_t (N, N): the whole of A^T and of A, this rank's vertices first.

    Two flat slots suffice, since each is read before it is written again; a rank sends nothing to itself:

        slot 1   the others' slices of these rows, sent    then   the product's slice, the others' rows sent back
        slot 2   this rank's slice of all rows             then   the others' slices of these rows

    Each half has its part of both slots. The rank's stream in order, each message beside the lines that it may overlap:

        pack 1
        pack 2        1 out
        multiply 1    2 out
        multiply 2    1 back
        unpack 1      2 back
        unpack 2
    """

    exact = True
    plan: SlicePlan
    matrix: Sparse
    matrix_t: Sparse
    comm: Communicator
    backend: KernelBackend

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._aggregate(op, self.matrix, h, target, buffers)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._aggregate(op, self.matrix_t, g, target, buffers)

    def _aggregate(self, op: EdgeOp, matrix: Sparse, dense: Tensor, target: Target, buffers: Sequence[Tensor]) -> None:
        if not buffers:
            single_tile(op, self.backend, matrix, dense, target)
            return
        if not op.columnwise:
            heads = self.plan.heads(op, dense.itemsize)
            HeadExchange(heads, self.comm, self.backend, buffers).run(matrix, dense, target)
            return
        out, epilogue = target.out, target.epilogue
        pieces = self._pieces(dense, buffers)
        sent = [self._pack(piece, dense) for piece in pieces]
        returned = [self._multiply(op, matrix, piece, arrival) for piece, arrival in zip(pieces, sent, strict=True)]
        # Dropout masks are defined for whole rows, so dropout follows later.
        whole = epilogue is not None and epilogue.dropout is not None
        for piece, arrival in zip(pieces, returned, strict=True):
            arrival.wait()
            self._unpack(piece, out, COPY if epilogue is None or whole else epilogue)
        if epilogue is not None and whole:
            self.backend.finish(out, out, epilogue)

    def _pieces(self, dense: Tensor, buffers: Sequence[Tensor]) -> list[_Piece]:
        """Return the pieces of an operand, with the slots divided as in the plan."""
        plan, item, pieces, start = self.plan, dense.itemsize, [], 0
        deal = ColumnPartition.of(dense.shape[1], len(plan.counts), item)
        deals = deal.halves() if plan.overlaps else (deal,)
        for piece, part in zip(deals, plan.parts(dense.shape[1], item), strict=True):
            end = start + plan.slot_units(part) * deal.unit
            first, second = (slot.view(-1)[start:end] for slot in buffers)
            pieces.append(_Piece(piece, first, second))
            start = end
        return pieces

    def _pack(self, piece: _Piece, dense: Tensor) -> Event:
        """Pack a piece's slices of these rows one after the other, and send each rank its slice."""
        for part, columns in self._blocks(piece.first, piece.second, piece.deal):
            self.backend.finish(dense[:, columns], part, COPY)
        return self._swap(piece, back=False)

    def _multiply(self, op: EdgeOp, matrix: Sparse, piece: _Piece, arrival: Event) -> Event:
        """Multiply this rank's slice of a piece, once it has arrived, and send the others their rows."""
        arrival.wait()
        columns = piece.deal.columns[self.plan.rank]
        if columns.stop > columns.start:
            everything, product = (
                _matrix(slot, self.plan.num_vertices, columns, piece.deal, self.plan.rank)
                for slot in (piece.second, piece.first)
            )
            # Slices of a columnwise op are results of their own; the epilogue follows where rows are whole again.
            single_tile(op, self.backend, matrix, everything, Target(product))
        return self._swap(piece, back=True)

    def _swap(self, piece: _Piece, *, back: bool) -> Event:
        """Send the others' slices of these rows, receive this rank's slice of theirs, or back."""
        counts, me, deal = self.plan.counts, self.plan.rank, piece.deal
        mine = deal.units[me]
        slices = [0 if rank == me else counts[me] * units for rank, units in enumerate(deal.units)]
        rows = [0 if rank == me else count * mine for rank, count in enumerate(counts)]
        own = counts[me] * mine * deal.unit
        source, target = (piece.first[own:], piece.second) if back else (piece.first, piece.second[own:])
        sent, received = (rows, slices) if back else (slices, rows)
        out, buf = (
            target[: sum(received) * deal.unit].view(-1, deal.unit),
            source[: sum(sent) * deal.unit].view(-1, deal.unit),
        )
        return self.comm.all_to_all(out, buf, received, sent, self.backend.record())

    def _unpack(self, piece: _Piece, out: Tensor, epilogue: Epilogue) -> None:
        """Out = epilogue of a piece's slices, each in its columns."""
        for part, columns in self._blocks(piece.second, piece.first, piece.deal):
            bias = epilogue.bias
            of_columns = dataclasses.replace(epilogue, bias=None if bias is None else bias[columns])
            self.backend.finish(part, out[:, columns], of_columns)

    def _blocks(self, others: Tensor, own: Tensor, deal: ColumnPartition) -> list[tuple[Tensor, slice]]:
        """Return this rank's rows of every non-empty slice, with its columns: the other ranks' slices one after
        another in the slot `others`, its own at the start of the slot `own`.
        """
        rows, blocks, start = self.plan.counts[self.plan.rank], [], 0
        for rank, columns in enumerate(deal.columns):
            mine = rank == self.plan.rank
            if columns.stop > columns.start:
                blocks.append((_matrix(own if mine else others[start:], rows, columns, deal, rank), columns))
            start += 0 if mine else rows * deal.units[rank] * deal.unit
        return blocks


def _matrix(slot: Tensor, rows: int, columns: slice, deal: ColumnPartition, rank: int) -> Tensor:
    """Return `rows` rows of a rank's slice at the start of a slot; they are padded to whole units."""
    stride = deal.units[rank] * deal.unit
    return slot[: rows * stride].view(rows, stride)[:, : columns.stop - columns.start]
