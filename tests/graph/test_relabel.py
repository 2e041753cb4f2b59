"""Other row numbers: every array follows its vertex, and names stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.graph.check import check_graph
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.generate import community
from mggcn.graph.links import split_links
from mggcn.graph.relabel import ReorderedRows, relabelled
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of


def dense(matrix: CSR) -> Any:
    values = np.ones(matrix.nnz, np.float32) if matrix.values is None else matrix.values.array()
    return sp.csr_matrix(
        (values, matrix.indices.array(), matrix.indptr.array()), (matrix.num_rows, matrix.num_cols)
    ).toarray()


@pytest.mark.parametrize("kind", KINDS)
def test_edges_follow_their_ends(kind: str) -> None:
    """Fails if an entry is lost, goes to another row or column, or columns no longer ascend."""
    graph = graph_of(dense_of(kind))
    order = np.random.default_rng(5).permutation(graph.num_vertices)
    got = relabelled(graph, order)
    check_graph(got)
    assert got.symmetric == graph.symmetric
    assert np.array_equal(dense(got.adj), dense(graph.adj)[np.ix_(order, order)])
    assert np.array_equal(dense(got.adj_t), dense(graph.adj_t)[np.ix_(order, order)])
    assert got.ids is not None
    assert np.array_equal(got.ids.array(), order)


def test_all_arrays_follow_their_vertex() -> None:
    """Fails if features, labels, masks or names are another vertex's, read by ranges, by rows or as a whole."""
    graph = community(300, 1500, 4, 3, seed=2)
    graph = replace(graph, ids=ArrayRows(np.arange(300) * 7 + 1), meta={**graph.meta, "graphs": [["a", 0]]})
    order = np.random.default_rng(6).permutation(300)
    got = relabelled(graph, order)
    assert "graphs" not in got.meta
    pairs = {
        "features": (graph.features, got.features),
        "labels": (graph.labels, got.labels),
        "ids": (graph.ids, got.ids),
    }
    for name, (was, now) in pairs.items():
        assert isinstance(was, ArrayRows), name
        assert isinstance(now, ArrayRows | ReorderedRows), name
        assert (now.shape, now.dtype) == (was.shape, was.dtype)
        assert np.array_equal(now.array(), was.array()[order])
        assert np.array_equal(now.read(40, 90), was.array()[order][40:90])
        assert np.array_equal(now.in_place().take(np.array([3, 299, 3])), was.array()[order[[3, 299, 3]]])
    for name, rows in graph.splits.items():
        assert np.array_equal(got.splits[name].array(), rows.array()[:, order])


def test_there_and_back() -> None:
    """Fails if relations of parallel edges are exchanged, or sparse features or links are left where they were."""
    rng = np.random.default_rng(7)
    plain = split_links(community(200, 900, 2, 2, seed=4), (0.8, 0.1, 0.1), negatives=3)
    features = sp.random(200, 9, 0.2, "csr", np.float32, rng)
    rows = (features.indptr.astype(np.int64), features.indices.astype(np.int32), features.data)
    graph = replace(plain, features=CSR(*map(ArrayRows, rows), 9))
    order = rng.permutation(200)
    back = np.argsort(order)
    there = relabelled(graph, order)
    check_graph(there)
    again = relabelled(there, back)
    assert isinstance(again.features, CSR)
    assert np.array_equal(dense(again.features), features.toarray())
    assert np.array_equal(dense(again.adj), dense(graph.adj))
    for part, links in graph.links.items():
        assert np.array_equal(order[there.links[part].array()], links.array())
        assert np.array_equal(again.links[part].array(), links.array())


def test_relations_stay_with_their_edges() -> None:
    """Fails if parallel edges lose the order of their types, or values another edge's."""
    graph = typed()
    order = np.random.default_rng(8).permutation(graph.num_vertices)
    got = relabelled(graph, order)
    check_graph(got)
    for was, now in ((graph.adj, got.adj), (graph.adj_t, got.adj_t)):
        assert entries(now, order) == entries(was, np.arange(order.size))


def typed() -> Graph:
    """A graph of three relations with parallel edges."""
    rng = np.random.default_rng(9)
    ends = rng.integers(0, 12, (2, 90))
    return from_arrays(edges=ends, num_vertices=12, edge_types=rng.integers(0, 3, 90))


def entries(matrix: CSR, order: Any) -> set[tuple[int, ...]]:
    """Source, destination, relation and degree of each entry, by the numbers that vertices had."""
    assert matrix.types is not None
    assert matrix.type_degrees is not None
    rows = order[np.repeat(np.arange(matrix.num_rows), np.diff(matrix.indptr.array()))]
    columns = order[matrix.indices.array()]
    return set(
        zip(
            rows.tolist(),
            columns.tolist(),
            matrix.types.array().tolist(),
            matrix.type_degrees.array().tolist(),
            strict=True,
        )
    )
