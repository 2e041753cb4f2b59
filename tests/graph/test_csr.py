from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import (
    CSR,
    WINDOW,
    ArrayRows,
    check_csr,
    check_finite,
    probably_symmetric,
    probably_transposed,
    windows,
)
from tests.graph.small import csr

BROKEN = {
    "starts at one": (csr([1, 2], [0, 0], 2), "start at 0"),
    "decreases": (csr([0, 2, 1, 3], [0, 1, 0], 3), "must not decrease, it does at row 1"),
    "ends early": (csr([0, 1], [0, 1], 2), "ends at 1 but there are 2"),
    "ends late": (csr([0, 3], [0, 1], 2), "ends at 3 but there are 2"),
    "no offsets": (csr([], [], 2), "indptr = \\[0\\]"),
    "column too large": (csr([0, 1], [2], 2), "row 0 holds column 2, expected 0 <= column < 2"),
    "negative column": (csr([0, 0, 1], [-1], 2), "row 1 holds column -1"),
    "wrapping": (csr([0, 2**62, -(2**62) - 2, 2], [0, 1], 3), "must not decrease, it does at row 1"),
    "descending": (csr([0, 0, 2], [1, 0], 2), "columns of row 1 are not strictly ascending"),
    "repeated": (csr([0, 2], [1, 1], 2), "not strictly ascending"),
    "NaN": (csr([0, 1], [0], 1, [np.nan]), "finite"),
    "too few values": (csr([0, 2], [0, 1], 2, [1.0]), "one value per index"),
    "wide indptr": (CSR(ArrayRows(np.zeros(2, np.int32)), ArrayRows(np.zeros(0, np.int32)), None, 1), "int64"),
    "wide indices": (CSR(ArrayRows(np.zeros(2, np.int64)), ArrayRows(np.zeros(0, np.int64)), None, 1), "int32"),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_check_csr_refuses(case: str) -> None:
    matrix, message = BROKEN[case]
    with pytest.raises(GraphError, match=message):
        check_csr(matrix, "adjacency")


@pytest.mark.parametrize("pointers", [[0, 2, 1, 2], [-1, 0, 1, 2], [0, 1, 2, 3], [0, 2**62, -(2**62) - 2, 2]], ids=str)
def test_damaged_pointers_are_not_followed(pointers: list[int]) -> None:
    """Fails if a pointer leads outside the entries, or differences that wrap make damaged ones look ascending."""
    with pytest.raises(GraphError, match=r"row pointers 0 .. 3 must ascend from 0 to the 2 stored entries"):
        csr(pointers, [0, 1], 3).read_pointers(0, 4)


@pytest.mark.parametrize("matrix", [csr([0], [], 0), csr([0, 0, 0], [], 2), csr([0, 2, 2, 3], [0, 4, 0], 5)])
def test_check_csr_accepts(matrix: CSR) -> None:
    """Fails if the first column of a row is compared with the last of the row before."""
    check_csr(matrix, "adjacency")


def random_matrix(seed: int) -> sp.csr_array:
    return sp.random_array((211, 211), density=0.05, rng=np.random.default_rng(seed), format="csr", dtype=np.float32)


def from_scipy(matrix: sp.csr_array, valued: bool) -> CSR:
    matrix.sort_indices()
    return csr(matrix.indptr, matrix.indices, matrix.shape[1], matrix.data if valued else None)


@pytest.mark.parametrize("size", [1, 7, 64, WINDOW])
def test_windows_cover_every_edge_once(size: int) -> None:
    """Fails when a row is split wrongly, or an empty row shifts the ones behind it."""
    matrix = random_matrix(811)
    matrix.data[matrix.indptr[10] : matrix.indptr[40]] = 0
    matrix.eliminate_zeros()
    parts = list(windows(from_scipy(matrix, False), size))
    coo = matrix.tocoo()
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), coo.row)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), coo.col)
    assert [part[2] for part in parts[1:]] == [part[3] for part in parts[:-1]]
    assert max(len(part[0]) for part in parts) <= size


@pytest.mark.parametrize("valued", [False, True])
def test_symmetry_and_transposes_are_told_apart(valued: bool) -> None:
    """Fails if pattern or values are left out of the hash; every single changed edge must show."""
    matrix = random_matrix(4409)
    symmetric = (matrix + matrix.T).tocsr()
    assert probably_symmetric(from_scipy(symmetric, valued))
    assert not probably_symmetric(from_scipy(matrix, valued))
    assert probably_transposed(from_scipy(matrix, valued), from_scipy(matrix.T.tocsr(), valued))
    assert not probably_transposed(from_scipy(matrix, valued), from_scipy(matrix, valued))
    for edge in range(0, symmetric.nnz, 97):
        broken = symmetric.copy()
        row = int(np.searchsorted(broken.indptr, edge, side="right")) - 1
        if broken.indices[edge] != row:
            broken.data[edge] = 0.0
            broken.eliminate_zeros()
            assert not probably_symmetric(from_scipy(broken, valued))


def test_symmetry_compares_values() -> None:
    assert probably_symmetric(csr([0, 1, 2], [1, 0], 2, [0.0, -0.0]))
    assert not probably_symmetric(csr([0, 1, 2], [1, 0], 2, [1.0, np.nextafter(np.float32(1), np.float32(2))]))
    assert not probably_symmetric(csr([0, 1], [0], 2))


def test_check_finite_names_the_entry() -> None:
    array = np.zeros((30, 4), np.float32)
    array[17, 2] = np.inf
    with pytest.raises(GraphError, match=r"entry \(17, 2\)"):
        check_finite(ArrayRows(array), "features")


def test_a_graph_prints_as_one_line() -> None:
    """Fails if printing a graph dumps its arrays, or leaves out what it is."""
    shown = repr(from_arrays(edges=np.array([[0, 1], [1, 2]]), features=np.ones((3, 7)), labels=[0, 1, 1], name="tiny"))
    assert shown == "<Graph tiny: 3 vertices, 2 stored edges, directed, 7 features, 2 classes, splits none>"
    both = np.array([[0, 1], [1, 0]])
    splits = {"train": np.array([[True, False], [False, True]]), "alt_train": [0]}
    shown = repr(from_arrays(edges=both, weights=[2.0, 2.0], features=sp.csr_array(np.eye(2)), splits=splits))
    assert "symmetric, weighted, 2 sparse features, 0 classes, splits train (2), alt_train>" in shown
    assert "no features" in repr(from_arrays(edges=both))


def test_reading_gives_a_copy() -> None:
    array = np.arange(6).reshape(3, 2)
    part = ArrayRows(array).read(1, 9)
    part[:] = -1
    np.testing.assert_array_equal(array, np.arange(6).reshape(3, 2))
