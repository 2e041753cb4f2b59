"""Splits of edges into links that train, validate and test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mggcn
from mggcn.errors import ConfigError, GraphError, StoreError
from mggcn.graph.check import check_graph
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.links import split_links
from tests.graph.small import dense, small_graph
from tests.graphs import make_graph, pattern

SHARES = (0.7, 0.1, 0.2)


def graph_of(kind: str, n: int = 83) -> Graph:
    adj = pattern(kind, n, 12)
    adj[5, 5] = 1
    return make_graph(adj, num_features=3, num_classes=2, weighted=kind == "weighted", seed=3)


def pairs(rows: ArrayRows) -> set[tuple[int, int]]:
    return {(int(u), int(v)) for u, v in rows.array()[:, :2]}


@pytest.mark.parametrize("kind", ["random", "directed", "weighted"])
def test_links_are_a_partition_of_the_edges(kind: str) -> None:
    """Fails if an edge is lost, in two parts, or a link to be scored, or its reverse, is left in the graph."""
    graph = graph_of(kind)
    found = split_links(graph, SHARES, negatives=4, seed=9)
    before, after = dense(graph.adj), dense(found.adj)
    np.testing.assert_array_equal(dense(found.adj_t), after.T)
    assert (after[after != 0] == before[after != 0]).all()
    assert after[5, 5] == before[5, 5] == 1
    parts = {name: pairs(rows) for name, rows in found.links.items()}  # type: ignore[arg-type]  # Rows, all in memory here
    both = {name: some | {(v, u) for u, v in some} for name, some in parts.items()}
    assert not both["val"] & both["test"]
    assert not both["train"] & (both["val"] | both["test"])
    for u, v in both["val"] | both["test"]:
        assert after[u, v] == after[v, u] == 0
    edges = {(int(u), int(v)) for u, v in zip(*np.nonzero(before), strict=True) if u != v}
    named = both if graph.symmetric else parts
    assert edges == named["train"] | named["val"] | named["test"]
    assert {(int(u), int(v)) for u, v in zip(*np.nonzero(after), strict=True) if u != v} == named["train"]
    count = len(edges) // (1 + graph.symmetric)
    sizes = [found.links[name].shape[0] for name in ("train", "val", "test")]
    assert sum(sizes) == count
    slack = 0 if graph.symmetric else 2  # an edge and its reverse belong together
    np.testing.assert_allclose(sizes[1:], [round(0.1 * count), round(0.2 * count)], atol=slack)
    assert found.task == "links"
    assert found.labels is None
    assert not found.splits


def test_negatives_are_no_edges_and_have_names() -> None:
    """Fails if a negative is an edge of any part or a loop, or depends on more than the seed and the link's number."""
    graph = graph_of("random", 31)
    found, again, other = (split_links(graph, SHARES, negatives=6, seed=seed) for seed in (4, 4, 5))
    edges = dense(graph.adj)
    for name in ("val", "test"):
        rows = found.links[name].array()
        assert rows.shape[1] == 8
        assert not edges[rows[:, :1], rows[:, 2:]].any()
        assert (rows[:, :1] != rows[:, 2:]).all()
        np.testing.assert_array_equal(rows, again.links[name].array())
    assert pairs(found.links["test"]) != pairs(other.links["test"])  # type: ignore[arg-type]  # as above
    sources = np.concatenate([rows.array()[:, 0] < rows.array()[:, 1] for rows in found.links.values()])
    assert 0.3 < sources.mean() < 0.7  # an undirected link has either end as its source


def test_directed_negatives_have_no_edge_in_either_direction() -> None:
    """Fails if v -> u is no reason not to compare u -> v with it, though scores do not tell which end comes first."""
    graph = graph_of("directed", 31)
    edges = dense(graph.adj)
    assert (edges != edges.T).any()
    for name, rows in split_links(graph, SHARES, negatives=9, seed=4).links.items():
        if name != "train":
            links = rows.array()
            assert not (edges + edges.T)[links[:, :1], links[:, 2:]].any()


def hubs(n: int, absent: int) -> Graph:
    """Vertex 0 has edges to all but the last `absent`, and others are in a ring."""
    adj = np.roll(np.eye(n), 1, 1)
    adj[0, : n - absent] = 1
    adj = np.maximum(adj, adj.T)
    np.fill_diagonal(adj, 0)
    return make_graph(adj, num_features=1, num_classes=1, seed=1)


def test_negatives_of_a_hub_are_all_that_are_left() -> None:
    """Fails if a vertex with edges to nearly all others is refused, or what it has no edge to is not drawn alike."""
    graph = hubs(400, 4)
    found = split_links(graph, (0.5, 0.25, 0.25), negatives=50, seed=2)
    edges = dense(graph.adj)
    drawn = np.concatenate([rows.array() for name, rows in found.links.items() if name != "train"])
    assert not edges[drawn[:, :1], drawn[:, 2:]].any()
    assert (drawn[:, :1] != drawn[:, 2:]).all()
    of_hub = drawn[drawn[:, 0] == 0, 2:]
    left = np.flatnonzero(edges[0] == 0)[1:]
    counts = np.bincount(of_hub.ravel(), minlength=400)
    np.testing.assert_allclose(counts[left], of_hub.size / left.size, atol=4 * (of_hub.size / left.size) ** 0.5)


