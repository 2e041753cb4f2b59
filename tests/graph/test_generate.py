from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.check import check_graph
from mggcn.graph.csr import CSR, Array, Graph
from mggcn.graph.generate import community, rmat
from mggcn.graph.layout import graph_sha256
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store


def endpoints(adj: CSR) -> tuple[Array, Array]:
    indptr = adj.indptr.array()
    return np.repeat(np.arange(adj.num_rows), np.diff(indptr)), adj.indices.array()


@pytest.mark.parametrize(
    ("num_vertices", "num_edges", "num_classes"),
    [(1, 0, 1), (1, 0, 0), (2, 1, 2), (10, 45, 3), (10, 40, 1), (60, 900, 4), (5000, 40_000, 7), (300, 40_000, 3)],
)
def test_community_is_exact_simple_and_proper(num_vertices: int, num_edges: int, num_classes: int) -> None:
    """Up to the complete graph; check_graph sees self-loops twice in no row, and asymmetry."""
    graph = community(num_vertices, num_edges, 3, num_classes, seed=7193)
    check_graph(graph)
    assert (graph.num_vertices, graph.num_edges, graph.num_classes) == (num_vertices, 2 * num_edges, num_classes)
    u, v = endpoints(graph.adj)
    assert not np.any(u == v)


@pytest.mark.parametrize("homophily", [0.0, 0.35, 0.7, 1.0])
def test_community_has_the_homophily_asked_for(homophily: float) -> None:
    graph = community(8000, 50_000, 0, 10, seed=523, homophily=homophily)
    assert graph.labels is not None
    labels = graph.labels.array()
    u, v = endpoints(graph.adj)
    assert np.mean(labels[u] == labels[v]) == pytest.approx(homophily, abs=1e-4)
    assert graph.features is None


def test_community_has_hubs_skewed_classes_and_random_ids() -> None:
    graph = community(20_000, 100_000, 0, 10, seed=911)
    degrees = np.diff(graph.adj.indptr.array())
    assert degrees.max() > 20 * degrees.mean()
    assert np.median(degrees) < 0.8 * degrees.mean()
    assert graph.labels is not None
    labels = graph.labels.array()
    sizes = np.sort(np.bincount(labels))
    assert sizes[-1] > 2 * sizes[0] > 0
    assert abs(np.corrcoef(np.arange(20_000), labels)[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(20_000), degrees)[0, 1]) < 0.03


def test_splits_are_disjoint_and_of_the_shares_asked_for() -> None:
    graph = community(1000, 3000, 0, 4, seed=3, train=0.25, val=0.5)
    masks = {name: rows.array()[0] for name, rows in graph.splits.items()}
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"train": 250, "val": 500, "test": 250}
    assert np.all(masks["train"] + masks["val"].astype(int) + masks["test"] == 1)


def accuracy(features: Array, graph: Graph) -> float:
    """Test accuracy of least squares on one-hot labels."""
    assert graph.labels is not None
    labels = graph.labels.array()
    train, test = graph.splits["train"].array()[0], graph.splits["test"].array()[0]
    inputs = np.hstack([features, np.ones((len(labels), 1))])
    penalty = 10.0 * np.eye(inputs.shape[1])
    weights = np.linalg.solve(inputs[train].T @ inputs[train] + penalty, inputs[train].T @ np.eye(10)[labels[train]])
    return float(np.mean((inputs[test] @ weights).argmax(axis=1) == labels[test]))


def test_features_need_the_graph() -> None:
    """A vertex alone shows little of its class, two averages over its neighbours nearly all."""
    graph = community(10_000, 60_000, 64, 10, seed=991)
    assert graph.features is not None
    assert not isinstance(graph.features, CSR)
    features = graph.features.array()
    shape = (10_000, 10_000)
    adj = sp.csr_array((np.ones(graph.num_edges), graph.adj.indices.array(), graph.adj.indptr.array()), shape=shape)
    scale = sp.diags_array(1 / np.sqrt(adj.sum(axis=1) + 1))
    smooth = scale @ (adj + sp.eye_array(10_000)) @ scale
    assert 0.3 < accuracy(features, graph) < 0.55
    assert 0.85 < accuracy(smooth @ (smooth @ features), graph) < 0.97


@pytest.mark.parametrize("symmetric", [True, False])
def test_rmat_is_exact_skewed_and_proper(symmetric: bool) -> None:
    graph = rmat(12, 8, seed=61, symmetric=symmetric, num_features=5, num_classes=3)
    check_graph(graph)
    assert graph.symmetric == symmetric
    assert graph.num_edges == 8 * 4096 * (2 if symmetric else 1)
    u, v = endpoints(graph.adj)
    assert not np.any(u == v)
    assert np.diff(graph.adj.indptr.array()).max() > 100


MAKERS: dict[str, Callable[[int], Graph]] = {
    "community": lambda seed: community(500, 2000, 6, 3, seed=seed),
    "rmat": lambda seed: rmat(9, 4, seed=seed, num_features=6, num_classes=3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_seed_repeats_and_another_does_not(tmp_path: Path, kind: str) -> None:
    digest = graph_sha256(MAKERS[kind](83))
    assert digest == graph_sha256(MAKERS[kind](83))
    assert digest != graph_sha256(MAKERS[kind](84))
    write_store(MAKERS[kind](83), tmp_path / "store")
    again = open_store(tmp_path / "store", verify=True)
    assert graph_sha256(again) == digest
    assert again.meta["options"]["seed"] == 83


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: community(10, 46, 3, 2, seed=1), "at most 45"),
        (lambda: community(0, 0, 3, 2, seed=1), "num_vertices"),
        (lambda: community(10, 5, 3, 11, seed=1), "num_classes"),
        (lambda: community(10, 5, 3, 2, seed=1, homophily=1.5), "homophily"),
        (lambda: community(10, 5, 3, 2, seed=1, train=0.9, val=0.2), "train_plus_val"),
        (lambda: community(10, 5, 3, 2, seed=1, power=1.0), "power"),
        (lambda: rmat(31, 1, seed=1), "scale"),
        (lambda: rmat(2, 2, seed=1), "at most 6"),
        (lambda: rmat(4, 1, seed=1, a=0.9), "a_plus_b_plus_c"),
    ],
)
def test_impossible_graphs_are_refused(make: Callable[[], Graph], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make()
