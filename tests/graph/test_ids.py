"""Vertices that are named by strings or by numbers with gaps: numbered once, and named again in stores and predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import ArrayRows
from mggcn.graph.ids import ids_of, rows_of
from mggcn.graph.layout import graph_sha256
from mggcn.graph.store import store_folder

NAMES = np.array(["delta", "alpha", "charlie", "bravo"])
EDGES = np.array([["alpha", "bravo", "charlie", "delta"], ["bravo", "charlie", "delta", "alpha"]])
ROWS: dict[str, Any] = {"features": np.diag([1.0, 2.0, 3.0, 4.0]).astype(np.float32), "labels": [0, 1, 0, 1]}
GAPS = {"delta": 7000, "alpha": -3, "charlie": 12, "bravo": 900000000000}


def as_gaps(names: np.ndarray) -> np.ndarray:
    return np.vectorize(GAPS.__getitem__)(names)


def pairs(graph: mggcn.Graph) -> set[tuple[Any, Any]]:
    """Edges by the ids of their ends."""
    ids, adj = ids_of(graph), graph.adj
    sources = np.repeat(np.arange(graph.num_vertices), np.diff(adj.indptr.array()))
    return set(zip(ids[sources].tolist(), ids[adj.indices.array()].tolist(), strict=True))


@pytest.mark.parametrize(
    "make", [np.asarray, lambda names: names.astype(object), as_gaps], ids=["str", "object", "gaps"]
)
def test_edges_are_numbered_by_the_ids_of_the_rows(make: Any, tmp_path: Path) -> None:
    """Fails if an edge joins other vertices than its ids say, a row gets another name, or a store forgets the names."""
    edges, names = make(EDGES), make(NAMES)
    splits = {"train": make(np.array(["bravo", "delta"])), "val": np.array([False, True, False, False])}
    graph = mggcn.load(edges, ids=names, splits=splits, **ROWS)
    assert ids_of(graph).tolist() == names.tolist()
    assert pairs(graph) == set(zip(*edges.tolist(), strict=True))
    assert ids_of(graph)[graph.splits["train"].read(0, 1)[0]].tolist() == make(np.array(["delta", "bravo"])).tolist()
    stored = mggcn.save(graph, tmp_path / "store")
    assert store_folder(stored) == tmp_path / "store"
    assert ids_of(stored).tolist() == names.tolist()
    assert mggcn.load(tmp_path / "store", verify=True).ids is not None
    plain = mggcn.load(graph.adj.indices.array()[None].repeat(2, 0) * 0 + _numbers(), splits=_masks(graph), **ROWS)
    assert graph_sha256(stored) == graph_sha256(plain)  # training sees no names


def _numbers() -> np.ndarray:
    number = {name: row for row, name in enumerate(NAMES)}
    return np.vectorize(number.__getitem__)(EDGES)


def _masks(graph: mggcn.Graph) -> dict[str, np.ndarray]:
    return {name: rows.read(0, 1)[0] for name, rows in graph.splits.items()}


def test_ids_of_the_edges_are_numbered_in_order() -> None:
    """Fails if strings need more than themselves, or numbers with gaps become rows that nobody has."""
    for graph, expected in (
        (mggcn.load(EDGES), sorted(NAMES.tolist())),
        (mggcn.load(as_gaps(EDGES), ids="edges"), sorted(GAPS.values())),
    ):
        assert ids_of(graph).tolist() == expected
        assert graph.num_vertices == graph.num_edges == 4
    assert ids_of(mggcn.load(np.array([[0, 2], [2, 0]]))).tolist() == [0, 1, 2]


def test_predictions_are_read_by_ids() -> None:
    """Fails if the row of a prediction belongs to another vertex than its id says."""
    splits = {"train": ["alpha", "delta"], "test": ["bravo", "charlie"]}
    orders = [np.arange(4), np.array([2, 0, 3, 1])]
    scores = []
    for order in orders:
        rows = {"features": ROWS["features"][order], "labels": np.array(ROWS["labels"])[order]}
        graph = mggcn.load(EDGES, ids=NAMES[order], splits=splits, **rows)
        trainer = mggcn.Trainer(graph, mggcn.GCN(4), threads=1, lr=0.1)
        trainer.fit(epochs=5)
        scores.append(dict(zip(ids_of(graph).tolist(), trainer.predict(), strict=True)))
    for name in NAMES.tolist():
        np.testing.assert_allclose(scores[0][name], scores[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edges": EDGES, **ROWS}, r"rows of features and labels belong to vertices, .* give ids="),
        ({"edges": EDGES, "ids": "edges", **ROWS}, "give ids=, the id of each row in order"),
        ({"edges": EDGES, "ids": NAMES[:3]}, r"edges hold 'bravo', which ids do not have \(1 in all\)"),
        (
            {"edges": EDGES, "ids": NAMES, "splits": {"train": ["zulu"]}, **ROWS},
            "split 'train' hold 'zulu', which ids do not have",
        ),
        ({"edges": EDGES, "ids": [*NAMES, "alpha"]}, "ids must be distinct, 'alpha' repeats"),
        ({"edges": EDGES, "ids": [0, 1, 2, 3]}, "edges hold <U7, ids int64; give both as strings"),
        (
            {"edges": EDGES, "ids": [0.5, 1, 2, 3]},
            "ids must be strings or whole numbers, one for each vertex, got float64",
        ),
        ({"edges": np.array([["a", 1], [1, "a"]], object)}, "edges must be all strings or all whole numbers"),
        ({"edges": EDGES, "ids": NAMES, "num_vertices": 9}, "num_vertices is 9, there are 4 ids"),
    ],
)
def test_what_cannot_be_paired_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Fails if an id without a row, or a row without an id, is paired with another."""
    edges = arguments.pop("edges")
    with pytest.raises(GraphError, match=message):
        mggcn.load(edges, **arguments)


