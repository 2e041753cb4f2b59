"""Nonzeros of features: whether those that come dense are few enough to be kept sparse, rows as a CSR, and lengths of rows.

N vertices, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from mggcn.graph.csr import CSR, WINDOW, Array, ArrayRows, Rows

SPARSE_SHARE = 0.2
"""Share of nonzeros below which a CSR takes less than half the bytes of dense rows and may be less work."""
SAMPLED_PLACES = 64
"""Evenly spaced places of a file at which a sample is read."""
SAMPLED_ROWS = 16
"""Rows read at each of them."""


def features_nnz(features: Rows | CSR, setting: Literal["auto", "dense", "sparse"] = "auto") -> int | None:
    """Return the nonzeros of features that may be kept sparse; None: they count as dense.

    setting: debug.features. "sparse" counts dense rows exactly; "auto" looks at a sample first, and counts the rest only
    where at most SPARSE_SHARE of it is not zero. "dense" looks at nothing unless the source is sparse.
    Cost: up to 1,024 rows; where these are sparse, one pass over N D numbers.
    """
    if isinstance(features, CSR):
        return features.nnz
    if setting == "dense" or (setting == "auto" and _sampled_share(features) > SPARSE_SHARE):
        return None
    nnz = sum(int(np.count_nonzero(block)) for _, block in _blocks(features))
    return None if setting == "auto" and nnz > SPARSE_SHARE * features.shape[0] * features.shape[1] else nnz


def csr_if_sparse(features: Rows) -> Rows | CSR:
    """Return dense rows with few nonzeros as a CSR in memory; other rows, or rows with NaN or infinity, unchanged.

    Cost: as `features_nnz`, and a second pass where they are sparse.
    """
    nnz = features_nnz(features)
    if nnz is None:
        return features
    found = as_csr(features, nnz)
    finite = found.values is None or np.isfinite(found.values.array()).all()
    return found if finite else features  # the check of dense features names the row


def as_csr(features: Rows, nnz: int) -> CSR:
    """Return dense rows with `nnz` nonzeros as a CSR in memory. Cost: one pass over N D numbers."""
    indptr = np.zeros(features.shape[0] + 1, np.int64)
    indices, values = np.empty(nnz, np.int32), np.empty(nnz, np.float32)
    first = 0
    for start, block in _blocks(features):
        counts, cols, entries = nonzeros(block)
        indptr[start + 1 : start + 1 + counts.size] = counts
        indices[first : first + cols.size], values[first : first + cols.size] = cols, entries
        first += cols.size
    return CSR(ArrayRows(np.cumsum(indptr)), ArrayRows(indices), ArrayRows(values), features.shape[1])


def nonzeros(block: Array) -> tuple[Array, Array, Array]:
    """Return the nonzeros of dense rows [R, D]: how many each row has [R], their columns int32 [nnz] and values [nnz]."""
    rows, cols = np.nonzero(block)
    return np.bincount(rows, minlength=block.shape[0]), cols.astype(np.int32), block[rows, cols]


class RowLengths:
    """How many nonzeros rows of sparse features have. Cost: a pass over the row pointers, of which D numbers are kept."""

    def __init__(self, features: CSR) -> None:
        self._indptr = features.indptr.array()
        self._counts = np.zeros(features.num_cols + 1, np.int64)
        for row in range(0, features.num_rows, WINDOW):
            lengths = np.diff(features.read_pointers(row, row + WINDOW + 1))
            # A longer row has a column twice: whatever reads it says so.
            self._counts += np.bincount(np.minimum(lengths, features.num_cols), minlength=self._counts.size)

    def most(self, rows: int) -> int:
        """Return the nonzeros of so many of the longest rows."""
        taken = np.minimum(np.cumsum(self._counts[::-1]), rows)
        return int(np.diff(taken, prepend=0) @ np.arange(self._counts.size)[::-1])

    def of(self, ids: Array, sizes: Sequence[int]) -> list[int]:
        """Return the nonzeros of the first rows of `ids`, as many as each of the sizes says."""
        ends = np.append(0, np.cumsum(self._indptr[ids + 1] - self._indptr[ids]))
        return [int(ends[size]) for size in sizes]


def _sampled_share(features: Rows) -> float:
    rows, cols = features.shape
    starts = np.unique(np.linspace(0, max(rows - SAMPLED_ROWS, 0), SAMPLED_PLACES).astype(np.int64))
    blocks = [features.read(int(start), min(int(start) + SAMPLED_ROWS, rows)) for start in starts]
    read = sum(block.shape[0] for block in blocks) * cols
    return float(sum(int(np.count_nonzero(block)) for block in blocks) / max(read, 1))


def _blocks(features: Rows) -> Iterator[tuple[int, Array]]:
    step = max(1, WINDOW // max(features.shape[1], 1))
    for start in range(0, features.shape[0], step):
        yield start, features.read(start, min(start + step, features.shape[0]))
