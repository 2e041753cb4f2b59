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
from mggcn.graph.options import GraphOptions
from mggcn.graph.planetoid import read_planetoid

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


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("graph", pickle.dumps(Call(), 2), "could execute code"),
        ("graph", pickled({0: [99]}), "names a vertex outside 0 .. 13"),
        ("graph", pickled({0: [-1]}), "names a vertex outside"),
        ("graph", pickled([1, 2]), "list of neighbours"),
        ("x", b"", ""),
        ("allx", b"\x80\x02nonsense", "no pickle"),
        ("allx", pickled(np.zeros((9, 5))), "expected a sparse matrix"),
        ("tx", pickled(sp.csr_matrix((3, 5), dtype=np.float32)), "not of the same vertices"),
        ("ty", pickled(np.zeros(4, np.int32)), "a column for each class"),
        ("ty", pickled(np.zeros((4, 3), np.int32)).replace(b"i4", b"O8"), "of type O8"),
        ("ty", pickled(np.zeros((4, 3), np.int32)).replace(b"K\x04K\x03\x86", b"K\x05K\x03\x86"), "cannot reshape"),
        ("graph", pickled({0: [2**70]}), "no number of 64 bits"),
        ("test.index", b"3 -1", "not a list of vertices"),
        ("test.index", b"9 9 10 12", "names a vertex twice"),
        ("test.index", b"1 9 10 12", "or one of those to train on"),
    ],
)
def test_hostile_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, content: bytes, message: str
) -> None:
    """Fails if a pickle runs code, or what the files hold reaches a kernel unchecked."""
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    (tmp_path / f"ind.small.{part}").write_bytes(content)
    if not message:
        read_planetoid(tmp_path)  # features to train on are among all: that file is not read
    else:
        with pytest.raises(ValueError, match=message):
            read_planetoid(tmp_path)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_indices_that_leave_the_matrix_are_refused(tmp_path: Path) -> None:
    """Fails if SciPy follows an index of a file that leaves its array."""
    made(tmp_path)
    matrix = sp.csr_matrix(np.ones((KNOWN, COLUMNS), np.float32))
    matrix.indices[3] = 10**6
    (tmp_path / "ind.small.allx").write_bytes(pickled(matrix))
    with pytest.raises(ValueError, match="indices must be < 5"):
        read_planetoid(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Fails if half a data set is an error of Python's."""
    made(tmp_path)
    (tmp_path / "ind.small.ty").unlink()
    with pytest.raises(ValueError, match=r"no file ind\.\*\.ty"):
        read_planetoid(tmp_path)
