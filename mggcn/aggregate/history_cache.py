"""What a cache of other ranks' rows holds, and how its messages lie in memory; needs no torch.

P ranks, K vertices of a rank's halo. Source: Vasimuddin et al., DistGNN-MB, 2022, Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.base import padded_rows

if TYPE_CHECKING:
    from torch import Tensor

NUMBER_BYTES: Final = 4
Vector = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Message:
    """How rows of so many bytes lie in a message: for each rank the most that it may get, and behind them their numbers."""

    most: tuple[int, ...]
    row_bytes: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each rank's part; those behind the pushed ones hold their numbers, -1 behind the last."""
        return tuple(count + -(-NUMBER_BYTES * count // self.row_bytes) for count in self.most)

    @property
    def nbytes(self) -> int:
        return self.row_bytes * sum(self.rows)

    def parts(self, message: Tensor) -> list[tuple[Tensor, Vector]]:
        """Return each rank's rows of a message, and views of their numbers, int32."""
        import torch

        found, first = list[tuple["Tensor", Vector]](), 0
        memory = padded_rows(message).view(torch.uint8).numpy()
        for count, rows in zip(self.most, self.rows, strict=True):
            numbers = memory[first + count : first + rows].reshape(-1).view(np.int32)[:count]
            found.append((message[first : first + count], numbers))
            first += rows
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """What a rank keeps of other ranks' rows of a block, and what it sends them.

    received, sent: how many vertices of each rank it reads, and how many of its own each reads. most_lines: rows that it
    keeps at most; life: steps for which a row counts, -1: for ever; pushed: most rows to a rank in a step; delay: steps
    that a message takes. ends: whether messages stay within an epoch of `steps` steps, as in Algorithm 2: the first `delay`
    read nothing, the last ones send nothing. rest: whether what is left of a row counts as much as all of it.
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]
    most_lines: int
    life: int
    pushed: int
    delay: int
    ends: bool
    rest: bool
    steps: int

    @property
    def halo(self) -> int:
        """K, the vertices of other ranks that the rank's rows read."""
        return sum(self.received)

    @property
    def lines(self) -> int:
        """Lines of the cache: never more than rows that it could hold."""
        return min(self.most_lines, self.halo)

    @property
    def slots(self) -> int:
        """Messages that are on their way at a time."""
        return max(self.delay, 1)

    def messages(self, row_bytes: int) -> tuple[Message, Message]:
        """Return the layout of what is sent in a step, and of what is received."""
        sent, received = (tuple(min(self.pushed, count) for count in of) for of in (self.sent, self.received))
        return Message(sent, row_bytes), Message(received, row_bytes)

    def pushes(self, step: int) -> bool:
        """Whether a step sends rows."""
        return not self.ends or step % self.steps < self.steps - self.delay

    def reads(self, step: int) -> bool:
        """Whether a step reads the cache."""
        return not self.ends or step % self.steps >= self.delay
