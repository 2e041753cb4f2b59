"""Edges in binary files: every layout gives the graph of the text; hostile files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mggcn.api.load import load_source
from mggcn.errors import GraphError, MggcnError
from mggcn.graph.layout import graph_sha256
from mggcn.graph.options import GraphOptions
from mggcn.graph.store_write import write_store
from tests.graph.small import TRIANGLE_AND_TAIL, small_graph


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_layouts_of_npy(tmp_path: Path, dtype: str) -> None:
    """Fails if rows and columns are confused, or a type is read wrongly."""
    reference = graph_sha256(small_graph(features=None, labels=None, splits=None))
    for name, edges in (("across", TRIANGLE_AND_TAIL), ("down", np.ascontiguousarray(TRIANGLE_AND_TAIL.T))):
        np.save(tmp_path / f"{name}.npy", edges.astype(dtype))
        assert graph_sha256(load_source(tmp_path / f"{name}.npy", num_vertices=5)) == reference
    np.save(tmp_path / "two.npy", np.array([[0, 1], [2, 2]], dtype))
    assert load_source(tmp_path / "two.npy").adj.indices.array().tolist() == [2, 2]


@pytest.mark.parametrize(("suffix", "dtype"), [(".i32", "<i4"), (".i64", "<i8")])
def test_raw_pairs(tmp_path: Path, suffix: str, dtype: str) -> None:
    """Fails if pairs are read as two rows, or a file that is cut short passes."""
    path = tmp_path / f"edges{suffix}"
    TRIANGLE_AND_TAIL.T.astype(dtype).tofile(path)
    types = np.arange(8) % 3
    np.save(tmp_path / "types.npy", types)
    graph = load_source(path, num_vertices=5, edge_types=tmp_path / "types.npy", options=GraphOptions())
    assert graph.num_relations == 3
    reference = small_graph(features=None, labels=None, splits=None)
    assert graph.adj.indices.array().tolist() == reference.adj.indices.array().tolist()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(GraphError, match="expected pairs of int"):
        load_source(path)


def test_bad_binary_files(tmp_path: Path) -> None:
    """Fails if another shape, a float, a pickle or damage passes, or is told in more than a line."""
    np.save(tmp_path / "floats.npy", np.ones((2, 5)))
    np.save(tmp_path / "wide.npy", np.ones((5, 3), int))
    np.save(tmp_path / "flat.npy", np.ones(6, int))
    np.save(tmp_path / "negative.npy", np.array([[0, -1], [1, 1]]))
    np.save(tmp_path / "pickled.npy", np.array([{}]))
    (tmp_path / "text.npy").write_text("0 1\n")
    (tmp_path / "empty.i64").write_bytes(b"")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(MggcnError) as caught:
            load_source(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
@pytest.mark.parametrize("row_normalize", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_features_in_a_file(tmp_path: Path, dtype: str, row_normalize: bool, dense: bool) -> None:
    """Fails if features that stay in their file become others than those of an array."""
    rng = np.random.default_rng(31)
    features = (rng.integers(-9, 9, (5, 40)) * (rng.random((5, 40)) < (1 if dense else 0.1))).astype(dtype)
    np.save(tmp_path / "x.npy", features)
    np.save(tmp_path / "edges.npy", TRIANGLE_AND_TAIL)
    options = GraphOptions(row_normalize=row_normalize)
    graph = load_source(tmp_path / "edges.npy", features=tmp_path / "x.npy", options=options)
    expected = small_graph(features=features, labels=None, splits=None, options=options)
    assert graph_sha256(graph) == graph_sha256(expected)
    write_store(graph, tmp_path / "store")
