"""Masks of dropout: which of them, and how much is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def drop_threshold(probability: float) -> int:
    """Return the 16-bit word below which an activation is dropped; the highest word is always kept."""
    return min(round(65536 * probability), 65535)


def keep_scale(probability: float) -> float:
    """Return the factor of elements that dropout keeps: one over the exact probability of keeping one."""
    return 65536 / (65536 - drop_threshold(probability))


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout mask: Philox4x32-10 keyed by (seed, epoch), counted by column, original id and layer.

    clock: int64 (2,) on the device, seed and epoch: an epoch that the device replays reads their current values.
    first_column: of the matrix that the mask is of, where rows are columns of a wider one; a multiple of 8, on a CPU.
    """

    probability: float
    clock: Tensor
    layer: int
    first_column: int = 0

    @property
    def threshold(self) -> int:
        return drop_threshold(self.probability)

    @property
    def keep_scale(self) -> float:
        return keep_scale(self.probability)
