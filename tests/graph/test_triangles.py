from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph import triangles as counting
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Array, Graph, windows
from mggcn.graph.generate import rmat
from mggcn.graph.options import GraphOptions
from mggcn.graph.triangles import degree_profile, triangles, undirected
from tests.graph.small import csr, dense, small_graph


def expected(graph: Graph) -> Array:
    """The triangles of each vertex, from the dense matrix."""
    adj = dense(graph.untyped().adj) > 0
    adj = ((adj | adj.T) & ~np.eye(adj.shape[0], dtype=bool)).astype(np.int64)
    return np.diagonal(adj @ adj @ adj) // 2


def drawn(num_vertices: int, num_edges: int, **given: object) -> Graph:
    edges = np.random.default_rng(num_edges + 5).integers(0, num_vertices, (2, num_edges))
    return from_arrays(edges=edges, num_vertices=num_vertices, **given)  # type: ignore[arg-type]  # options or types


@pytest.mark.parametrize("num_edges", [0, 40, 400, 3000])
@pytest.mark.parametrize("symmetrize", [False, True])
def test_triangles_are_those_of_the_dense_matrix(
    num_edges: int, symmetrize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a window of edges is turned wrongly, a self-loop or a second direction counts, or a triangle twice."""
    monkeypatch.setattr(counting, "windows", partial(windows, size=64))
    graph = drawn(70, num_edges, options=GraphOptions(symmetrize=symmetrize))
    np.testing.assert_array_equal(triangles(undirected(graph)), expected(graph))


def test_relations_and_weights_do_not_count() -> None:
    """Fails if edges of two relations between two vertices are two edges."""
    types = np.random.default_rng(8).integers(0, 3, 900)
    graph = drawn(30, 900, edge_types=types)
    assert np.diff(undirected(graph).indptr.array()).max() < 30
    np.testing.assert_array_equal(triangles(undirected(graph)), expected(graph))


def test_symmetric_graphs_stay_where_they_are() -> None:
    """Fails if edges are sorted again that are in order already."""
    graph = rmat(8, 6, seed=13)
    assert undirected(graph).indices is graph.adj.indices
    np.testing.assert_array_equal(triangles(undirected(graph)), expected(graph))


def test_a_profile_is_of_each_degree() -> None:
    """A triangle 0-1-2, vertex 3 hanging on 2; vertex 4 has no edges."""
    found = degree_profile(small_graph())
    assert found.degrees.tolist() == [0, 1, 2, 3]
    assert found.counts.tolist() == [1, 1, 2, 1]
    assert found.clustering.tolist() == [0, 0, 1, pytest.approx(1 / 3)]
    assert found.num_vertices == 5


def test_a_damaged_matrix_is_refused() -> None:
    """Fails if a kernel follows an entry that is no vertex."""
    with pytest.raises(GraphError, match="damaged"):
        counting.triangles(csr([0, 1, 2], [1, 9], 2))
