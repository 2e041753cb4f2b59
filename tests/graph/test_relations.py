"""Edges with types: from arrays, files, PyG and DGL into a store and back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from mggcn.api.load import load_source
from mggcn.errors import GraphError
from mggcn.graph.convert import from_arrays, with_options
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.layout import graph_sha256
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.interop.objects import from_object
from tests.graph.test_store import assert_same

EDGES = np.array([[0, 0, 1, 2, 0, 3, 3, 0], [1, 1, 0, 0, 2, 1, 1, 1]])
TYPES = np.array([2, 0, 1, 1, 1, 2, 2, 0])
"""Two relations from 0 to 1, one of them listed twice, and one from 3 to 1 listed twice."""


def triples(matrix: CSR) -> list[tuple[int, ...]]:
    """Row, column, type, weight and degree of every entry."""
    rows = np.repeat(np.arange(matrix.num_rows), np.diff(matrix.indptr.array()))
    values = np.ones(matrix.nnz) if matrix.values is None else matrix.values.array()
    assert matrix.types is not None
    assert matrix.type_degrees is not None
    columns = (rows, matrix.indices.array(), matrix.types.array(), values, matrix.type_degrees.array())
    return list(zip(*(column.tolist() for column in columns), strict=True))


def typed(**changes: Any) -> Graph:
    arrays: dict[str, Any] = {"edges": EDGES, "edge_types": TYPES, "num_vertices": 4}
    return from_arrays(**(arrays | changes))


def test_types_tell_parallel_edges_apart() -> None:
    """Fails if edges of two relations become one, if one relation's do not, or a degree is another relation's."""
    graph = typed()
    text = "01011 01212 02111 10112 20112 31212"
    assert triples(graph.adj) == [tuple(map(int, edge)) for edge in text.split()]
    assert triples(graph.adj_t) == sorted((v, u, *rest) for u, v, *rest in triples(graph.adj))
    assert graph.num_relations == 3
    assert "3 relations" in graph.summary()
    summed = typed(options=GraphOptions(duplicates="sum"))
    assert triples(summed.adj)[0] == (0, 1, 0, 2, 2)
    assert triples(summed.adj)[-1] == (3, 1, 2, 2, 3)
    assert typed(num_relations=300).adj.types.dtype == np.uint16  # type: ignore[union-attr]


def test_symmetrized_edges_keep_their_type() -> None:
    """Fails if the reverse of an edge gets another type, or a degree counts one direction alone."""
    found = triples(typed(options=GraphOptions(symmetrize=True, self_loops="drop")).adj)
    assert " ".join(f"{u}{v}{t}" for u, v, t, *_ in found) == "010 011 012 021 100 101 102 132 201 312"
    assert {(v, t): degree for _, v, t, _, degree in found}[0, 1] == 2
    again = with_options(typed(), GraphOptions(symmetrize=True))
    assert triples(again.adj) == found


def test_random_types_follow_a_dictionary() -> None:
    """Fails if sorting, merging or the transpose mixes up the types or weights of any edge."""
    rng = np.random.default_rng(7)
    edges, types = rng.integers(0, 9, (2, 400)), rng.integers(0, 5, 400)
    weights = rng.integers(1, 4, 400)
    known: dict[tuple[int, ...], float] = {}
    for u, v, t, w in zip(*edges.tolist(), types.tolist(), weights.tolist(), strict=True):
        known[u, v, t] = known.get((u, v, t), 0) + w
    degrees: dict[tuple[int, int], float] = {}
    for (_, v, t), w in known.items():
        degrees[v, t] = degrees.get((v, t), 0) + w
    graph = from_arrays(edges=edges, edge_types=types, weights=weights, options=GraphOptions(duplicates="sum"))
    assert triples(graph.adj) == sorted((*key, w, degrees[key[1], key[2]]) for key, w in known.items())
    assert triples(graph.adj_t) == sorted((v, u, *rest) for u, v, *rest in triples(graph.adj))


def test_a_store_keeps_types(tmp_path: Path) -> None:
    """Fails if a file of types is lost, not checked, or not part of the graph's digest."""
    graph = typed(num_relations=4)
    write_store(graph, tmp_path / "store")
    again = open_store(tmp_path / "store", verify=True)
    assert_same(graph, again)
    assert again.num_relations == 4
    assert graph_sha256(graph) == graph_sha256(again) != graph_sha256(typed(edge_types=TYPES[::-1], num_relations=4))
    types = np.load(tmp_path / "store" / "types_t.npy")
    types[[0, 3]] = types[[3, 0]]
    np.save(tmp_path / "store" / "types_t.npy", types)
    with pytest.raises(Exception, match="SHA-256"):
        open_store(tmp_path / "store", verify=True)
    (tmp_path / "store" / "type_degrees.npy").unlink()
    with pytest.raises(Exception, match="type_degrees"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("source,target,relation\n0,1,2\n1,0,0\n", None),
        ("src dst weight type\n0 1 0.5 2\n1 0 2 0\n", [0.5, 2.0]),
        ("u,v,edge_type,edge_weight\n0,1,2,.5\n1,0,0,2\n", [0.5, 2.0]),
    ],
)
def test_a_column_of_types(tmp_path: Path, text: str, weights: list[float] | None) -> None:
    """Fails if types are taken for weights, or the header's order is not followed."""
    (tmp_path / "e.csv").write_text(text)
    graph = load_source(tmp_path / "e.csv")
    assert [(u, v, t) for u, v, t, *_ in triples(graph.adj)] == [(0, 1, 2), (1, 0, 0)]
    assert (None if graph.adj.values is None else graph.adj.values.array().tolist()) == weights


