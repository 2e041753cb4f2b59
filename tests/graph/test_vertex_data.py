from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import mggcn
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, check_csr
from mggcn.graph.vertex_data import as_features, as_labels, as_splits, normalized_rows
from tests.graph.small import dense

MATRIX = np.array([[1, -3, 0], [0, 0, 0], [0, 0, 2]], np.float32)
NORMALIZED = np.array([[0.25, -0.75, 0], [0, 0, 0], [0, 0, 1]], np.float32)


def expand(features: Any) -> np.ndarray:
    return dense(features) if isinstance(features, CSR) else features.array()


@pytest.mark.parametrize("make", [np.asarray, sp.csr_array, sp.coo_matrix, np.ndarray.tolist, np.asfortranarray])
@pytest.mark.parametrize("row_normalize", [False, True])
def test_features(make: Any, row_normalize: bool) -> None:
    features = as_features(make(MATRIX), 3, row_normalize)
    np.testing.assert_array_equal(expand(features), NORMALIZED if row_normalize else MATRIX)
    if isinstance(features, CSR):
        check_csr(features, "features")
        assert features.nnz == 3


def test_float32_is_shared_and_never_changed() -> None:
    array = MATRIX.copy()
    shared = as_features(array, 3, False)
    assert np.shares_memory(expand(shared), array)
    normalized_rows(shared)
    as_features(array, 3, True)
    np.testing.assert_array_equal(array, MATRIX)


def test_sparse_duplicates_are_summed_and_zeros_dropped() -> None:
    matrix = sp.coo_array(([1.0, 2.0, 0.0], ([0, 0, 1], [2, 2, 0])), shape=(2, 3))
    features = as_features(matrix, 2, False)
    assert isinstance(features, CSR)
    assert features.nnz == 1
    np.testing.assert_array_equal(dense(features), [[0, 0, 3], [0, 0, 0]])
    assert matrix.nnz == 3


@pytest.mark.parametrize(
    "bad", [MATRIX[:2], MATRIX[0], MATRIX.astype(str), MATRIX * 1j, [["a"]], sp.csr_array(MATRIX[:2])]
)
def test_bad_features_are_refused(bad: Any) -> None:
    with pytest.raises(GraphError, match=r"real numbers of shape \[3, D\]"):
        as_features(bad, 3, False)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 2, -1], [0, 2, -1]),
        ([[0], [1], [1]], [0, 1, 1]),
        ([0.0, np.nan, 2.0], [0, -1, 2]),
        (np.array([0, 1, 1], np.uint8), [0, 1, 1]),
        ([False, True, True], [0, 1, 1]),
    ],
)
def test_labels(labels: Any, expected: list[int]) -> None:
    rows, num_classes = as_labels(labels, 3, None)
    assert rows is not None
    np.testing.assert_array_equal(rows.array(), expected)
    assert rows.dtype == np.int64
    assert num_classes == max(expected) + 1
    assert as_labels(labels, 3, 9)[1] == 9


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], r"one number, .*for each of 3.*shape \(2,\); give each vertex a label"),
        ([[0, 1], [1, 5], [1, 1]], "2 columns must be 0, 1 or -1"),
        ([np.inf, 1, 1], "whole numbers"),
        (["a", "b", "c"], r"one number.*number the classes from 0 \(numpy.unique"),
        ([0, 1, 10**9], "largest label is 1000000000"),
    ],
)
def test_bad_labels_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        as_labels(labels, 3, None)


def test_splits() -> None:
    splits = as_splits({"train": [2, 0], "val": np.array([False, True, False]), "test": np.eye(3, dtype=bool)[:2]}, 3)
    np.testing.assert_array_equal(splits["train"].array(), [[True, False, True]])
    np.testing.assert_array_equal(splits["val"].array(), [[False, True, False]])
    assert splits["test"].shape == (2, 3)
    assert not as_splits({"val": []}, 3)["val"].array().any()


