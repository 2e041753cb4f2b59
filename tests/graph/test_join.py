"""Several graphs as one: every array is that of its graph, and no edge leads from one to another."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

from mggcn.api.graphs import load
from mggcn.api.trainer import Trainer
from mggcn.cli import prepare
from mggcn.errors import ConfigError, GraphError, GraphWarning
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.join import JoinedRows, join
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from tests.graph.small import dense, small_graph

DIRECTED = np.array([[0, 2, 1], [1, 0, 2]])


def other_graph(**changes: Any) -> Graph:
    arrays: dict[str, Any] = {
        "edges": DIRECTED,
        "weights": [1, 2, 3],
        "features": np.ones((3, 2), np.float32),
        "labels": [3, -1, 0],
        "num_classes": 4,
        "splits": {"train": [0]},
        "name": "other",
    }
    return from_arrays(**(arrays | changes))


@pytest.mark.parametrize("sparse", [False, True])
def test_blocks_on_the_diagonal(sparse: bool) -> None:
    """Fails if an index is not raised by the vertices before it, a weight, label or split is another graph's or lost."""
    graphs = [small_graph(), other_graph(), small_graph()]
    if sparse:
        graphs = [from_matrix(graph) for graph in graphs]
    whole = join(graphs, name="three")
    for way in ("adj", "adj_t"):
        expected = sp.block_diag([dense(getattr(graph, way)) for graph in graphs]).toarray()
        np.testing.assert_array_equal(dense(getattr(whole, way)), expected)
    assert not whole.symmetric
    assert join(graphs[::2]).symmetric
    features = [f.array() if not isinstance(f := graph.features, CSR) else dense(f) for graph in (*graphs, whole)]
    np.testing.assert_array_equal(features[-1], np.concatenate(features[:-1]))
    assert whole.labels is not None
    assert whole.labels.array().tolist() == [0, 1, 2, 0, -1, 3, -1, 0, 0, 1, 2, 0, -1]
    splits = {name: np.flatnonzero(mask.array()[0]).tolist() for name, mask in whole.splits.items()}
    assert splits == {"train": [0, 1, 5, 8, 9], "val": [2, 10], "test": [3, 11]}
    assert (whole.num_classes, whole.meta["graphs"]) == (4, [["small", 0], ["other", 5], ["small", 8]])


def from_matrix(graph: Graph) -> Graph:
    """The graph with sparse features."""
    assert graph.features is not None
    x = sp.csr_array(graph.features.array())  # type: ignore[union-attr]
    matrix = CSR(
        ArrayRows(x.indptr.astype(np.int64)), ArrayRows(x.indices.astype(np.int32)), ArrayRows(x.data), x.shape[1]
    )
    return replace(graph, features=matrix)


def test_ranges_of_joined_rows() -> None:
    """Fails if a range that begins or ends inside a part reads a wrong entry."""
    parts = tuple(ArrayRows(np.arange(n)) for n in (3, 0, 5, 1))
    rows, flat = JoinedRows(parts, (0, 10, 20, 30)), [0, 1, 2, 20, 21, 22, 23, 24, 30]
    for a in range(10):
        for b in range(a, 11):
            assert rows.read(a, b).tolist() == flat[a:b]


def test_whole_graphs_as_parts(tmp_path: Path) -> None:
    """Fails if a graph's vertices join another part than its own, or unlabelled ones train; in Python or in prepare."""
    first, second = small_graph(), other_graph(weights=None)
    for graph, name in ((first, "a"), (second, "b")):
        write_store(graph, tmp_path / name)
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    a, b = (str(tmp_path / name) for name in "ab")
    arguments = [f"train={a}", str(tmp_path / "c"), "--join", f"test={b}", "--join", f"train={b}"]
    assert prepare.run(parser.parse_args(arguments)) == 0
    data = Data(edge_index=torch.from_numpy(DIRECTED), x=torch.ones(3, 2), y=torch.tensor([2, -1, 0]))
    for graph in (
        load({"train": [first, a], "test": data}),
        load({"train": [a, b], "test": b}),
        open_store(tmp_path / "c"),
    ):
        split = {name: np.flatnonzero(mask.array()[0]).tolist() for name, mask in graph.splits.items()}
        test = [10, 12] if graph.num_vertices == 13 else [8, 10] if split["train"][-1] == 7 else [5, 7]
        assert split["test"] == test
        assert 4 not in split["train"]
    assert open_store(tmp_path / "c", verify=True).meta["graphs"][2] == ["other", 8]
    for sources in ([f"train={a}", str(tmp_path / "d"), "--join", b], [b, str(tmp_path / "d"), "--join", f"train={a}"]):
        with pytest.raises(ConfigError, match=rf"^train={a} says .*, but {b} does not; write train={b}, val={b} or"):
            prepare.run(parser.parse_args(sources))


