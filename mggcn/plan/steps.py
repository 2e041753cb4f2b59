"""What one aggregation does on one rank, step by step, as far as its cost goes; needs no torch.

A strategy lists its steps in the order in which it makes them. The plan counts products, messages and bytes from the
list, and the cost model runs it on a described machine. V rows of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Multiply:
    """One sparse product: `nnz` rows of a dense operand of `columns` rows are read and added up to `rows` rows."""

    rows: int
    columns: int
    nnz: int
    width: int
    reuse: tuple[float, ...] = ()
    """How local the reads are: their shares by the distance of the row's last use, partition/locality_estimate.py's
    BOUNDS; (): at random."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`rows` rows are gathered, scattered or packed: each read once and written once."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Send:
    """A message starts, behind the steps before it; all ranks list the same messages in the same order.

    sent, received: bytes that leave this rank and that come to it. root: the sender of a broadcast.
    """

    kind: Literal["broadcast", "all_to_all"]
    sent: int
    received: int
    root: int = -1


@dataclass(frozen=True, slots=True)
class Await:
    """The rank waits for the list's message number `message`, from 0."""

    message: int


Step = Multiply | Copy | Send | Await


def num_products(steps: Sequence[Step]) -> int:
    """Return the sparse products among the steps."""
    return sum(isinstance(step, Multiply) for step in steps)


def num_messages(steps: Sequence[Step]) -> int:
    """Return the messages among the steps."""
    return sum(isinstance(step, Send) for step in steps)


def bytes_sent(steps: Sequence[Step]) -> int:
    """Return the bytes that leave this rank."""
    return sum(step.sent for step in steps if isinstance(step, Send))