@pytest.mark.parametrize(
    "bad", [[3], [-1], [1, 0, 1], [True, False], [0.5], np.eye(3), np.ones((3, 2), bool), np.ones((1, 1, 3), bool)]
)
def test_bad_splits_are_refused(bad: Any) -> None:
    with pytest.raises(GraphError, match="'train'"):
        as_splits({"train": bad}, 3)


def test_labels_tell_their_task() -> None:
    """Fails if several labels or numbers are read as classes, or an unknown entry as one."""
    both, _ = as_labels(np.array([[0, 1], [1, -1], [1, 1]]), 3, None)
    assert (both.array().dtype, both.array().tolist()) == (np.int8, [[0, 1], [1, -1], [1, 1]])
    some, columns = as_labels(np.array([[0, np.nan], [1.0, 0]]), 2, None)
    assert (some.array().dtype, some.array().tolist(), columns) == (np.int8, [[0, -1], [1, 0]], 2)
    numbers, columns = as_labels(np.array([0.5, np.nan, 2]), 3, None)
    assert (numbers.array().dtype, numbers.shape, columns) == (np.float32, (3, 1), 1)
    assert np.isnan(numbers.array()[1, 0])
    whole, classes = as_labels(np.array([0.0, 2, np.nan]), 3, None)
    assert (whole.array().tolist(), classes) == ([0, 2, -1], 3)
    assert as_labels(np.array([3, 5]), 2, None, "numbers")[0].array().tolist() == [[3], [5]]
    assert as_labels(np.array([1, 0]), 2, None, "labels")[0].array().dtype == np.int8
    for labels, task, words in (
        (np.array([[0, 7], [1, 1]]), None, "--task numbers"),
        (np.array([[0, 7], [1, 1]]), "labels", "0, 1, or -1"),
        (np.array([0.5, 1]), "classes", "whole numbers"),
        (np.ones((3, 2)), None, "each of 2 vertices"),
    ):
        with pytest.raises(GraphError, match=words):
            as_labels(labels, 2, None, task)


def test_masked_and_missing_entries(tmp_path: Path) -> None:
    """Fails if what lies below a mask, or NA, becomes a feature, a class, an edge or a split."""
    pandas = pytest.importorskip("pandas")
    edges, hidden = np.array([[0, 1], [1, 2]]), [False, True, False]
    x = np.ma.masked_array([[1.0], [-9999.0], [5.0]], mask=[[at] for at in hidden])
    for arrays in (
        {"features": x},
        {"features": pandas.DataFrame({"a": [1, None, 3]}, dtype=object)},
        {"splits": {"train": np.ma.masked_array([0, 1, 2], hidden)}},
        {"weights": np.ma.masked_array([1.0, 2.0], [True, False])},
        {"edge_types": np.ma.masked_array([1, 2], [True, False])},
        {"ids": np.ma.masked_array([0, 1, 2], hidden)},
        {"features": [np.ma.masked_array([1.0], [at]) for at in hidden]},
        {"features": [np.ones(2), np.ma.masked_array([1.0, 2.0], [True, False]), [0.0, 1.0]]},
    ):
        with pytest.raises(GraphError, match=r"1 entries are missing \(masked, or NA\)"):
            mggcn.load(edges, **arrays)
    with pytest.raises(GraphError, match="edges: 1 entries are missing"):
        mggcn.load(np.ma.masked_array(edges, [[False, True], [False, False]]))
    for labels in (
        np.ma.masked_array([0, 7, 1], hidden),
        np.ma.masked_array([0.0, 7.0, 1.0], hidden),
        np.ma.masked_array([0, 7, 1], hidden, dtype=np.uint8),
        pandas.Series([0, None, 1], dtype="Int64"),
        [0, None, 1],
    ):
        found = mggcn.load(edges, labels=labels).labels
        assert found is not None
        assert found.array().tolist() == [0, -1, 1]
    several = np.ma.masked_array([[0, 1], [1, 1], [0, 0]], [[0, 1], [0, 0], [0, 0]])
    assert as_labels(several, 3, None)[0].array().tolist() == [[0, -1], [1, 1], [0, 0]]  # type: ignore[union-attr]
    whole = np.ma.masked_array(np.ones((3, 1)), np.zeros((3, 1)))
    assert expand(mggcn.load(edges, features=whole).features).tolist() == [[1], [1], [1]]


