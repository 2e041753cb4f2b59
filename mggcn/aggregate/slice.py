"""Feature slices: every rank holds the whole matrix and multiplies it with some of the columns (GNN-RDM, IPDPS 2023).

Rows are redistributed into slices of columns, multiplied without any message, and redistributed back: two all-to-alls of
about V D values per rank, whatever the graph, with equal work on all ranks under any order of the vertices. Columns are
dealt in units of 16 bytes, one after the other; a rank beyond the number of units has none and still takes part.

N vertices, V rows of this rank, D width, w columns of this rank's slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, cast

from mggcn.aggregate.base import AggregationPlan, Built, Matrix, Site
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.config import RunConfig
from mggcn.errors import GraphError
from mggcn.partition.locality_estimate import Shares
from mggcn.partition.parts import Figures, row_figures, row_owners
from mggcn.partition.shard import row_tiles
from mggcn.partition.tiles import MAX_TILE_NNZ
from mggcn.partition.whole import rank_major
from mggcn.plan.memory import ALIGNMENT, ITEM_BYTES, BufferSpec
from mggcn.plan.steps import Await, Copy, Multiply, Send, Step

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator

UNIT_BYTES = 16
"""Columns are dealt in units of as many bytes, so that every row of every slice starts where a vector load may."""
COPY = Epilogue()


class SliceStrategy:
    """Feature slices over a partition of the rows."""

    name = "slice"
    kind: Literal["rows"] = "rows"

    def plan(self, run: RunConfig, figures: Figures, rank: int, symmetric: bool, training: bool) -> SlicePlan:
        rows = row_figures(figures)
        nnz, own = rows.num_entries, int(rows.tiles.nnz.trace())
        if nnz > MAX_TILE_NNZ:
            raise GraphError(
                f"run.strategy slice keeps the whole matrix on every rank, and its {nnz:,} nonzeros exceed the limit of "
                f"{MAX_TILE_NNZ:,}; choose halo or broadcast"
            )
        return SlicePlan(rank, figures.counts, nnz, symmetric, reuse=rows.reuse.together(own, nnz - own))

    def build(self, training: AggregationPlan, exact: AggregationPlan, site: Site) -> Built:
        plan = cast(SlicePlan, training)
        vertices = rank_major(row_owners(site.partition), plan.rank)
        tiles = row_tiles(site.graph, vertices, 0, site.options, site.wanted)
        (forward,), (backward,) = tiles
        matrix = site.backend.sparse(forward.indptr, forward.indices, forward.values)
        matrix_t = matrix
        if backward is not forward:
            matrix_t = site.backend.sparse(backward.indptr, backward.indices, backward.values)
        strategy = Slice(plan, matrix, matrix_t, site.comm, site.backend)
        return Built(strategy, strategy)


@dataclass(frozen=True, slots=True)
class Deal:
    """Which columns of a width each rank has: `units` of `unit` elements each, in order of the ranks; `cols` in all.

    The last unit may end behind the last column. A larger width gives no rank fewer units.
    """

    cols: int
    unit: int
    units: tuple[int, ...]

    @staticmethod
    def of(cols: int, ranks: int, item_bytes: int) -> Deal:
        """Deal the units of `cols` elements of `item_bytes` bytes."""
        unit = UNIT_BYTES // item_bytes
        number = -(-cols // unit)
        return Deal(cols, unit, tuple((number - rank + ranks - 1) // ranks for rank in range(ranks)))

    @staticmethod
    def part(cols: int, ranks: int, item_bytes: int, rank: int) -> tuple[int, int, int]:
        """Return the units in all, and the units and columns of one rank: in O(1), since P ranks of a plan ask for it."""
        unit = UNIT_BYTES // item_bytes
        number = -(-cols // unit)
        each, more = divmod(number, ranks)
        first, units = rank * each + min(rank, more), each + (rank < more)
        return number, units, min((first + units) * unit, cols) - min(first * unit, cols)

    def slices(self) -> tuple[slice, ...]:
        """Return the columns of every rank, empty for a rank without units."""
        ends = [min(end * self.unit, self.cols) for end in accumulate(self.units, initial=0)]
        return tuple(slice(first, end) for first, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Slots and messages of the feature slices for one rank; counts: rows of every rank; nnz: of the whole matrix."""

    rank: int
    counts: tuple[int, ...]
    nnz: int
    symmetric: bool
    exact: bool = True
    index_bytes: int = 0
    period: int = 1
    reuse: Shares = ()

    @property
    def num_vertices(self) -> int:
        return sum(self.counts)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix(self.num_vertices, self.nnz),)

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else self.matrices

    def buffers(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        if len(self.counts) == 1:
            return ()
        item = ITEM_BYTES[dtype]
        every, mine, _ = Deal.part(cols, len(self.counts), item, self.rank)
        units = max(self.counts[self.rank] * (every - mine), self.num_vertices * mine)
        lines = -(-units * UNIT_BYTES // ALIGNMENT)
        return tuple(BufferSpec(f"{op}.slice{k}", lines, ALIGNMENT // item, dtype) for k in (1, 2))

    def state(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return ()

    def steps(self, cols: int, dtype: str, backward: bool, turn: int = 0) -> tuple[Step, ...]:
        num_vertices, rows = self.num_vertices, self.counts[self.rank]
        if len(self.counts) == 1:
            return (Multiply(num_vertices, num_vertices, self.nnz, cols, self.reuse),)
        every, mine, width = Deal.part(cols, len(self.counts), ITEM_BYTES[dtype], self.rank)
        away = UNIT_BYTES * rows * (every - mine)
        here = UNIT_BYTES * (num_vertices - rows) * mine
        product = (Multiply(num_vertices, num_vertices, self.nnz, width, self.reuse),) if width else ()
        return (
            Copy(rows, cols),
            Send("all_to_all", away, here),
            Await(0),
            *product,
            Send("all_to_all", here, away),
            Await(1),
            Copy(rows, cols),
        )


class Slice:
    """The strategy on one rank; matrix, matrix_t (N, N): the whole of A^T and of A, this rank's vertices first.

    Two flat slots suffice, since what one holds is done with before it is needed again; what stays here is not sent:

        slot 1   the others' slices of these rows, sent    then   the product's slice, the others' rows sent back
        slot 2   this rank's slice of all rows             then   the others' slices of these rows
    """

    exact = True

    def __init__(
        self, plan: SlicePlan, matrix: Sparse, matrix_t: Sparse, comm: Communicator, backend: KernelBackend
    ) -> None:
        self._plan = plan
        self._matrix = matrix
        self._matrix_t = matrix_t
        self._comm = comm
        self._backend = backend

    def begin_epoch(self, epoch: int) -> None:
        return

    def forward(self, h: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None) -> None:
        self._aggregate(self._matrix, h, out, buffers, epilogue)

    def backward(
        self, g: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None
    ) -> None:
        self._aggregate(self._matrix_t, g, out, buffers, epilogue)

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        return

    def _aggregate(
        self, matrix: Sparse, dense: Tensor, out: Tensor, buffers: Sequence[Tensor], epilogue: Epilogue | None
    ) -> None:
        if not buffers:
            self._backend.spmm(matrix, dense, out, accumulate=False, epilogue=epilogue)
            return
        deal = Deal.of(dense.shape[1], len(self._plan.counts), dense.itemsize)
        first, second = (slot.view(-1) for slot in buffers)
        for part, columns in self._blocks(first, second, deal):
            self._backend.finish(dense[:, columns], part, COPY)
        self._swap(first, second, deal, back=False)
        columns = deal.slices()[self._plan.rank]
        if columns.stop > columns.start:
            everything, product = (
                _matrix(slot, self._plan.num_vertices, columns, deal, self._plan.rank) for slot in (second, first)
            )
            self._backend.spmm(matrix, everything, product, accumulate=False, epilogue=None)
        self._swap(first, second, deal, back=True)
        self._unpack(first, second, deal, out, epilogue)

    def _swap(self, first: Tensor, second: Tensor, deal: Deal, *, back: bool) -> None:
        """Send the others' slices of these rows, receive this rank's slice of theirs, or back; wait for it."""
        counts, me, mine = self._plan.counts, self._plan.rank, deal.units[self._plan.rank]
        slices = [0 if rank == me else counts[me] * units for rank, units in enumerate(deal.units)]
        rows = [0 if rank == me else count * mine for rank, count in enumerate(counts)]
        own = counts[me] * mine * deal.unit
        source, target = (first[own:], second) if back else (first, second[own:])
        sent, received = (rows, slices) if back else (slices, rows)
        out, buf = (
            target[: sum(received) * deal.unit].view(-1, deal.unit),
            source[: sum(sent) * deal.unit].view(-1, deal.unit),
        )
        self._comm.all_to_all(out, buf, received, sent, self._backend.record()).wait()

    def _unpack(self, first: Tensor, second: Tensor, deal: Deal, out: Tensor, epilogue: Epilogue | None) -> None:
        """Out = epilogue of the slices side by side. Masks of dropout are those of whole rows: they follow."""
        whole = epilogue is not None and epilogue.dropout is not None
        for part, columns in self._blocks(second, first, deal):
            piece = COPY
            if epilogue is not None and not whole:
                bias = epilogue.bias
                piece = dataclasses.replace(epilogue, bias=None if bias is None else bias[columns])
            self._backend.finish(part, out[:, columns], piece)
        if epilogue is not None and whole:
            self._backend.finish(out, out, epilogue)

    def _blocks(self, others: Tensor, own: Tensor, deal: Deal) -> list[tuple[Tensor, slice]]:
        """Return this rank's rows of every slice that has columns, and the columns: the others' in one slot, one after the
        other, its own at the start of the other slot.
        """
        rows, blocks, start = self._plan.counts[self._plan.rank], [], 0
        for rank, columns in enumerate(deal.slices()):
            mine = rank == self._plan.rank
            if columns.stop > columns.start:
                blocks.append((_matrix(own if mine else others[start:], rows, columns, deal, rank), columns))
            start += 0 if mine else rows * deal.units[rank] * deal.unit
        return blocks


def _matrix(slot: Tensor, rows: int, columns: slice, deal: Deal, rank: int) -> Tensor:
    """Return `rows` rows of a rank's slice at the start of a slot; they are padded to whole units."""
    stride = deal.units[rank] * deal.unit
    return slot[: rows * stride].view(rows, stride)[:, : columns.stop - columns.start]
