"""Objects of graph libraries: networkx, OGB's items, data sets, graphs of several types, masks and splits of any name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.utils import from_networkx

import mggcn
from mggcn.errors import GraphError, StoreError
from tests.graph.small import dense

RING = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def test_networkx_graphs_are_read_as_networkx_writes_them() -> None:
    """Fails if a weight, a direction, a parallel edge, a self-loop or a node is not that of networkx's matrix."""
    draw = np.random.default_rng(8843)
    for kind in (networkx.Graph, networkx.DiGraph, networkx.MultiGraph, networkx.MultiDiGraph):
        graph = kind()
        graph.add_nodes_from("edcba")
        for u, v in draw.choice(list("abcd"), (9, 2)).tolist():
            graph.add_edge(u, v, **({} if u == "a" else {"weight": 0.5 * draw.integers(1, 9)}))
        found = mggcn.load(graph)
        assert found.ids is not None
        assert found.ids.array().tolist() == list(graph.nodes)
        right = networkx.to_numpy_array(graph, weight="weight", multigraph_weight=sum)
        np.testing.assert_allclose(dense(found.adj), right)


def test_nodes_of_networkx_that_are_numbers() -> None:
    """Fails if rows of features belong to other nodes than those of their numbers, or nodes with gaps lose their names."""
    graph = networkx.Graph([(2, 0), (0, 1)])
    found = mggcn.load(graph, features=np.arange(3.0)[:, None], splits={"train": [2], "valid": [0]}, labels=[0, 1, 0])
    assert found.ids is None
    assert dense(found.adj).tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert "not their order in graph.nodes" in str(mggcn.describe(found))
    assert found.splits["val"].array().tolist() == [[True, False, False]]
    gaps = mggcn.load(networkx.DiGraph([(70, 5), (5, 9)]), splits={"train": [9]})
    assert gaps.ids is not None
    assert gaps.ids.array().tolist() == [70, 5, 9]
    assert dense(gaps.adj).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert gaps.splits["train"].array().tolist() == [[False, False, True]]
    with pytest.raises(GraphError, match=r"convert_node_labels_to_integers"):
        mggcn.load(networkx.grid_2d_graph(2, 2))


def test_attributes_of_networkx() -> None:
    """Fails if an attribute that may be a weight is left without a word, or the way out that is named is none."""
    graph = networkx.Graph()
    graph.add_edge("a", "b", length=2.5, kind="road")
    graph.add_edge("b", "c", length=0.5, kind="path")
    graph.add_node("a", height=3)
    with pytest.raises(GraphError, match=r'edges\' length holds one number per edge.*\[held\["length"\] for'):
        mggcn.load(graph)
    found = mggcn.load(graph, weights=[held["length"] for *_, held in graph.edges(data=True)])
    assert dense(found.adj).tolist() == [[0, 2.5, 0], [2.5, 0, 0.5], [0, 0.5, 0]]
    said = str(mggcn.describe(mggcn.load(graph, weights=None)))
    assert "not read: the edges' length, the edges' kind, the nodes' height" in said
    del graph.edges["a", "b"]["length"], graph.edges["b", "c"]["length"]
    graph.edges["a", "b"]["weight"] = 7.0
    assert dense(mggcn.load(graph).adj)[0, 1] == 7
    assert dense(mggcn.load(graph).adj)[1, 2] == 1
    assert (
        dense(
            mggcn.load(from_networkx(networkx.Graph([("a", "b", {"weight": 2.5}), ("b", "c", {"weight": 1.0})]))).adj
        )[0, 1]
        == 2.5
    )


class Sets(InMemoryDataset):
    """A data set of PyG of one or several graphs."""

    def __init__(self, graphs: list[Data]) -> None:
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


class Ogb:
    """A data set as OGB's library-agnostic one: one item, indices by train, valid and test."""

    name, eval_metric = "ogbn-ring", "rocauc"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> tuple[dict[str, Any], np.ndarray]:
        labels = np.array([[0, 1], [1, 1], [0, 0], [1, 0]])
        return {"edge_index": RING.numpy(), "edge_feat": None, "node_feat": np.ones((4, 2)), "num_nodes": 4}, labels

    def get_idx_split(self) -> dict[str, np.ndarray]:
        return {"train": np.array([0, 3]), "valid": np.array([1]), "test": np.array([2])}


@pytest.mark.filterwarnings("ignore")
def test_data_sets_of_one_graph_are_that_graph() -> None:
    """Fails if a data set is refused or read as another graph, or several graphs as one without a word."""
    data = Data(edge_index=RING, x=torch.ones(4, 1), y=torch.arange(4))
    assert mggcn.load(Sets([data])).num_edges == 4
    with pytest.raises(GraphError, match=r"Sets holds 2 graphs: .*dataset\[0\].*list\(dataset\)"):
        mggcn.load(Sets([data, data]))
    assert mggcn.load(list(Sets([data, data]))).num_edges == 8
    graph = mggcn.load(Ogb())
    assert (graph.name, graph.task, graph.meta["metric"], graph.num_features) == ("ogbn-ring", "labels", "rocauc", 2)
    assert {name: rows.array().ravel().nonzero()[0].tolist() for name, rows in graph.splits.items()} == {
        "train": [0, 3],
        "val": [1],
        "test": [2],
    }


