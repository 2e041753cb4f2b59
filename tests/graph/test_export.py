from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

import mggcn
from mggcn.api.load import load_source
from mggcn.errors import ConfigError, StoreError
from mggcn.graph import csr as csr_module
from mggcn.graph.csr import Graph
from mggcn.graph.export import export
from mggcn.graph.layout import graph_arrays, graph_sha256
from tests.graph.small import dense, small_graph

EDGES = np.array([[0, 0, 1, 3, 4, 4], [1, 2, 2, 3, 0, 1]])
WEIGHTS = np.array([1, 2, 0.1, 4, -1, 1 / 3])
GRAPHS = {
    "symmetric": lambda: small_graph(),
    "weighted": lambda: small_graph(edges=EDGES, weights=WEIGHTS),
    "typed": lambda: small_graph(edges=EDGES, weights=WEIGHTS, edge_types=np.array([0, 2, 1, 0, 1, 1])),
    "sparse features": lambda: small_graph(features=sp.csr_array(np.eye(5, 9, dtype=np.float32))),
    "several splits": lambda: small_graph(
        splits={"train": np.eye(5, dtype=bool)[:2], "val": np.eye(5, dtype=bool)[2:4]}
    ),
    "numbers": lambda: small_graph(labels=np.linspace(0, 1, 10, dtype=np.float32).reshape(5, 2)),
    "no edges": lambda: small_graph(edges=np.empty((2, 0), np.int64)),
}


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setattr(csr_module, "WINDOW", 3)
    made: Graph = GRAPHS[request.param]()
    return made


@pytest.mark.parametrize("name", ["e.txt", "e.tsv", "e.csv", "e.edges.gz"])
def test_edge_lists_are_read_back(graph: Graph, tmp_path: Path, name: str) -> None:
    """Fails if an edge, a digit of a weight or a type is lost in text."""
    assert export(graph, tmp_path / name) == [tmp_path / name]
    if not graph.num_edges:
        return
    again = load_source(tmp_path / name, num_vertices=graph.num_vertices)
    names = [found for found in graph_arrays(again) if not found.endswith("_t")]
    for found in names:
        expected, came = graph_arrays(graph)[found].array(), graph_arrays(again)[found].array()
        np.testing.assert_array_equal(came, expected, err_msg=found)
    assert {"indptr", "indices"} <= set(names)
    assert ("values" in names, "types" in names) == (graph.adj.values is not None, graph.num_relations > 0)


def test_scipy_reads_the_adjacency(graph: Graph, tmp_path: Path) -> None:
    export(graph, tmp_path / "a.npz")
    found = sp.load_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.toarray(), dense(graph.adj))


def test_pyg_reads_everything(graph: Graph, tmp_path: Path) -> None:
    """Fails if an array of the graph is not in the Data, or mggcn.load makes another graph of it."""
    export(graph, tmp_path / "d.pt")
    data = torch.load(tmp_path / "d.pt", weights_only=False)
    again = mggcn.load(data, num_classes=graph.num_classes)
    for name, rows in graph_arrays(again).items():
        if not name.startswith("features"):
            np.testing.assert_array_equal(rows.array(), graph_arrays(graph)[name].array(), err_msg=name)
    assert graph_arrays(again).keys() >= {n for n in graph_arrays(graph) if not n.startswith("features")}
    assert data.x.shape == (5, graph.num_features)
    if graph.num_features == 2:
        assert graph_sha256(again) == graph_sha256(graph)


def test_parquet_holds_edges_and_vertices(graph: Graph, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    edges, vertices = export(graph, tmp_path / "g.parquet")
    assert vertices.name == "g.vertices.parquet"
    table = pq.read_table(edges)
    found = np.zeros((5, 5), np.float32)
    weights = table["weight"].to_numpy() if "weight" in table.column_names else np.ones(len(table), np.float32)
    np.add.at(found, (table["source"].to_numpy(), table["target"].to_numpy()), weights)
    np.testing.assert_array_equal(found, dense(graph.adj))
    assert ("type" in table.column_names) == (graph.num_relations > 0)
    columns = pq.read_table(vertices)
    assert columns["vertex"].to_pylist() == list(range(5))
    assert np.array(columns["features"].to_pylist()).shape == (5, graph.num_features)
    assert graph.labels is not None
    np.testing.assert_array_equal(np.array(columns["label"].to_pylist()), graph.labels.array())
    for name, masks in graph.splits.items():
        for number, mask in enumerate(masks.array()):
            came = columns[name if masks.shape[0] == 1 else f"{name}_{number}"].to_pylist()
            np.testing.assert_array_equal(came, mask)


def test_files_are_neither_replaced_nor_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    with pytest.raises(ConfigError, match="expected one of"):
        export(graph, tmp_path / "g.docx")
    with pytest.raises(ConfigError, match="expected one of"):
        export(graph, tmp_path / "g.npz.gz")
    (tmp_path / "g.vertices.parquet").write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        export(graph, tmp_path / "g.parquet")
    with pytest.raises(StoreError, match="cannot write"):
        export(graph, tmp_path / "none" / "g.txt")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mggcn.graph.export._edges", full)
    with pytest.raises(StoreError, match="No space left"):
        export(graph, tmp_path / "g.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["g.vertices.parquet"]
    monkeypatch.undo()
    assert len(export(graph, tmp_path / "g.parquet", overwrite=True)) == 2


def test_parallel_edges_stay_parallel_in_pyg(tmp_path: Path) -> None:
    """Fails if numbers of parallel edges are written as weights, which layers of attention do not read."""
    edges = torch.tensor([[0, 0, 0, 1], [1, 1, 2, 2]])
    export(mggcn.load(Data(edge_index=edges, num_nodes=3)), tmp_path / "d.pt")
    data = torch.load(tmp_path / "d.pt", weights_only=False)
    assert data.edge_index.tolist() == edges.tolist()
    assert "edge_weight" not in data
    again = mggcn.load(tmp_path / "d.pt")
    assert again.repeats == "counted"
    assert dense(again.adj)[0, 1] == 2
