"""The arrays of a batch on a device, each as long as the most that a step may have: sizes and addresses never change.

T targets, S sources, E edges of a block. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from mggcn.blocks.block import Stack

ALIGNMENT = 256
"""Bytes at whose multiples arrays begin: a sector of a GPU's memory and more."""

DRAWN: Final = ("ids", "indptr", "indices", "values")
"""With what names of arrays begin that are written where they lie, by whoever draws a batch."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies among the bytes of a batch."""

    offset: int
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * self.count

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout:
    """What the bytes of a batch on a device depend on.

    transposed: blocks, from the seeds on, whose out-edges are kept too. real: type of scales and of what edges count;
    valued: whether edges count other than one. row_scaled, col_scaled: whether the model has S_r, S_c. inputs: what is
    gathered for the rows of the input, features, sums of them or both; feature_bytes: of a padded row of one. labels: type,
    and columns, of the target of a seed.
    """

    stack: Stack
    transposed: int
    real: str
    valued: bool
    row_scaled: bool
    col_scaled: bool
    inputs: tuple[str, ...]
    feature_bytes: int
    labels: tuple[str, int]

    def is_transposed(self, number: int) -> bool:
        """Return whether the out-edges of a block, that of the input first, are kept."""
        return len(self.stack.blocks) - number <= self.transposed

    def _arrays(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name, type and length of every array; those of a row set or a block end with its number."""
        rows, seeds = tuple(self.stack.rows.values()), self.stack.capacities[-1].targets
        dtype, columns = self.labels
        yield "ids", "int64", rows[0]
        yield from (("labels", dtype, seeds * columns), ("mask", "uint8", seeds), ("scale", "float64", 1))
        for number, count in enumerate(rows):
            yield f"counted{number}", "uint8", count
            if self.row_scaled:
                yield f"row_scale{number}", self.real, count
            if self.col_scaled:
                yield f"col_scale{number}", self.real, count
        for number, size in enumerate(self.stack.capacities):
            for t, count in (("", size.targets), ("_t", size.sources))[: 1 + self.is_transposed(number)]:
                yield f"indptr{t}{number}", "int64", count + 1
                yield f"indices{t}{number}", "int32", size.edges
                if self.valued:
                    yield f"values{t}{number}", self.real, size.edges
        # Last, so that what is sent of a batch ends with the rows that it has.
        for name in self.inputs:
            yield name, "uint8", rows[0] * self.feature_bytes

    def places(self) -> Mapping[str, Place]:
        """Return where every array lies."""
        found, start = dict[str, Place](), 0
        for name, dtype, count in self._arrays():
            found[name] = place = Place(start, dtype, count)
            start = math.ceil(place.end / ALIGNMENT) * ALIGNMENT
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of a batch."""
        return max(place.end for place in self.places().values())
