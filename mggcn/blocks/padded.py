"""The arrays of a batch on a device, each as long as the most that a step may have: sizes and addresses never change.

T targets, S sources, E edges of a block; M pairs of links that a step scores. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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


def placed(arrays: Iterable[tuple[str, str, int]]) -> dict[str, Place]:
    """Return where arrays lie, by name: each has a name, a type and a length."""
    found, start = dict[str, Place](), 0
    for name, dtype, count in arrays:
        found[name] = place = Place(start, dtype, count)
        start = math.ceil(place.end / ALIGNMENT) * ALIGNMENT
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRoom:
    """What the bytes of a step's pairs on a device depend on, where links are predicted (model/runtime.py: PairRows).

    pairs: the most of a step; rows: of the set that they are of; real: type of their labels; dot: whether scores are dot
    products, whose matrix names the rows at the other ends, and else the ends.
    """

    pairs: int
    rows: int
    real: str
    dot: bool

    def arrays(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name, type and length of every array: the target's have the names of those of seeds."""
        yield from (("labels", self.real, self.pairs), ("mask", "uint8", self.pairs), ("scale", "float64", 1))
        yield from ((name, "int32", self.pairs) for name in ("heads", "tails"))
        yield "pair_indptr", "int64", self.rows + 1
        yield from ((name, "int32", 2 * self.pairs) for name in ("pair_indices", "pair_of"))

    @property
    def nbytes(self) -> int:
        """The bytes of these arrays by themselves."""
        return max(place.end for place in placed(self.arrays()).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout:
    """What the bytes of a batch on a device depend on.

    transposed: blocks, from the seeds on, whose out-edges are kept too. real: type of scales and of what edges count;
    valued: whether edges count other than one. row_scaled, col_scaled: whether the model has S_r, S_c. inputs: what is
    gathered for the rows of the input, features, sums of them or both; feature_bytes: of a padded row of one. labels: type,
    and columns, of the target of a seed. pairs: of the seeds, which then have the target; None: no links are predicted.
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
    pairs: PairRoom | None = None

    def is_transposed(self, number: int) -> bool:
        """Return whether the out-edges of a block, that of the input first, are kept."""
        return len(self.stack.blocks) - number <= self.transposed

    def _arrays(self) -> Iterator[tuple[str, str, int]]:
        """Yield the name, type and length of every array; those of a row set or a block end with its number."""
        rows, seeds = tuple(self.stack.rows.values()), self.stack.capacities[-1].targets
        dtype, columns = self.labels
        yield "ids", "int64", rows[0]
        of_seeds = (("labels", dtype, seeds * columns), ("mask", "uint8", seeds), ("scale", "float64", 1))
        yield from of_seeds if self.pairs is None else self.pairs.arrays()
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
        return placed(self._arrays())

    @property
    def nbytes(self) -> int:
        """The bytes of a batch."""
        return max(place.end for place in self.places().values())