@pytest.mark.parametrize("ids", [[-3, 5], [7, 9_000_000_000]], ids=["negative", "huge"])
def test_numbers_that_are_no_rows_are_told_of_ids(ids: list[int]) -> None:
    """Fails if ids of a table are refused without the word that takes them."""
    edges = np.array([ids, ids[::-1]])
    with pytest.raises(GraphError, match=r'in Python, ids= names the rows, and ids="edges" numbers ids with gaps$'):
        mggcn.load(edges)
    assert mggcn.load(edges, ids="edges").num_vertices == 2


@pytest.mark.parametrize("ids", [None, [30, 2**63 + 7, 10]], ids=["rows", "large"])
def test_vertices_by_ids(ids: list[int] | None) -> None:
    """Fails if text or a large number names another vertex, or what is no id of 64 bits is refused in Python's words."""
    graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]), num_vertices=3)
    graph = replace(graph, ids=None if ids is None else ArrayRows(np.array(ids, np.uint64)))
    names = [0, 1, 2] if ids is None else ids
    assert rows_of(graph, [str(name) for name in names[1:]]).tolist() == [1, 2]
    assert rows_of(graph, np.array(names[:2], np.uint64)).tolist() == [0, 1]
    assert rows_of(graph, np.array([True, False, True])).tolist() == [0, 2]
    what = "row numbers" if ids is None else "ids of the graph"
    for given, message in (
        (["1", "", "2"], f"vertices expects {what}, whole numbers, one of them is empty"),
        ([""], "one of them is empty"),
        ([], "vertices names none; give one or more"),
        (["1", "two"], f"vertices expects {what}, whole numbers, got 'two'"),
        (["1_0"], f"vertices expects {what}, whole numbers, got '1_0'"),
        (np.zeros(3, bool), "vertices names none; give one or more"),
        (np.zeros(4, bool), r"or a mask of 3 vertices, got bool of shape \(4,\)"),
        (["9" * 30], f"vertices expects {what}, whole numbers of 64 bits, got {'9' * 30}"),
        (["9" * 19 + "9", "-1"], "whole numbers of 64 bits, got"),
        (["9" * 19], f"vertices names {'9' * 19}, but no vertex has such an id"),
        (["-1"], "vertices names -1, but no vertex has such an id"),
    ):
        with pytest.raises(ConfigError, match=message):
            rows_of(graph, given)