def test_files_of_types(tmp_path: Path) -> None:
    """Fails if edge_type of an archive or a companion file is left out."""
    np.savez(tmp_path / "g.npz", edge_index=EDGES, edge_type=TYPES)
    np.savetxt(tmp_path / "e.txt", EDGES.T, fmt="%d")
    np.save(tmp_path / "types.npy", TYPES)
    from_file = load_source(tmp_path / "e.txt", edge_types=tmp_path / "types.npy")
    for graph in (load_source(tmp_path / "g.npz"), from_file):
        assert triples(graph.adj) == triples(typed().adj)


class Homogeneous:
    """What is read of a DGLGraph."""

    def __init__(self, edata: dict[str, Any]) -> None:
        self.edata, self.ndata = edata, {"feat": torch.ones(4, 2)}

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(EDGES[0]), torch.from_numpy(EDGES[1])

    def num_nodes(self) -> int:
        return 4


def test_objects_with_types() -> None:
    """Fails if a library's types are left out, or its repeated edges do not count."""
    expected = triples(typed(options=GraphOptions(duplicates="sum")).adj)
    types = torch.from_numpy(TYPES)
    data = Data(edge_index=torch.from_numpy(EDGES), edge_type=types, num_nodes=4)
    assert triples(from_object(data).adj) == expected
    for name in ("etype", "_TYPE"):
        assert triples(from_object(Homogeneous({name: types})).adj) == expected
    assert from_object(Homogeneous({"_TYPE": types * 0})).num_relations == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_types": TYPES[:3]}, r"whole numbers of shape \[8\].*got int64 of shape \(3,\)"),
        ({"edge_types": TYPES / 2}, "got float64"),
        ({"edge_types": TYPES - 1}, "got -1 to 1"),
        ({"num_relations": 2}, "got 0 to 2 for 2 relations"),
        ({"edge_types": TYPES + 70000}, "at most 65,536"),
        ({"options": GraphOptions(self_loops="add")}, "would have no type"),
        ({"options": GraphOptions(duplicates="error")}, "edge 0 -> 1 of type 0 repeats"),
        ({"weights": np.arange(8)}, "edge 0 -> 1 of type 0 is listed with different weights"),
        ({"edges": None, "adj": ([0, 1, 1], [0]), "num_vertices": None}, "edge_types belong to edges"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        typed(**changes)
