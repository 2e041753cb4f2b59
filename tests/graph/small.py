"""Small graphs and shorthands that the tests of this room share."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, Array, ArrayRows, Graph
from mggcn.graph.edges import of_matrix

TRIANGLE_AND_TAIL = np.array([[0, 1, 1, 2, 2, 0, 2, 3], [1, 0, 2, 1, 0, 2, 3, 2]])
"""Symmetric: a triangle 0-1-2, vertex 3 hanging on 2; vertex 4 has no edges."""


def small_graph(**changes: Any) -> Graph:
    """Five vertices with everything a graph can have."""
    arrays: dict[str, Any] = {
        "edges": TRIANGLE_AND_TAIL,
        "num_vertices": 5,
        "features": np.arange(10, dtype=np.float32).reshape(5, 2),
        "labels": np.array([0, 1, 2, 0, -1]),
        "splits": {"train": [0, 1], "val": [2], "test": [3]},
        "name": "small",
    }
    return from_arrays(**(arrays | changes))


def csr(indptr: Any, indices: Any, num_cols: int, values: Any = None) -> CSR:
    """Make a CSR in memory without any check."""
    data = None if values is None else ArrayRows(np.asarray(values, np.float32))
    return CSR(ArrayRows(np.asarray(indptr, np.int64)), ArrayRows(np.asarray(indices, np.int32)), data, num_cols)


def dense(matrix: CSR) -> Array:
    """Expand a CSR to a dense float32 array."""
    values = np.ones(matrix.nnz, np.float32) if matrix.values is None else matrix.values.array()
    shape = (matrix.num_rows, matrix.num_cols)
    array: Array = sp.csr_array((values, matrix.indices.array(), matrix.indptr.array()), shape=shape).toarray()
    return array


def edge_list(matrix: CSR) -> tuple[Array, Array | None]:
    """Return edges int64 [2, E] in row order and weights [E] or None."""
    edges = of_matrix(matrix).block(0, matrix.nnz)
    return np.stack([edges.src, edges.dst]), None if matrix.values is None else matrix.values.array()
