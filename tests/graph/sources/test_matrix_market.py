"""MatrixMarket: what SciPy writes is read alike, and no bytes end in anything but a line."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from mggcn.api.load import load_source
from mggcn.errors import GraphError
from mggcn.graph.layout import graph_sha256
from mggcn.graph.sources import edge_list
from mggcn.graph.sources.matrix_market import read_matrix_market

HEAD = "%%MatrixMarket matrix coordinate real general\n"


def entries(path: Path) -> Any:
    """The file as a dense matrix."""
    edges, n = read_matrix_market(path)
    values = np.ones(edges.count) if edges.weights is None else edges.weights.array()
    return sp.coo_array((values, (edges.src.array(), edges.dst.array())), shape=(n, n)).toarray()


@pytest.mark.parametrize(
    ("symmetry", "field"),
    [
        ("general", "real"),
        ("general", "integer"),
        ("general", "pattern"),
        ("symmetric", "real"),
        ("symmetric", "pattern"),
        ("skew-symmetric", "real"),
    ],
)
def test_what_scipy_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetry: str, field: str) -> None:
    """Fails if an entry, a mirrored one or its sign is lost, in one block or many, plain or packed."""
    rng = np.random.default_rng(61)
    dense = rng.integers(-5, 6, (9, 9)) * (rng.random((9, 9)) < 0.4)
    if symmetry != "general":
        dense = np.tril(dense, -1) + (np.tril(dense, -1).T * (-1 if "skew" in symmetry else 1))
    path = tmp_path / "m.mtx"
    scipy.io.mmwrite(path, sp.coo_array(dense), "a\ncomment", field=field, symmetry=symmetry)
    (tmp_path / "m.mtx.gz").write_bytes(gzip.compress(path.read_bytes()))
    expected = (dense != 0) if field == "pattern" else dense
    for name in ("m.mtx", "m.mtx.gz"):
        for block in (1 << 24, 7):
            monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
            np.testing.assert_array_equal(entries(tmp_path / name), expected)


def test_the_end_of_the_file(tmp_path: Path) -> None:
    """Fails if a last line without its end, or none at all, is not read."""
    (tmp_path / "m.mtx").write_text(HEAD + "% c\n\n3 3 2\n1 2 0.5\n\n3 1 1e3")
    assert entries(tmp_path / "m.mtx").tolist() == [[0, 0.5, 0], [0, 0, 0], [1000, 0, 0]]
    (tmp_path / "m.mtx").write_text(HEAD + "3 3 0")
    assert not entries(tmp_path / "m.mtx").any()


BAD = {
    "NUL": (HEAD + "5 5 1\n1 2 0.5\0", "line 3: expected row, column and value, got"),
    "NUL in the head": (HEAD[:20] + "\0" + HEAD[20:] + "5 5 1\n1 2 0.5\n", "line 1 must read|line 1 names"),
    "zero": (HEAD + "5 5 1\n0 2 0.5\n", r"entry 1 is \(0, 2\), expected 1 to 5"),
    "beyond": (HEAD + "5 5 2\n1 2 0.5\n1 6 1\n", r"entry 2 is \(1, 6\), expected 1 to 5"),
    "few": (HEAD + "5 5 3\n1 2 0.5\n", "3 entries are announced, but 1 are there"),
    "billions": (HEAD + "5 5 10000000000\n1 2 0.5\n", "10000000000 entries are announced"),
    "vertices": (HEAD + "9999999999 9999999999 1\n1 2 0.5\n", "9999999999 rows"),
    "no value": (HEAD + "5 5 2\n1 2 1\n1 2\n", "line 4: expected row, column and value, got '1 2'"),
    "value too many": (HEAD.replace("real", "pattern") + "5 5 1\n1 2 1\n", "line 3: expected row and column"),
    "complex": (HEAD.replace("real", "complex") + "5 5 1\n1 2 1 0\n", "line 1 names 'coordinate complex general'"),
    "negative": (HEAD + "-5 -5 1\n1 2 1\n", "line 2: expected rows, columns and entries, got '-5 -5 1'"),
    "no extents": (HEAD + "% nothing\n", "no line of rows"),
    "other": ("0 1\n", "line 1 must read"),
    "dense": (HEAD.replace("coordinate", "array") + "2 2\n1\n2\n3\n4\n", "holds a dense matrix"),
    "not square": (HEAD + "2 3 1\n1 3 1.0\n", "2 rows and 3 columns, expected a square matrix"),
    "not finite": (HEAD + "2 2 1\n1 2 nan\n", "edge weights must be finite"),
}


@pytest.mark.parametrize("block", [1 << 24, 3])
@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, block: int) -> None:
    """Fails if damage crashes, takes memory, passes, or is told in more than a line."""
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
    (tmp_path / "m.mtx").write_text(BAD[case][0])
    with pytest.raises(GraphError, match=BAD[case][1]) as caught:
        load_source(tmp_path / "m.mtx")
    assert "\n" not in str(caught.value)


def test_what_a_matrix_has_no_place_for(tmp_path: Path) -> None:
    """Fails if another number of vertices, or types of edges, are taken beside a matrix."""
    (tmp_path / "m.mtx").write_text(HEAD + "3 3 1\n1 2 0.5\n")
    with pytest.raises(GraphError, match="num_vertices is 4, adj has 3 rows"):
        load_source(tmp_path / "m.mtx", num_vertices=4)
    with pytest.raises(GraphError, match="edge_types belong to edges"):
        load_source(tmp_path / "m.mtx", edge_types=np.array([0]))
    same = load_source(tmp_path / "m.mtx", num_vertices=3)
    assert graph_sha256(same) == graph_sha256(load_source(tmp_path / "m.mtx"))


def test_flipped_bytes(tmp_path: Path) -> None:
    """Fails if some byte of a file crashes the reader."""
    text = bytearray((HEAD + "6 6 4\n1 2 0.5\n3 4 1\n5 5 2e1\n6 1 -3\n").encode())
    rng = np.random.default_rng(5)
    read, said = 0, []
    for _ in range(300):
        damaged = text.copy()
        for at in rng.integers(0, len(text), rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        (tmp_path / "m.mtx").write_bytes(damaged)
        try:
            read_matrix_market(tmp_path / "m.mtx")
            read += 1
        except GraphError as error:
            said.append(str(error))
    assert not any("\n" in message for message in said)
    assert read < 150
