"""The planned memory of a batch's sparse features: rows of X as CSR, and their transposes. Needs no torch.

D features; R rows and M nonzeros of a row set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Capacity, RowSet, Stack
from mggcn.blocks.capacities import SPARE
from mggcn.graph.nonzeros import RowLengths


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseRowsPlan:
    """What the memory of a batch's sparse features depends on. real: the type of values, that of sums.

    sizes: the most rows and nonzeros of each row set that products read, whose rows are the first of the input's, with the
    input's first. dropped: whether steps write values of their own, for which places of entries are kept. scaled: whether
    S_c X is gathered instead of X.
    """

    sizes: tuple[tuple[RowSet, int, int], ...]
    cols: int
    real: str
    dropped: bool
    scaled: bool

    @property
    def nonzeros(self) -> int:
        """The most nonzeros of a batch."""
        return self.sizes[0][2]

    def arrays(self) -> Iterator[tuple[str, npt.DTypeLike, int]]:
        """Yield the name, type and length of every array; those of a transpose end with the number of its row set."""
        _, rows, nonzeros = self.sizes[0]
        yield "indptr", np.int64, rows + 1
        yield "indices", np.int32, nonzeros
        yield "values", self.real, nonzeros
        for number, (_, _, count) in enumerate(self.sizes):
            yield f"indptr_t{number}", np.int64, self.cols + 1
            yield f"indices_t{number}", np.int32, count
            yield f"values_t{number}", self.real, count
            if self.dropped:
                yield f"order{number}", np.int32, count

    @property
    def nbytes(self) -> int:
        """The bytes of a batch. Cost: none of memory."""
        return sum(np.dtype(dtype).itemsize * count for _, dtype, count in self.arrays())

    @property
    def dropped_bytes(self) -> int:
        """The bytes of the values that steps write in place of the features', which all batches share; 0 for none."""
        return np.dtype(self.real).itemsize * self.nonzeros * self.dropped

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and nonzeros of the matrices that products read, at most."""
        return tuple(size for _, rows, count in self.sizes for size in ((rows, count), (self.cols, count)))


def most_nonzeros(stack: Stack, lengths: RowLengths | None) -> tuple[int, ...]:
    """Return the nonzeros of as many of the longest rows as each row set has at most; () where rows are dense."""
    return () if lengths is None else tuple(lengths.most(rows) for rows in stack.rows.values())


def with_nonzeros(stack: Stack, most: Sequence[int], least: Sequence[Capacity], lengths: RowLengths) -> Stack:
    """Return the stack with the most nonzeros that each row set had, the seeds' first, and a share more, within bounds.

    least: of a single vertex, for which there is room, as for `with_extents`.
    """
    wanted = [math.ceil(count * (1 + SPARE)) for count in most]
    for place, rows in enumerate([least[0].targets, *(size.sources for size in least)] if least else []):
        wanted[place] = max(wanted[place], lengths.most(rows))
    return dataclasses.replace(stack, nonzeros=tuple(map(min, reversed(wanted), most_nonzeros(stack, lengths))))