def test_rows_of_frames_are_those_of_the_vertices() -> None:
    """Fails if rows of a frame that was sorted or filtered pass for the vertices', or ids or labels for features."""
    pandas = pytest.importorskip("pandas")
    edges = np.array([[0, 1], [1, 2]])
    frame = pandas.DataFrame({"a": [3.0, 1.0, 2.0], "b": [1.0, 2.0, 3.0]})
    assert expand(mggcn.load(edges, features=frame, labels=pandas.Series([0, 1, 0])).features).shape == (3, 2)
    later = frame.sort_values("a")
    for arrays in ({"features": later}, {"labels": later["a"].astype(int)}):
        with pytest.raises(GraphError, match=r"the index of .* names rows, .*\.reset_index\(drop=True\)"):
            mggcn.load(edges, **arrays)
    names = frame.set_axis(["ann", "bob", "eve"])
    by_name = np.array([["ann", "bob"], ["bob", "eve"]])
    assert mggcn.load(by_name, ids=["ann", "bob", "eve"], features=names).num_features == 2
    with pytest.raises(GraphError, match="not those of the vertices in their order"):
        mggcn.load(by_name, ids=["eve", "ann", "bob"], features=names)
    whole = frame.assign(name=["ann", "bob", "eve"])  # rows in the order of ids, and an index that says nothing
    assert mggcn.load(by_name, ids=whole["name"], features=whole[["a", "b"]], labels=whole["b"] - 1).num_features == 2
    assert mggcn.load(edges, features=frame.set_axis([0.0, 1.0, 2.0])).num_features == 2
    with pytest.raises(GraphError, match=r"the index of split 'train' names rows"):
        mggcn.load(edges, splits={"train": later["a"] > 1})
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(GraphError, match="column 'label' is named as a label or a split"):
        mggcn.load(edges, features=arrow.table({"f": [1.0, 2, 3], "label": [0, 1, 0]}))
    for column, words in (("paper_id", "named as an index or id"), ("fold", "named as a label or a split")):
        with pytest.raises(GraphError, match=words):
            mggcn.load(edges, features=frame.assign(**{column: [0, 1, 2]}))


def test_numbers_beyond_float32_are_called_that(tmp_path: Path) -> None:
    """Fails if a finite number is called NaN or infinite, wherever features, labels or weights come from."""
    edges, large = np.array([[0, 1], [1, 2]]), np.array([[1.0], [-1e300], [2.0]])
    np.save(tmp_path / "x.npy", large)
    np.savetxt(tmp_path / "edges.txt", edges.T, "%d")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"f": large[:, 0]}), tmp_path / "x.parquet")
    for source, arrays in (
        (edges, {"features": large}),
        (tmp_path / "edges.txt", {"features": tmp_path / "x.parquet"}),
        (edges, {"features": sp.csr_array(large)}),
        (edges, {"features": torch.from_numpy(large)}),
        (tmp_path / "edges.txt", {"features": tmp_path / "x.npy"}),
        (edges, {"labels": [0.5, 1e300, 1.0]}),
        (edges, {"labels": [0.0, 1e300, 1.0], "task": "numbers"}),
    ):
        with pytest.raises(GraphError, match=r"1e\+300, too large for float32"):
            mggcn.load(source, **arrays)
    with pytest.raises(GraphError, match="overflow float32"):
        mggcn.load(edges, weights=[1.0, 1e300])
    with pytest.raises(GraphError, match=r"largest label is 1e\+300 .*task='numbers'"):
        mggcn.load(edges, labels=[0.0, 1e300, 1.0])
    with pytest.raises(GraphError, match="NaN or infinite"):
        mggcn.load(edges, features=np.array([[1.0], [np.inf], [2.0]]))
    assert expand(as_features(np.array([[3.4e38]]), 1, False)) == np.float32(3.4e38)
