"""One forward pass over the rows of a CSR, or over the nonzeros of dense rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR, Rows
from mggcn.graph.nonzeros import nonzeros

EDGES = 1 << 21
"""Edges of one chunk: 8 MiB of column ids."""
ROWS = 1 << 19
"""Rows of one chunk: 4 MiB of row pointers."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, first + rows) of a CSR: indptr int64 (rows + 1,) starts at 0."""

    first: int
    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    values: npt.NDArray[Any] | None

    @property
    def rows(self) -> int:
        return int(self.indptr.shape[0]) - 1


def sweep(matrix: CSR, edges: int = EDGES, rows: int = ROWS, *, span: range | None = None) -> Iterator[Chunk]:
    """Yield the rows in order, at most `rows` rows and `edges` entries at a time; a longer row comes alone.

    span: consecutive rows that are swept, by default all.

    Cost: reads indptr, indices and values once. Raises: GraphError for a pointer or a column outside the matrix.
    """
    span = range(matrix.num_rows) if span is None else span
    for start in range(span.start, span.stop, rows):
        indptr = matrix.read_pointers(start, min(start + rows, span.stop) + 1)
        low, last = 0, indptr.shape[0] - 1
        while low < last:
            high = int(np.searchsorted(indptr, indptr[low] + edges, side="right")) - 1
            high = min(max(high, low + 1), last)
            a, b = int(indptr[low]), int(indptr[high])
            values = None if matrix.values is None else matrix.values.read(a, b)
            yield Chunk(start + low, indptr[low : high + 1] - a, matrix.read_columns(a, b), values)
            low = high


def sweep_nonzeros(matrix: Rows | CSR, edges: int = EDGES) -> Iterator[Chunk]:
    """Sweep over a matrix with at most `edges` entries at a time, or over dense rows with `edges` numbers at a time."""
    if isinstance(matrix, CSR):
        yield from sweep(matrix, edges)
        return
    rows, cols = matrix.shape
    step = max(1, edges // max(cols, 1))
    for start in range(0, rows, step):
        counts, indices, values = nonzeros(matrix.read(start, min(start + step, rows)))
        yield Chunk(start, np.append(0, np.cumsum(counts)), indices, values)
