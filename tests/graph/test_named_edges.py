"""Edge lists whose ids are strings or have gaps: numbered as arrays are, and the ids kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn import load
from mggcn.errors import GraphError
from mggcn.graph import edge_list, edges
from mggcn.graph.ids import ids_of
from mggcn.graph.layout import graph_sha256
from mggcn.graph.objects import from_object
from mggcn.graph.sources import load_source
from mggcn.graph.store import open_store
from tests.commands.runs import refused, run_main

PAIRS = [("u7", "u10"), ("u10", "\u00e4"), ("u7", "\u00e4"), ("b", "u7")]
NAMES = np.array(PAIRS).T


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "WINDOW", 2)
    monkeypatch.setattr("mggcn.graph.ids.WINDOW", 2)
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 11)


def text(path: Path, pairs: Any, header: str = "", separator: str = ",", more: Any = ()) -> Path:
    rows = [
        separator.join(map(str, (*pair, *extra))) for pair, extra in zip(pairs, more or [()] * len(pairs), strict=True)
    ]
    path.write_text("\n".join([header, "# c", *rows]), encoding="utf-8")
    return path


@pytest.mark.parametrize("separator", [",", " ", "\t"])
@pytest.mark.parametrize("header", ["", "source{}target"])
def test_names_are_numbered_as_in_arrays(tmp_path: Path, separator: str, header: str) -> None:
    """Fails if a name gets another row than an array's, a header is taken for an edge, or the ids are lost."""
    path = text(tmp_path / "e.csv", PAIRS, header.format(separator), separator)
    expected = from_object(NAMES)
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(expected)
    assert ids_of(graph).tolist() == ids_of(expected).tolist() == ["b", "u10", "u7", "\u00e4"]
    assert graph.meta.get("input", {}).get("header", "") == header.format(separator)


def test_rows_in_a_given_order(tmp_path: Path) -> None:
    """Fails if rows of features, or ids in a split, belong to another vertex than the edges' name says."""
    ids = np.array(["x", "u10", "\u00e4", "b", "u7"])
    weights = [(1.5,), (2,), (3,), (1,)]
    path = text(tmp_path / "e.csv", PAIRS, "from,to,weight", more=weights)
    arrays = {"features": np.eye(5, dtype=np.float32), "labels": np.arange(5), "splits": {"train": ["b", "x"]}}
    np.save(tmp_path / "ids.npy", ids)
    graph = load(path, ids=str(tmp_path / "ids.npy"), **arrays)
    expected = from_object(NAMES, ids=ids, weights=np.array(weights)[:, 0], **arrays)
    assert graph_sha256(graph) == graph_sha256(expected)
    assert ids_of(graph).tolist() == ids.tolist()
    with pytest.raises(GraphError, match="edges hold 'u7', which ids do not have"):
        load_source(path, ids=ids[:4])


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".i64"])
def test_numbers_with_gaps(tmp_path: Path, suffix: str) -> None:
    """Fails if gaps become vertices, or ids beyond 2^31 are refused though they are names."""
    pairs = np.array([[7, 10**12], [10**12, -3], [7, -3]])
    path = tmp_path / f"e{suffix}"
    text(tmp_path / "e.txt", pairs)
    np.save(tmp_path / "e.npy", np.ascontiguousarray(pairs.T))
    pairs.tofile(tmp_path / "e.i64")
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(from_object(pairs.T, ids="edges"))
    assert ids_of(graph).tolist() == [-3, 7, 10**12]


def test_prepare_keeps_the_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command does not pass ids on, writes them nowhere, or takes rows that nobody named."""
    path, store = text(tmp_path / "e.tsv", PAIRS, separator="\t"), tmp_path / "store"
    assert run_main("prepare", path, store, "--ids", "edges") == 0
    assert ids_of(open_store(store, verify=True)).tolist() == ["b", "u10", "u7", "\u00e4"]
    np.save(tmp_path / "x.npy", np.ones((4, 2), np.float32))
    more = ("prepare", path, tmp_path / "other")
    assert "the edges name vertices by ids" in refused(
        capsys, *more, "--ids", "edges", "--features", tmp_path / "x.npy"
    )
    assert "cannot load" in refused(capsys, *more, "--ids", tmp_path / "nothing.npy")
    assert "ids must be integers from 0" in refused(capsys, *more)


BAD = {
    "three fields": ("a,b\nb,c,1\n", "line 2: expected two names as in the first edge"),
    "one field": ("a b\nb\n", "line 2"),
    "empty": ("a,b\n,c\n", "line 2"),
    "quotes": ('"a","b"\n', "line 1.*no quotes"),
    "weight": ("a b 1\na c x\n", "line 2: expected two names and a weight"),
    "four": ("a b 1 2\n", "line 1"),
    "order": ("target,source\na,b\n", "line 1: columns are read as source, target"),
    "no text": ("a b\nb \udcff\n", "line 2: names must be UTF-8"),
    "only a header": ("source target\n", "found none"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(tmp_path: Path, case: str) -> None:
    """Fails if a line of another form passes or is not named."""
    (tmp_path / "e.txt").write_bytes(BAD[case][0].encode("utf-8", "surrogateescape"))
    with pytest.raises(GraphError, match=BAD[case][1]) as caught:
        load_source(tmp_path / "e.txt", ids="edges")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separator", [",", " ", "\t"])
def test_marks_of_comments_within_names(tmp_path: Path, separator: str) -> None:
    """Fails if a name is cut at # or %, so that vertices merge, or a comment behind a blank becomes part of one."""
    pairs = [("C", "C#"), ("Caf%C3%A9", "Caf%20x"), ("C#", "F#%")]
    path = text(tmp_path / "e.txt", pairs, separator=separator)
    path.write_text(path.read_text().replace("%20x", "%20x # why\n% c\n  #c"))
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(from_object(np.array(pairs).T))
    assert ids_of(graph).tolist() == ["C", "C#", "Caf%20x", "Caf%C3%A9", "F#%"]


def test_a_mark_behind_a_number(tmp_path: Path) -> None:
    """Fails if what may be a name or a comment is taken for either in silence."""
    (tmp_path / "e.txt").write_text("u v\n1 2#x\n1 2#y\n")
    with pytest.raises(GraphError, match="got '1 2#x', which may be either; put a blank"):
        load_source(tmp_path / "e.txt", ids="edges")
    (tmp_path / "e.txt").write_text("1 3 #x\n1#x 3#y\n")
    assert ids_of(load_source(tmp_path / "e.txt", ids="edges")).tolist() == ["1", "1#x", "3", "3#y"]


def test_a_name_of_many_letters(tmp_path: Path) -> None:
    """Fails if one name makes gigabytes of many short ones, or some long names are refused."""
    long = "n" * 60_000
    text(tmp_path / "e.txt", [("a", long), *((f"u{at}", "a") for at in range(1_200))])
    with pytest.raises(
        GraphError, match=r"all 1,202 names would take the 60,000 letters of the longest, 'nnn.*shorten"
    ):
        load_source(tmp_path / "e.txt", ids="edges")
    text(tmp_path / "e.txt", [("a", long), ("a", "b")])
    assert ids_of(load_source(tmp_path / "e.txt", ids="edges")).tolist() == ["a", "b", long]


def test_a_matrix_has_no_ids(tmp_path: Path) -> None:
    """Fails if ids beside a source that numbers its vertices are dropped in silence."""
    (tmp_path / "m.mtx").write_text("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2 0.5\n")
    with pytest.raises(GraphError, match="numbers its vertices itself"):
        load_source(tmp_path / "m.mtx", ids="edges")
