"""The pickles of Planetoid are read by a reader that makes arrays and calls nothing."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.graph.convert import from_arrays
from mggcn.graph.named.planetoid import read_planetoid
from mggcn.graph.options import GraphOptions

N, KNOWN, TRAIN, COLUMNS, CLASSES = 14, 9, 4, 5, 3
TEST = [13, 9, 12, 10]
"""Without 11, as citeseer lacks some vertices."""


class csr_matrix:  # noqa: N801 - the name that the files have
    """Stands for SciPy's, whose module had another name."""

    def __init__(self, matrix: Any) -> None:
        self.__dict__ |= {
            "data": matrix.data,
            "indices": matrix.indices,
            "indptr": matrix.indptr,
            "_shape": matrix.shape,
        }


class Python2(pickle._Pickler):
    """Writes bytes as texts, as Python 2 did."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, text: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = save_text


def pickled(value: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    Python2(file, protocol).dump(csr_matrix(value) if sp.issparse(value) else value)
    return file.getvalue().replace(__name__.encode(), b"scipy.sparse.csr").replace(b"numpy._core", b"numpy.core")


def made(folder: Path, protocol: int = 2) -> dict[str, Any]:
    """Write a small data set; return its features, labels and edges."""
    rng = np.random.default_rng(3)
    dense = rng.integers(0, 2, (N, COLUMNS)).astype(np.float32)
    dense[11] = 0
    features = sp.csr_matrix(dense)
    labels = rng.integers(0, CLASSES, N)
    one_hot = np.eye(CLASSES, dtype=np.int32)[labels]
    labels[11] = -1
    neighbours = collections.defaultdict(list, {0: [1, 1, 2], 1: [0], 2: [0, 2], 9: [13], 13: [9, 5], 5: [13]})
    parts = {"x": features[:TRAIN], "allx": features[:KNOWN], "tx": features[TEST]}  # in the order of test.index
    parts |= {"y": one_hot[:TRAIN], "ally": one_hot[:KNOWN], "ty": one_hot[TEST], "graph": neighbours}
    for name, value in parts.items():
        (folder / f"ind.small.{name}").write_bytes(pickled(value, protocol))
    (folder / "ind.small.test.index").write_text("".join(f"{v}\n" for v in TEST))
    edges = {(0, 1), (0, 2), (1, 0), (2, 0), (9, 13), (13, 9), (13, 5), (5, 13)}
    return {"features": features.toarray(), "labels": labels, "edges": edges}


@pytest.mark.parametrize("protocol", [0, 2])
def test_files_are_read(tmp_path: Path, protocol: int) -> None:
    """Fails if rows to test get each other's features, a missing vertex moves the others, or an edge is lost or doubled."""
    expected = made(tmp_path, protocol)
    found = read_planetoid(tmp_path)
    np.testing.assert_array_equal(found["features"].toarray(), expected["features"])
    assert found["labels"].tolist() == expected["labels"].tolist()
    assert set(zip(*found["edges"].tolist(), strict=True)) == expected["edges"]
    assert found["edges"].shape[1] == len(expected["edges"])
    assert {name: ids.tolist() for name, ids in found["splits"].items()} == {
        "train": [0, 1, 2, 3],
        "val": [4, 5, 6, 7, 8],
        "test": sorted(TEST),
    }
    graph = from_arrays(**found, options=GraphOptions(symmetrize=True))
    assert (graph.num_vertices, graph.num_edges, graph.num_classes) == (N, len(expected["edges"]), CLASSES)


class Call:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize("protocol", [0, 2])
def test_a_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """Fails if a pickle calls what it names."""
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    (tmp_path / "ind.small.graph").write_bytes(pickle.dumps(Call(), protocol))
    with pytest.raises(pickle.UnpicklingError, match="could execute code"):
        read_planetoid(tmp_path)
    assert not (tmp_path / "made-by-a-pickle").exists()
