"""The steps of one aggregation on one rank, with what determines their cost; needs no torch.

A strategy lists its steps in the order in which it makes them. The plan counts products, messages and bytes from the
list, and the cost model runs it on a described machine. V rows of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Multiply:
    """One tile of an edge operation: `nnz` rows of an operand of `columns` rows are read and added to `rows` rows."""

    rows: int
    columns: int
    nnz: int
    width: int
    reuse: tuple[float, ...] = ()
    """Locality of the reads: their shares by distance since the row's last use, in the classes of BOUNDS in
    partition/locality/reuse.py; (): at random."""
    _: KW_ONLY
    result: int = 0
    """Columns of the rows that are added to; 0: `width`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`rows` rows are gathered, scattered or packed: each read once and written once."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Send:
    """A message starts after the steps before it; all ranks list the same messages in the same order.

    sent, received: bytes that leave this rank and that come to it. root: the sender of a broadcast.
    """

    kind: Literal["broadcast", "all_to_all"]
    sent: int
    received: int
    root: int = -1


@dataclass(frozen=True, slots=True)
class Await:
    """The rank waits for the list's message number `message`, from 0.

    All ranks wait for the same messages, between the same Sends of their lists.
    """

    message: int


AHEAD: Final = 2
"""Blocks of a staged broadcast that are under way at a time."""


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a broadcast over P ranks as one step; `plain` lists them, P^2 steps over all ranks.

    In stage j the block of rank j is awaited and multiplied, except this rank's own, which was multiplied before; then
    block j + AHEAD starts. The first blocks have started already. The last stage ends with the arrival of its block.
    counts: rows of every rank; nnz: of this rank's tiles; row_bytes: of a row of the blocks; result: as Multiply's.
    """

    rank: int
    counts: tuple[int, ...]
    nnz: tuple[int, ...]
    width: int
    row_bytes: int
    _: KW_ONLY
    reuse: tuple[float, ...] = ()
    result: int = 0

    @property
    def size(self) -> int:
        return len(self.counts)

    def product(self, stage: int) -> Multiply:
        """Return the product with the tile of a stage."""
        rows, columns, nnz = self.counts[self.rank], self.counts[stage], self.nnz[stage]
        return Multiply(rows, columns, nnz, self.width, self.reuse, result=self.result)

    def send(self, root: int) -> Send:
        """Return the broadcast of a rank's block."""
        nbytes = self.counts[root] * self.row_bytes
        mine = root == self.rank
        return Send("broadcast", nbytes * (self.size - 1) if mine else 0, 0 if mine else nbytes, root)

    def plain(self) -> Iterator[Multiply | Send | Await]:
        """Yield the steps of all stages one by one."""
        for stage in range(self.size - 1):
            yield Await(stage)
            if stage != self.rank:
                yield self.product(stage)
            if stage + AHEAD < self.size:
                yield self.send(stage + AHEAD)
        yield Await(self.size - 1)


Step = Multiply | Copy | Send | Await | Stages


def num_products(steps: Sequence[Step]) -> int:
    """Return the sparse products among the steps."""
    # Stages multiplies a tile in every stage but the last and the rank's own, which may be the same stage.
    stages = (step.size - 1 - (step.rank < step.size - 1) for step in steps if isinstance(step, Stages))
    return sum(isinstance(step, Multiply) for step in steps) + sum(stages)


def num_messages(steps: Sequence[Step]) -> int:
    """Return the messages among the steps."""
    stages = (max(step.size - AHEAD, 0) for step in steps if isinstance(step, Stages))
    return sum(isinstance(step, Send) for step in steps) + sum(stages)


def bytes_sent(steps: Sequence[Step]) -> int:
    """Return the bytes that leave this rank."""
    stages = (step.send(step.rank).sent for step in steps if isinstance(step, Stages) and step.rank >= AHEAD)
    return sum(step.sent for step in steps if isinstance(step, Send)) + sum(stages)
