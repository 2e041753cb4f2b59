"""One pass over a CSR in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, ArrayRows
from mggcn.partition.locality.chunks import row_chunks
from mggcn.partition.sweep import sweep
from tests.graphs import csr


@pytest.mark.parametrize(("edges", "rows"), [(1, 1), (7, 3), (50, 100), (10**6, 4), (10**6, 10**6)])
@pytest.mark.parametrize("weighted", [False, True])
def test_chunks_cover_the_matrix(edges: int, rows: int, weighted: bool) -> None:
    """Fails if a row is left out, cut or read twice, a hub row longer than the budget is lost, or a budget is ignored."""
    rng = np.random.default_rng(12)
    dense = (rng.random((41, 60)) < 0.1) * rng.random((41, 60))
    dense[20] = 1.0
    dense[25:30] = 0
    dense[0] = dense[40] = 0
    matrix = csr(dense.astype(np.float32), weighted)
    next_row, parts = 0, []
    for chunk in sweep(matrix, edges=edges, rows=rows):
        assert chunk.first == next_row
        assert chunk.indptr[0] == 0
        assert chunk.rows <= rows
        assert chunk.rows == 1 or chunk.indptr[-1] <= edges
        next_row += chunk.rows
        data = np.ones(chunk.indices.size) if chunk.values is None else chunk.values
        parts.append(sp.csr_matrix((data, chunk.indices, chunk.indptr), (chunk.rows, 60)))
    assert next_row == 41
    expected = dense.astype(np.float32) if weighted else dense != 0
    assert np.array_equal(sp.vstack(parts).toarray(), expected)


def test_empty_matrices() -> None:
    """Fails if a matrix without rows or without entries makes an endless loop or a chunk too many."""
    assert list(sweep(csr(np.zeros((0, 5))))) == []
    chunks = list(sweep(csr(np.zeros((9, 5))), rows=4))
    assert [(c.first, c.rows, c.indices.size) for c in chunks] == [(0, 4, 0), (4, 4, 0), (8, 1, 0)]


DAMAGE = [("indices", 5, -1, "column ids"), ("indices", 7, 2**30, "column ids"), ("indptr", 3, -1, "row pointers")]
DAMAGE += [("indptr", 40, 2**40, "row pointers"), ("indptr", 4, 10**6, "row pointers")]
READERS: dict[str, Callable[[CSR], object]] = {
    "sweep": lambda matrix: list(sweep(matrix, edges=9, rows=7)),
    "row_chunks": lambda matrix: list(row_chunks((matrix,), 1)),
}


@pytest.mark.parametrize(("array", "place", "value", "what"), DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_outside_the_matrix_reaches_a_kernel(
    reader: str, array: str, place: int, value: int, what: str
) -> None:
    """Fails if a damaged pointer or column is handed on, which kernels follow without a look."""
    matrix = csr((np.random.default_rng(3).random((40, 40)) < 0.2).astype(np.float32))
    damaged = {name: getattr(matrix, name).array().copy() for name in ("indptr", "indices")}
    damaged[array][place] = value
    with pytest.raises(GraphError, match=what):
        READERS[reader](CSR(ArrayRows(damaged["indptr"]), ArrayRows(damaged["indices"]), None, 40))
