from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

from mggcn.graph import profile as profiling
from mggcn.graph.convert import from_arrays
from mggcn.graph.options import GraphOptions
from mggcn.graph.profile import profile
from tests.graph.small import small_graph

N = 60


@pytest.mark.parametrize("symmetrize", [False, True])
@pytest.mark.parametrize("edges", [0, 20, 300])
def test_figures_are_those_of_the_dense_matrix(edges: int, symmetrize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a window of edges joins, counts or compares other vertices than its own."""
    monkeypatch.setattr(profiling, "EDGES", 7)
    monkeypatch.setattr(profiling, "WINDOW", 16)
    rng = np.random.default_rng(edges + 31)
    labels = rng.integers(-1, 4, N)
    graph = from_arrays(
        edges=rng.integers(0, N, (2, edges)),
        num_vertices=N,
        labels=labels,
        num_classes=4,
        options=GraphOptions(symmetrize=symmetrize),
    )
    adj = np.zeros((N, N), bool)
    rows = np.repeat(np.arange(N), np.diff(graph.adj.indptr.array()))
    adj[rows, graph.adj.indices.array()] = True
    found = profile(graph)
    count, member = connected_components(adj, directed=True, connection="weak")
    assert (found.num_components, found.largest_component) == (count, np.bincount(member).max())
    for axis, histogram, highest in (
        (1, found.out_degrees, found.max_out_degree),
        (0, found.in_degrees, found.max_in_degree),
    ):
        degrees = adj.sum(axis)
        bits = np.array([int(degree).bit_length() for degree in degrees])
        assert histogram == tuple(np.bincount(bits))
        assert highest == degrees.max()
    sources, targets = np.nonzero(adj)
    known = (labels[sources] >= 0) & (labels[targets] >= 0)
    left, right = labels[sources][known], labels[targets][known]
    if not left.size:
        assert found.homophily is None
        return
    edge = np.mean(left == right)
    chance = sum(np.mean(left == c) * np.mean(right == c) for c in range(4))
    assert found.homophily == pytest.approx(edge)
    assert found.adjusted_homophily == pytest.approx((edge - chance) / (1 - chance))


def test_graphs_without_classes_have_no_homophily() -> None:
    assert profile(small_graph(labels=None, splits=None)).homophily is None
    assert profile(small_graph(labels=np.ones((5, 2), np.float32))).homophily is None
    one = profile(small_graph(labels=np.zeros(5, np.int64)))
    assert (one.homophily, one.adjusted_homophily) == (1.0, None)
