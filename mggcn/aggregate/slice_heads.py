"""Slices by heads: every rank computes some heads of all vertices, and what they read and keep travels in one message.

Heads are dealt out one after the other as evenly as they divide; a rank beyond their number has none and still takes part.
A row of a message has the columns of a rank's heads of every tensor, each tensor's from a unit of 16 bytes on: there the
operand and what the op reads beside it, back the result and what the op keeps.

N vertices, V rows of this rank, U units of a row of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mggcn.aggregate.edge_op import EdgeOp, Share, Target, single_tile
from mggcn.aggregate.slice_columns import UNIT_BYTES
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Step
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.errors import PlanError
from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES, BufferSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mggcn.comm.base import Communicator

Row = tuple[tuple[range, ...], ...]
"""What a row of a message has: of each tensor its columns."""
NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeadSlices:
    """Which rank computes which heads. counts: rows of every rank; unit: elements of 16 bytes; shares: by rank."""

    rank: int
    counts: tuple[int, ...]
    unit: int
    shares: tuple[Share, ...]

    @staticmethod
    def of(op: EdgeOp, rank: int, counts: tuple[int, ...], item_bytes: int) -> HeadSlices:
        """Distribute the heads of an op over the ranks. Raises: PlanError if it has none."""
        if op.by_head is None:
            raise PlanError(
                f"run.strategy slice deals columns or heads to the ranks, and the edge operation {op.name} needs whole "
                "rows; choose broadcast, halo or delayed"
            )
        heads, ranks = op.by_head.heads, len(counts)
        dealt = min(heads, ranks)
        ends = [heads * k // dealt for k in range(dealt + 1)]
        shares = tuple(op.by_head.share(range(*pair)) for pair in pairwise(ends))
        return HeadSlices(rank, counts, UNIT_BYTES // item_bytes, shares)

    @property
    def mine(self) -> Share | None:
        """This rank's heads."""
        return self.shares[self.rank] if self.rank < len(self.shares) else None

    def units(self, rank: int, *, back: bool) -> int:
        """Return how many units a row has in a rank's message: 0 without heads."""
        return sum(map(self.units_of, row_of(self.shares[rank], back))) if rank < len(self.shares) else 0

    def units_of(self, columns: tuple[range, ...]) -> int:
        return -(-sum(map(len, columns)) // self.unit)

    def others(self, *, back: bool) -> int:
        """Return how many units a row has in the messages of all other ranks together."""
        return sum(self.units(rank, back=back) for rank in range(len(self.shares)) if rank != self.rank)

    def buffers(self, name: str, dtype: str) -> tuple[BufferSpec, ...]:
        """Return the two slots and, for an op that reads them, a buffer of all vertices' numbers."""
        rows, everyone, item = self.counts[self.rank], sum(self.counts), ITEM_BYTES[dtype]
        sizes = [
            UNIT_BYTES * max(rows * self.others(back=back), everyone * self.units(self.rank, back=not back))
            for back in (False, True)
        ]
        if self.shares[0].numbered:
            sizes.append(NUMBER_BYTES * everyone)
        lines = [-(-size // ALIGNMENT) for size in sizes]
        return tuple(BufferSpec(f"{name}.slice{k}", n, ALIGNMENT // item, dtype) for k, n in enumerate(lines, start=1))

    def steps(self, cols: int, nnz: int, reuse: tuple[float, ...]) -> tuple[Step, ...]:
        rows, everyone = self.counts[self.rank], sum(self.counts)
        there, back = ((self.others(back=b), self.units(self.rank, back=b)) for b in (False, True))
        away, here = (UNIT_BYTES * rows * there[0], UNIT_BYTES * (everyone - rows) * there[1])
        home, away_again = (UNIT_BYTES * rows * back[0], UNIT_BYTES * (everyone - rows) * back[1])
        product: tuple[Multiply, ...] = ()
        if self.mine is not None:
            product = (self.mine.op.columns(cols).multiply(everyone, everyone, nnz, reuse),)
        first = Copy(rows, self.unit * sum(there)), Send("all_to_all", away, here), Await(0)
        return (*first, *product, Send("all_to_all", away_again, home), Await(1), Copy(rows, self.unit * sum(back)))


def row_of(share: Share, back: bool) -> Row:
    return (share.result, *share.kept) if back else (share.operand, *share.local)


class HeadExchange:
    """One aggregation by heads on one rank. matrix (N, N): this rank's vertices first, then the other ranks'."""

    def __init__(
        self, slices: HeadSlices, comm: Communicator, backend: KernelBackend, buffers: Sequence[Tensor]
    ) -> None:
        self._slices, self._comm, self._backend = slices, comm, backend
        self._first, self._second = (slot.view(-1) for slot in buffers[:2])
        self._numbers = buffers[2:]

    def run(self, matrix: Sparse, operand: Tensor, target: Target) -> None:
        """Compute a result. Collective."""
        count = len(self._slices.shares[0].local)
        read, ids, kept = target.local[:count], target.local[count], target.local[count + 1 :]
        for columns, part in self._blocks(self._first, self._second, back=False):
            _copy(zip((operand, *read), columns, part, strict=True), pack=True)
        self._swap(back=False)
        if self._slices.mine is not None:
            self._multiply(self._slices.mine, matrix, ids)
        self._swap(back=True)
        for columns, part in self._blocks(self._second, self._first, back=True):
            _copy(zip((target.out, *kept), columns, part, strict=True), pack=False)
        if target.epilogue is not None:
            self._backend.finish(target.out, target.out, target.epilogue)

    def _multiply(self, share: Share, matrix: Sparse, ids: Tensor) -> None:
        everyone = sum(self._slices.counts)
        rows, *read = self._tensors(self._second, everyone, row_of(share, back=False))
        out, *kept = self._tensors(self._first, everyone, row_of(share, back=True))
        if share.numbered:
            import torch

            integers: dict[int, torch.dtype] = {4: torch.int32, 8: torch.int64}
            ids = self._numbers[0].view(-1).view(torch.int64)[:everyone]
            ids.copy_(rows[:, -1].view(integers[rows.itemsize]))
        single_tile(share.op, self._backend, matrix, rows, Target(out, None, (*read, ids, *kept)))

    def _swap(self, *, back: bool) -> None:
        """Send what others compute with of these rows, receive what this rank does of theirs, or the results back."""
        slices, rank = self._slices, self._slices.rank
        rows, mine = slices.counts[rank], slices.units(rank, back=back)
        theirs = [0 if j == rank else rows * slices.units(j, back=back) for j in range(len(slices.counts))]
        ours = [0 if j == rank else count * mine for j, count in enumerate(slices.counts)]
        own = rows * mine * slices.unit
        if back:
            source, target, sent, received = self._first[own:], self._second, ours, theirs
        else:
            source, target, sent, received = self._first, self._second[own:], theirs, ours
        buf, out = (
            slot[: sum(units) * slices.unit].view(-1, slices.unit)
            for slot, units in ((source, sent), (target, received))
        )
        self._comm.all_to_all(out, buf, received, sent, self._backend.record()).wait()

    def _blocks(self, others: Tensor, own: Tensor, *, back: bool) -> list[tuple[Row, list[Tensor]]]:
        """Return columns and messages of this rank's rows for every rank with heads."""
        slices, blocks, start = self._slices, [], 0
        rows = slices.counts[slices.rank]
        for rank, share in enumerate(slices.shares):
            mine, row = rank == slices.rank, row_of(share, back)
            blocks.append((row, self._tensors(own if mine else others[start:], rows, row)))
            start += 0 if mine else rows * slices.units(rank, back=back) * slices.unit
        return blocks

    def _tensors(self, slot: Tensor, rows: int, row: Row) -> list[Tensor]:
        """Return the parts of the tensors of a message at the start of a slot."""
        slices, first = self._slices, 0
        stride = slices.unit * sum(map(slices.units_of, row))
        message, found = slot[: rows * stride].view(rows, stride), []
        for columns in row:
            found.append(message[:, first : first + sum(map(len, columns))])
            first += slices.unit * slices.units_of(columns)
        return found


def _copy(parts: Iterable[tuple[Tensor, tuple[range, ...], Tensor]], *, pack: bool) -> None:
    """Copy columns of whole tensors to the parts of a message, or back."""
    for whole, columns, part in parts:
        first = 0
        for some in columns:
            there, here = whole[:, some.start : some.stop], part[:, first : first + len(some)]
            source, target = (there, here) if pack else (here, there)
            target.copy_(source)
            first += len(some)