def test_a_word_that_means_nothing_is_refused() -> None:
    """Fails if a wrong word is taken for an id."""
    with pytest.raises(ConfigError, match='ids must be an array of N ids, or "edges"'):
        mggcn.load(EDGES, ids="auto")


def test_joined_graphs_keep_their_ids() -> None:
    """Fails if names are cut to the width of the first graph's, or lost in silence."""
    short = mggcn.load(np.array([["a", "b"], ["b", "a"]]))
    assert ids_of(mggcn.load([short, mggcn.load(EDGES)])).tolist() == ["a", "b", *sorted(NAMES.tolist())]
    with pytest.raises(GraphError, match="1 of 2 graphs to join have ids"):
        mggcn.load([short, mggcn.load(np.array([[0, 1], [1, 0]]))])


BIG = 2**63 + 1
WIDE = np.array([[5, BIG, 7], [BIG, 7, 2**64 - 1]], np.uint64)


@pytest.mark.parametrize("form", ["array", ".npy", ".npz", ".parquet"])
def test_unsigned_ids_beyond_int64(form: str, tmp_path: Path) -> None:
    """Fails if an id of 2^63 or more becomes another, in the edges, in a split, or in a store."""
    source: Any = WIDE
    if form == ".npy":
        np.save(tmp_path / "e.npy", WIDE)
    elif form == ".npz":
        np.savez(tmp_path / "e.npz", edge_index=WIDE)
    elif form == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"src": WIDE[0], "dst": WIDE[1]})
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "e.parquet")
    source = WIDE if form == "array" else tmp_path / f"e{form}"
    graph = mggcn.load(source, ids="edges", splits={"train": np.array([BIG, 5], np.uint64)})
    assert ids_of(graph).tolist() == [5, 7, BIG, 2**64 - 1]
    assert pairs(graph) == {(5, BIG), (BIG, 7), (7, 2**64 - 1)}
    assert graph.splits["train"].read(0, 1)[0].tolist() == [True, False, True, False]
    stored = mggcn.save(graph, tmp_path / "store")
    assert ids_of(stored).tolist() == ids_of(graph).tolist()
    given = mggcn.load(source, ids=np.array([2**64 - 1, 7, BIG, 5], np.uint64), features=np.eye(4))
    assert pairs(given) == pairs(graph)
    with pytest.raises(GraphError):
        mggcn.load(source)


def test_signed_and_unsigned_ids(tmp_path: Path) -> None:
    """Fails if ids of two types meet as floating-point numbers, which lose the last digits, or one passes for another."""
    near = np.array([[2**62 + 1, 2**62], [2**62, 2**62 + 1]])
    graph = mggcn.load(near, ids=np.array([2**62, 2**62 + 1], np.uint64))
    assert pairs(graph) == {(2**62 + 1, 2**62), (2**62, 2**62 + 1)}
    with pytest.raises(GraphError, match=r"edges hold -5, which ids do not have \(1 in all\)"):
        mggcn.load(np.array([[-5], [7]]), ids=np.array([2**64 - 5, 7], np.uint64))
    with pytest.raises(GraphError, match=f"edges hold {BIG}, "):
        mggcn.load(WIDE[:, :1], ids=np.array([5, -(2**63) + 1]))
    joined = mggcn.load([mggcn.load(WIDE, ids="edges"), mggcn.load(near, ids="edges")])
    assert ids_of(joined).tolist() == [5, 7, BIG, 2**64 - 1, 2**62, 2**62 + 1]
    with pytest.raises(GraphError, match=r"some ids are negative and others 2\^63 or more"):
        mggcn.load([mggcn.load(WIDE, ids="edges"), mggcn.load(-near, ids="edges")])
