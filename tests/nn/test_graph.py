"""Graphs on a device: the order of their edges, both groupings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn.errors import BackendError, GraphError
from mggcn.graph.store import open_store, write_store
from mggcn.nn import DeviceGraph, reduce_edges
from mggcn.nn.edge_lists import by_source, of_edges
from tests.backend.edges import BY_NAME, EDGE_CASES, EdgeCase
from tests.devices import WHERE, Where
from tests.graphs import make_graph, pattern
from tests.nn.graphs import edge_order, given_order, options


def small(kind: str = "directed") -> Any:
    return make_graph(
        pattern(kind, 23, 4), num_features=3, num_classes=2, sparse=False, weighted=kind == "weighted", seed=5
    )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", EDGE_CASES, **BY_NAME)
def test_edges_are_those_that_were_given(where: Where, case: EdgeCase) -> None:
    """Fails if edges come back in another order than the rows of their operands, or one is lost."""
    given = given_order(case)
    graph = DeviceGraph.from_edges(given, num_vertices=case.num_vertices, **options(where))
    assert (graph.num_vertices, graph.num_edges) == (case.num_vertices, case.num_edges)
    assert np.array_equal(graph.edges().cpu().numpy(), given)


@pytest.mark.parametrize("kind", ["directed", "star", "empty", "weighted"])
def test_edges_of_a_graph_are_those_of_its_transpose_by_rows(kind: str, tmp_path: Path) -> None:
    """Fails if edges of a Graph or a store are not in the documented order, or weights are not in that of the edges."""
    graph = small(kind)
    write_store(graph, tmp_path / "store")
    for source in (graph, open_store(tmp_path / "store")):
        ours = DeviceGraph(source)
        adj = sp.csr_matrix(pattern(kind, 23, 4)).T.tocsr()
        adj.sort_indices()
        destinations = np.repeat(np.arange(23), np.diff(adj.indptr))
        assert np.array_equal(ours.edges().numpy(), np.stack([adj.indices, destinations]))
        if kind == "weighted":
            assert ours.edge_weights is not None
            assert np.array_equal(ours.edge_weights.numpy(), adj.data.astype(np.float32))
        else:
            assert ours.edge_weights is None


@pytest.mark.parametrize("kind", ["directed", "star", "weighted"])
def test_weighted_sum_and_gradient_of_a_graph(kind: str) -> None:
    """Fails if a symmetric graph's shared rows, or a directed one's own, give another product than the matrix."""
    graph = small(kind)
    ours = DeviceGraph(graph)
    dense = pattern(kind, 23, 4).astype(np.float64).T
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(23, 5))).requires_grad_()
    weights = ours.edge_weights
    z = (
        reduce_edges(ours, "copylhs", "sum", x)
        if weights is None
        else reduce_edges(ours, "mul", "sum", x, weights.double())
    )
    np.testing.assert_allclose(z.detach().numpy(), dense @ x.detach().numpy(), rtol=1e-6, atol=1e-6)
    g = torch.from_numpy(np.random.default_rng(2).normal(size=(23, 5)))
    z.backward(g)
    np.testing.assert_allclose(x.grad.numpy(), dense.T @ g.numpy(), rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]
    shared = ours.by_source.matrix is ours.by_destination.matrix
    assert shared == graph.symmetric


@pytest.mark.parametrize("case", EDGE_CASES, **BY_NAME)
def test_both_groupings_hold_the_same_edges(case: EdgeCase) -> None:
    """Fails if the grouping by source loses an edge, or its places do not lead back to the edge."""
    lists = of_edges(given_order(case), case.num_vertices)
    assert np.array_equal(lists.given, edge_order(case).ids)
    indptr, ends, place = by_source(lists.indptr, lists.sources)
    sources = np.repeat(np.arange(case.num_vertices), np.diff(indptr))
    edges = lists.indptr[ends] + place
    assert sorted(edges.tolist()) == list(range(case.num_edges))
    assert np.array_equal(lists.sources[edges], sources)
    assert np.array_equal(np.repeat(np.arange(case.num_vertices), np.diff(lists.indptr))[edges], ends)


def test_rows_of_an_adjacency() -> None:
    """Fails if rows are read as in-neighbours, or columns out of order and repeated ones are mixed up."""
    graph = DeviceGraph.from_csr(np.array([0, 3, 3, 5]), np.array([2, 1, 2, 0, 0]))
    assert graph.edges().tolist() == [[0, 0, 0, 2, 2], [2, 1, 2, 0, 0]]
    w = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert reduce_edges(graph, "copyrhs", "sum", rhs=w).tolist() == [24, 2, 5]
    assert DeviceGraph.from_csr(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64)).num_edges == 0


def test_number_of_vertices_is_inferred_or_given() -> None:
    """Fails if vertices behind the last edge are lost, or an id beyond the given number gets through."""
    edges = torch.tensor([[0, 3], [1, 0]])
    assert DeviceGraph.from_edges(edges).num_vertices == 4
    assert DeviceGraph.from_edges(edges, num_vertices=9).num_vertices == 9
    assert reduce_edges(DeviceGraph.from_edges(edges, num_vertices=9), "copylhs", "sum", torch.ones(9)).shape == (9,)


E = np.array([[0, 1], [1, 0]])
REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "not a graph": (GraphError, "expected a graph from mggcn.load.*got ndarray", lambda: DeviceGraph(E)),  # type: ignore[arg-type]
    "shape": (GraphError, r"shape \[2, E\]", lambda: DeviceGraph.from_edges(E[0])),
    "floats": (GraphError, "must be integers", lambda: DeviceGraph.from_edges(E.astype(float))),
    "ids": (GraphError, r"must lie in \[0, 1\)", lambda: DeviceGraph.from_edges(E, num_vertices=1)),
    "negative": (GraphError, "got -1 to 0", lambda: DeviceGraph.from_edges(E - 1, num_vertices=3)),
    "no vertices": (GraphError, "got 0; give num_vertices", lambda: DeviceGraph.from_edges(np.zeros((2, 0), int))),
    "falling": (GraphError, "indptr must rise from 0", lambda: DeviceGraph.from_csr([0, 2, 1], [0])),
    "start": (GraphError, "indptr must rise from 0", lambda: DeviceGraph.from_csr([1, 1], [0])),
    "end": (GraphError, "number of indices, 2", lambda: DeviceGraph.from_csr([0, 1], [0, 0])),
    "no rows": (GraphError, "indptr must rise", lambda: DeviceGraph.from_csr(np.array([], int), [])),
    "columns": (GraphError, r"must lie in \[0, 1\)", lambda: DeviceGraph.from_csr([0, 1], [5])),
    "float rows": (GraphError, "indptr must be integers", lambda: DeviceGraph.from_csr([0.0, 1.0], [0])),
    "device": (
        BackendError,
        'expected device "cpu" or "cuda", got "meta"',
        lambda: DeviceGraph(small(), device="meta"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_graph_is_refused(name: str) -> None:
    """Fails if damaged edges reach a kernel, or the message does not say what was expected and what came."""
    error, message, make = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def test_a_missing_gpu_is_named() -> None:
    """Fails if a machine without a GPU falls back silently, or fails without saying what is missing."""
    from mggcn.backend.cuda.presence import missing_for_cuda

    if not missing_for_cuda():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackendError):
        DeviceGraph(small(), device="cuda")
