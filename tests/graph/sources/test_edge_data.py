"""The one rule for edge data, over every source that has some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import mggcn
from mggcn.errors import GraphError
from mggcn.graph.csr import Graph
from tests.graph.small import dense

EDGES = np.array([[0, 1, 2, 3], [1, 2, 0, 4]])
WEIGHTS = np.array([0.5, 1.0, 2.0, 3.5])
Source = Callable[[Path, dict[str, Any]], Any]


def pyg(_: Path, held: dict[str, Any]) -> Any:
    return Data(edge_index=torch.from_numpy(EDGES), num_nodes=5, **{key: _tensor(value) for key, value in held.items()})


def saved(folder: Path, held: dict[str, Any]) -> Any:
    torch.save(pyg(folder, held), folder / "data.pt")
    return folder / "data.pt"


def dgl(_: Path, held: dict[str, Any]) -> Any:
    columns = {key: _tensor(value) for key, value in held.items()}
    return SimpleNamespace(edges=lambda: tuple(torch.from_numpy(EDGES)), num_nodes=lambda: 5, ndata={}, edata=columns)


def npz(folder: Path, held: dict[str, Any]) -> Any:
    np.savez(folder / "graph.npz", edge_index=EDGES, **held)
    return folder / "graph.npz"


def rows(folder: Path, held: dict[str, Any]) -> Any:
    """Row pointers and columns; entries in the order of EDGES."""
    np.savez(folder / "graph.npz", indptr=[0, 1, 2, 3, 4, 4], indices=EDGES[1], **held)
    return folder / "graph.npz"


def ogb(_: Path, held: dict[str, Any]) -> Any:
    return {"edge_index": EDGES, "num_nodes": 5, "node_feat": None, "edge_feat": None, **held}


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "iufb" else value


SOURCES: list[Source] = [pyg, saved, dgl, npz, rows, ogb]


def weights_of(graph: Graph) -> list[float]:
    return dense(graph.adj)[EDGES[0], EDGES[1]].tolist()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["weight", "edge_weight", "edge_weights", "Weights", "w"])
def test_weights_by_name_are_read(source: Source, name: str, tmp_path: Path) -> None:
    """Fails if a source drops weights that are called so, as numbers or as a column, floating or whole."""
    for values in (WEIGHTS, WEIGHTS[:, None], (2 * WEIGHTS).astype(np.int64)):
        graph = mggcn.load(source(tmp_path, {name: values}))
        if source is rows and values.ndim == 2:
            continue
        assert weights_of(graph) == values.ravel().tolist()
        assert "not read" not in str(mggcn.describe(graph))


@pytest.mark.parametrize("source", SOURCES)
def test_what_may_be_weights_is_refused_under_any_name(source: Source, tmp_path: Path) -> None:
    """Fails if floating numbers of edges, or features of edges, pass without a word, or the way out is none."""
    for name in ("edge_attr", "dist", "edge_feat"):
        with pytest.raises(GraphError, match=rf"{name}.* holds one number per edge, which may be its weight"):
            mggcn.load(source(tmp_path, {name: WEIGHTS}))
        with pytest.raises(GraphError, match=rf"{name}.* holds 3 numbers per edge, and no model reads features"):
            mggcn.load(source(tmp_path, {name: np.ones((4, 3))}))
        if source is not rows:
            graph = mggcn.load(source(tmp_path, {name: WEIGHTS}), weights=None)
            assert graph.adj.values is None
            assert name in str(mggcn.describe(graph))
            assert weights_of(mggcn.load(source(tmp_path, {name: WEIGHTS}), weights=WEIGHTS)) == WEIGHTS.tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_the_rest_is_named(source: Source, tmp_path: Path) -> None:
    """Fails if whole numbers, flags or names of edges, or data of vertices, vanish without a note."""
    for value in (np.arange(4), np.ones(4, bool), np.array(list("abcd"))):
        if source in (pyg, saved, dgl) and value.dtype.kind == "U":
            continue
        graph = mggcn.load(source(tmp_path, {"kind": value}))
        assert graph.adj.values is None
        assert "not read: " in (said := str(mggcn.describe(graph)))
        assert "kind" in said
    if source is not dgl:
        assert "place" in str(mggcn.describe(mggcn.load(source(tmp_path, {"place": np.ones((5, 2))}))))


def test_pickled_members_are_named_and_not_loaded(tmp_path: Path) -> None:
    """Fails if a member that nothing reads keeps an archive from being read, or is dropped without a word."""
    np.savez(tmp_path / "a.npz", edge_index=EDGES, names=np.array([{}, []], object))
    assert "not read: names of a.npz" in str(mggcn.describe(mggcn.load(tmp_path / "a.npz")))


def test_contradictions_are_refused(tmp_path: Path) -> None:
    """Fails if one of two weights is chosen, weights of another length are left, or a vertex's taken for an edge's."""
    with pytest.raises(GraphError, match=r"data.edge_weight and data.weight both hold weights of edges, and differ"):
        mggcn.load(pyg(tmp_path, {"edge_weight": WEIGHTS, "weight": 2 * WEIGHTS}))
    assert weights_of(mggcn.load(pyg(tmp_path, {"edge_weight": WEIGHTS, "weight": WEIGHTS}))) == WEIGHTS.tolist()
    with pytest.raises(
        GraphError, match=r"edge_weights of graph.npz has shape \(3,\), expected a weight for each of 4"
    ):
        mggcn.load(npz(tmp_path, {"edge_weights": WEIGHTS[:3]}))
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(
        GraphError, match=r"data.weight .*cannot tell them from the 3 vertices; give weights=data.weight"
    ):
        mggcn.load(Data(edge_index=ring, num_nodes=3, weight=torch.ones(3)))
    assert mggcn.load(Data(edge_index=ring, num_nodes=3, edge_weight=torch.arange(1.0, 4.0))).adj.values is not None
    assert "data.year" in str(mggcn.describe(mggcn.load(Data(edge_index=ring, num_nodes=3, year=torch.ones(3)))))


def test_a_plain_source_gets_no_note(tmp_path: Path) -> None:
    """Fails if what is read is called unread."""
    masks = {f"{part}_mask": torch.tensor([part == "train"] * 5) for part in ("train", "val", "test")}
    data = Data(edge_index=torch.from_numpy(EDGES), x=torch.ones(5, 1), y=torch.arange(5), num_nodes=5, **masks)
    assert "input" not in mggcn.load(data).meta
    assert mggcn.load(pyg(tmp_path, {"edge_attr": np.ones((4, 0))})).adj.values is None
    archive = npz(tmp_path, {"node_feat": np.ones((5, 1)), "labels": np.arange(5), "train_mask": np.ones(5, bool)})
    assert "input" not in mggcn.load(archive).meta


@pytest.mark.parametrize("value", [2.0, "heavy", {"a": 1}])
def test_weights_that_are_no_array_are_refused(value: object) -> None:
    """Fails if edge_weight of one number or text is dropped without a word."""
    data = pytest.importorskip("torch_geometric.data").Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    data.edge_weight = value
    with pytest.raises(GraphError, match=r"edge_weight must hold a weight for each of 2 edges"):
        mggcn.load(data)


def test_weights_that_are_nan_are_said_to_be_that() -> None:
    """Fails if a weight that is not equal to itself is told as two weights that differ."""
    data = pytest.importorskip("torch_geometric.data").Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    data.edge_weight = torch.tensor([float("nan"), 1.0])
    with pytest.raises(GraphError, match=r"NaN"):
        mggcn.load(data)