@pytest.mark.filterwarnings("ignore")
def test_items_of_ogb() -> None:
    """Fails if an item is taken for a list of graphs, or its features of edges or years pass in silence."""
    item, labels = Ogb()[0]
    assert mggcn.load((item, labels)).num_classes == 2
    assert mggcn.load(item).labels is None
    for count in (np.array([4]), torch.tensor([4]), np.int64(4)):
        assert mggcn.load(item | {"num_nodes": count}).num_vertices == 4
    for count in (np.array([4, 4]), 4.5):
        with pytest.raises(GraphError, match="must be one whole number"):
            mggcn.load(item | {"num_nodes": count})
    assert mggcn.load([item, item]).num_edges == 8
    assert 'not read: graph["node_year"]' in str(mggcn.describe(mggcn.load(item | {"node_year": np.ones((4, 1))})))
    with pytest.raises(GraphError, match=r'graph\["edge_feat"\].* 8 numbers per edge'):
        mggcn.load(item | {"edge_feat": np.ones((4, 8))})
    with pytest.raises(GraphError, match="several kinds"):
        mggcn.load(({"edge_index_dict": {}}, {}))
    ndata = {"feat": torch.ones(4, 1)}
    dgl = SimpleNamespace(edges=lambda: tuple(RING), num_nodes=lambda: 4, ndata=ndata, edata={})
    assert mggcn.load((dgl, torch.arange(4))).num_classes == 4


def test_graphs_of_several_types_name_the_way_out() -> None:
    """Fails if one type is read as the whole, or an error of the other library comes through."""
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(2, 1), torch.ones(3, 1)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(GraphError, match=r"HeteroData has several types.*data.to_homogeneous\(\)"):
        mggcn.load(data)
    assert mggcn.load(data.to_homogeneous()).num_vertices == 5

    def refused() -> None:
        raise RuntimeError("Edge type name must be specified")

    for types in ({"ntypes": ["a", "b"]}, {"canonical_etypes": [("a", "x", "a"), ("a", "y", "a")]}):
        graph = SimpleNamespace(edges=refused, num_nodes=lambda: 2, ndata={}, edata={}, **types)
        with pytest.raises(GraphError, match=r"not homogeneous.*dgl.to_homogeneous"):
            mggcn.load(graph)


def test_valid_is_val_everywhere(tmp_path: Path) -> None:
    """Fails if a split called valid is dropped, or kept under a name that training does not read."""
    every = {"train": [0], "valid": [1, 2], "test": [3]}
    masks = {part: np.isin(np.arange(4), ids) for part, ids in every.items()}
    np.savez(tmp_path / "lists.npz", edge_index=RING.numpy(), **every)
    np.savez(tmp_path / "masks.npz", edge_index=RING.numpy(), **{f"{part}_mask": mask for part, mask in masks.items()})
    np.savez(tmp_path / "rows.npz", indptr=[0, 1, 2, 3, 4], indices=[1, 2, 3, 0], **every)
    tensors = {f"{part}_mask": torch.from_numpy(mask) for part, mask in masks.items()}
    dgl = SimpleNamespace(edges=lambda: tuple(RING), num_nodes=lambda: 4, ndata=tensors, edata={})
    sources = [tmp_path / "lists.npz", tmp_path / "masks.npz", tmp_path / "rows.npz", dgl]
    graphs = [mggcn.load(source) for source in [*sources, Data(edge_index=RING, num_nodes=4, **tensors)]]
    for graph in [*graphs, mggcn.load(RING, splits=every)]:
        assert sorted(graph.splits) == ["test", "train", "val"]
        assert graph.splits["val"].array().tolist() == [[False, True, True, False]]
    labelled = mggcn.load(RING, labels=[0, 1, 0, 1])
    assert mggcn.load({"train": labelled, "valid": labelled}).splits["val"].array().sum() == 4
    with pytest.raises(GraphError, match="splits hold 'val' twice"):
        mggcn.load(RING, splits={"val": [1], "valid": [2]})


def test_masks_of_bytes_are_masks() -> None:
    """Fails if a mask of two vertices, in numbers of 0 and 1, is read as a list of both."""
    edges = torch.tensor([[0, 1], [1, 0]])
    data = Data(
        edge_index=edges, num_nodes=2, y=torch.tensor([0, 1]), train_mask=torch.tensor([0, 1], dtype=torch.uint8)
    )
    assert mggcn.load(data).splits["train"].array().tolist() == [[False, True]]


def test_a_folder_with_a_split_called_valid_says_what_to_rename(tmp_path: Path) -> None:
    """Fails if a foreign folder's valid.npy is left out without a word."""
    for name, array in {"indptr": [0, 1, 1], "indices": [1], "labels": [0, 1], "train": [0], "valid": [1]}.items():
        np.save(tmp_path / f"{name}.npy", np.array(array, np.int32 if name == "indices" else np.int64))
    np.save(tmp_path / "indptr_t.npy", np.array([0, 0, 1]))
    np.save(tmp_path / "indices_t.npy", np.array([0], np.int32))
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(StoreError, match=r"valid.npy.*val.npy"):
        mggcn.load(tmp_path)