def test_stores_with_several_labels_join(tmp_path: Path) -> None:
    """Fails if a row of labels is another graph's, an unknown one becomes known, or tasks or widths are mixed."""
    labels = [np.array(rows, np.int8) for rows in ([[1, 0], [0, -1], [1, 1]], [[0, 1], [-1, -1], [1, 0]])]
    for name, rows in zip("ab", labels, strict=True):
        write_store(other_graph(labels=rows, num_classes=None, weights=None), tmp_path / name)
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    arguments = [f"train={tmp_path / 'a'}", str(tmp_path / "c"), "--join", f"test={tmp_path / 'b'}"]
    assert prepare.run(parser.parse_args(arguments)) == 0
    whole = open_store(tmp_path / "c", verify=True)
    assert whole.labels is not None
    assert (whole.task, whole.num_classes) == ("labels", 2)
    assert whole.labels.array().tolist() == np.concatenate(labels).tolist()
    split = {name: np.flatnonzero(mask.array()[0]).tolist() for name, mask in whole.splits.items()}
    assert split == {"train": [0, 1, 2], "test": [3, 5]}
    wide = other_graph(labels=np.ones((3, 3), np.int8), num_classes=None, weights=None)
    numbers = other_graph(labels=np.array([[0.1, 0.2], [3.5, 0], [0, 0]]), num_classes=None, weights=None)
    for odd, message in (
        (wide, "number 2 has 3 labels a vertex"),
        (other_graph(weights=None), "number 2 has one class a vertex"),
        (numbers, r"the first has 2 labels a vertex, number 2 has 2 numbers a vertex; .*--task, task="),
    ):
        with pytest.raises(GraphError, match=f"must have alike labels: .*{message}"):
            load([whole, odd])
    unlabelled = other_graph(labels=None, num_classes=None, weights=None, splits=None)
    with pytest.raises(
        GraphError, match="alike labels: number 2 has 2 numbers a vertex, number 3 has 2 labels a vertex"
    ):
        load([unlabelled, numbers, whole])
    joined = load([unlabelled, numbers])
    assert (joined.task, joined.num_classes) == ("numbers", 2)


def test_joined_rows_have_the_widest_type() -> None:
    """Fails if rows of a wider type are cut down to those of the first."""
    rows = JoinedRows((ArrayRows(np.array([1], np.int8)), ArrayRows(np.array([300, 3.5]))))
    assert rows.dtype == np.float64
    assert rows.array().tolist() == [1, 300, 3.5]


def test_the_score_of_joined_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the score that all graphs name is lost, or another one than all name is taken without a word."""
    for name, metric in (("a", "balanced_accuracy"), ("b", "accuracy")):
        write_store(replace(small_graph(), meta={"metric": metric}), tmp_path / name)
    a, b = (str(tmp_path / name) for name in "ab")
    for sources in ([a, a], [a, small_graph()], [small_graph(), a]):
        assert Trainer(load(sources), threads=1).config.train.metric == "balanced_accuracy"
    with pytest.warns(GraphWarning, match="name several scores, balanced_accuracy and accuracy: none is kept"):
        both = load([a, b])
    assert "metric" not in both.meta
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    assert prepare.run(parser.parse_args([a, str(tmp_path / "c"), "--join", b])) == 0
    assert "note: the joined graphs name several scores, balanced_accuracy and accuracy" in capsys.readouterr().out
    assert prepare.run(parser.parse_args([a, str(tmp_path / "d"), "--join", a])) == 0
    assert open_store(tmp_path / "d").meta["metric"] == "balanced_accuracy"


def test_types_join() -> None:
    """Fails if relations of several graphs are not those of equal numbers, or types of two widths do not fit."""
    few = from_arrays(edges=DIRECTED, edge_types=[0, 1, 1])
    many = from_arrays(edges=DIRECTED, edge_types=[0, 299, 1])
    whole = join([few, many])
    assert whole.num_relations == 300
    assert whole.adj.types is not None
    assert whole.adj.types.array().tolist() == [0, 1, 1, 0, 1, 299]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "at least one graph"),
        ([small_graph(), other_graph(features=np.ones((3, 4), np.float32))], "the first has 2, number 2 has 4"),
        ([small_graph(), other_graph(features=None)], "number 2 has none"),
        ([small_graph(), other_graph(edge_types=[0, 1, 0])], "the first has no types, number 2 has types"),
        (
            [small_graph(), other_graph(splits={"train": np.ones((2, 3), bool) & [1, 0, 1] > 0})],
            r"got \[1, 2\]; .*train=A --join test=B",
        ),
        ([small_graph(), "nowhere"], "graph 2 of 2: there is no nowhere"),
        ({"dev": small_graph()}, "belong to train, val, test, got dev"),
    ],
    ids=str,
)
def test_what_cannot_be_joined(sources: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        load(sources)


def test_arrays_beside_several_graphs() -> None:
    with pytest.raises(ConfigError, match="labels cannot be given for several graphs at once"):
        load([small_graph()], labels=[1])


def test_dense_and_sparse_features_go_together() -> None:
    """Fails if of two graphs of one source, one with few nonzeros, the features cannot be joined, or lose rows."""
    few, many = np.eye(24, dtype=np.float32), np.ones((3, 24), np.float32)
    graphs = [from_arrays(edges=np.array([[0], [1]]), features=x) for x in (few, many)]
    joined = join(graphs, ["", ""]).features
    assert isinstance(graphs[0].features, CSR)
    assert isinstance(joined, CSR)
    assert np.array_equal(dense(joined), np.concatenate([few, many]))