def test_links_of_a_vertex_with_all_edges() -> None:
    """Fails if an undirected link keeps a source without negatives, or what is left out of a directed graph is not said."""
    graph = hubs(60, 0)
    found = split_links(graph, (0.5, 0.25, 0.25), negatives=3)
    assert all((rows.array()[:, 0] > 0).all() for name, rows in found.links.items() if name != "train")
    assert "not scored" not in str(mggcn.describe(found))
    directed = make_graph(np.triu(dense(graph.adj)), num_features=1, num_classes=1, seed=1)
    found = split_links(directed, (0.5, 0.25, 0.25), negatives=3)
    some = sum(rows.shape[0] for rows in found.links.values())
    assert 0 < some < directed.num_edges
    assert f"{directed.num_edges - some} links are not scored" in str(mggcn.describe(found))


def test_a_store_keeps_links(tmp_path: Path) -> None:
    """Fails if a part is lost on the way through a store, does not belong to its digest, or a damaged one opens."""
    graph = split_links(graph_of("directed"), SHARES)
    stored = mggcn.save(graph, tmp_path / "store")
    assert stored.task == "links"
    assert list(stored.links) == ["train", "val", "test"]
    for name, rows in graph.links.items():
        np.testing.assert_array_equal(stored.links[name].array(), rows.array())
    assert stored.meta["links"] == {"shares": [0.7, 0.1, 0.2], "negatives": 20, "seed": 1}
    assert f"links: {graph.links['train'].shape[0]} train, " in stored.summary()
    np.save(tmp_path / "store" / "val_links.npy", graph.links["val"].array()[:-1])
    with pytest.raises(StoreError, match=r"val_links"):
        mggcn.load(tmp_path / "store", verify=True)


def test_other_shares_leave_parts_empty() -> None:
    """Fails if a share of 0 or all edges goes wrong."""
    graph = graph_of("random")
    assert set(split_links(graph, (1, 0, 0)).links) == {"train"}
    assert set(split_links(graph, (0.5, 0, 0.5)).links) == {"train", "test"}


@pytest.mark.parametrize(
    ("graph", "arguments", "words"),
    [
        (small_graph(), {"shares": (0.8, 0.1)}, "three shares that add up to 1"),
        (small_graph(), {"shares": (0.8, 0.1, 0.2)}, "got 0.8,0.1,0.2"),
        (small_graph(), {"shares": (0, 0.5, 0.5)}, "three shares"),
        (small_graph(), {"negatives": 0}, "negatives must be"),
        (small_graph(), {"seed": -1}, "seed of links"),
        (small_graph(), {"shares": (0.01, 0.5, 0.49)}, "no link to train on"),
        (small_graph(edge_types=np.arange(8)), {}, "typed edges are not supported"),
        (small_graph(), {"shares": "0.5,0.25,0.25"}, "as numbers"),
        (small_graph(), {"shares": 0.5}, "as numbers"),
        (small_graph(), {"shares": (0.5, 0.25, "a")}, "as numbers"),
        (small_graph(), {"negatives": 1.5}, "got 1.5"),
        (small_graph(), {"seed": 1.5}, "whole number"),
        (small_graph(), {"seed": True}, "whole number"),
        (small_graph(), {"shares": (0.9, 0.05, 0.05)}, "share 0.05 of its 4 links is too few"),
        (split_links(small_graph(), (0.5, 0.5, 0)), {}, "split into links already"),
        (make_graph(1 - np.eye(6), num_features=1, num_classes=1, seed=1), {}, "edges to or from all"),
    ],
)
def test_bad_splits_are_refused(graph: Graph, arguments: dict[str, object], words: str) -> None:
    """Fails if a split that cannot be is made, or refused in other words than these."""
    with pytest.raises((ConfigError, GraphError), match=words):
        split_links(graph, **({"shares": (0.5, 0.25, 0.25)} | arguments))  # type: ignore[arg-type]  # wrong ones


@pytest.mark.parametrize(
    ("part", "rows", "words"),
    [
        ("val", [[0, 1, 5]], "val link 0 names a vertex outside 0 .. 4"),
        ("train", np.zeros((0, 2)), "none to train on"),
        ("test", [[0, 1]], "equally many negatives"),
        ("train", [[0, 1, 2]], r"got rows of 3 \(train\)"),
    ],
)
def test_links_of_foreign_folders_are_checked(part: str, rows: object, words: str) -> None:
    """Fails if links that training would trust are not looked at."""
    graph = split_links(small_graph(), (0.5, 0.25, 0.25), negatives=1)
    links = {**graph.links, part: ArrayRows(np.asarray(rows, np.int32))}
    with pytest.raises(GraphError, match=words):
        check_graph(replace(graph, links=links))
