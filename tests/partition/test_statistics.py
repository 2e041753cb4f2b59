"""What a partition costs, counted and expected."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mggcn.api.load import load_source
from mggcn.graph import csr as csr_module
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, Graph, rows_with_loops
from mggcn.graph.store import open_store
from mggcn.graph.store_write import LOOPS, write_store
from mggcn.partition import statistics as statistics_module
from mggcn.partition import sweep as sweep_module
from mggcn.partition.order import Assignment, assign, part_sizes, whole_graph
from mggcn.partition.statistics import (
    TileStatistics,
    critical_path,
    estimate_aggregated_nnz,
    expected_statistics,
    tile_statistics,
)
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr, dense_features


@pytest.mark.parametrize("kind", ["random", "directed", "empty", "hub-row"])
@pytest.mark.parametrize("loops", [False, True])
def test_counts_equal_brute_force(kind: str, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tile's nonzeros or needed rows are miscounted, also for more than 64 ranks and over chunks."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (23, 9))
    graph = make_graph(pattern(kind, 83, 3), num_features=2, num_classes=2, seed=4)
    adj_t = dense_csr(graph.adj_t) != 0
    if loops:
        np.fill_diagonal(adj_t, True)
    for ranks, order in itertools.product((1, 3, 70, 90), ("random", "none")):
        owners = assign(83, ranks, order, 5)
        found = tile_statistics(graph, owners, self_loops=loops)
        owned = np.zeros((ranks, 83), int)  # whether a rank owns a vertex
        for rank in range(ranks):
            owned[rank, owners.owned(rank)] = 1
        np.testing.assert_array_equal(found.nnz, owned @ adj_t @ owned.T)
        np.testing.assert_array_equal(found.rows_needed, (owned @ adj_t > 0) @ owned.T)
        np.testing.assert_array_equal(found.rows_needed_t, (owned @ adj_t.T > 0) @ owned.T)
        assert found.exact


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_store_says_its_self_loops(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if parallel self-loops count twice, a store's number is not the counted one, or another graph gets it."""
    ends = np.array([[0, 1, 1, 2, 3, 3, 3, 5], [0, 2, 1, 0, 3, 3, 3, 1]])
    typed = from_arrays(edges=ends, num_vertices=6, edge_types=np.array([0, 0, 1, 0, 0, 1, 2, 0]))
    monkeypatch.setattr(csr_module.windows, "__defaults__", (window,))
    assert rows_with_loops(typed.adj_t) == 3
    write_store(typed, tmp_path / "store")
    stored = open_store(tmp_path / "store")
    assert stored.meta[LOOPS] == 3
    entries = typed.num_edges + 3
    monkeypatch.setattr(statistics_module, "rows_with_loops", lambda _: 1 // 0)
    assert tile_statistics(stored, whole_graph(6), self_loops=True).nnz.tolist() == [[entries]]
    others = [replace(stored, adj=typed.adj, adj_t=typed.adj_t), replace(stored, meta={**stored.meta, LOOPS: 7})]
    foreign = {key: value for key, value in stored.meta.items() if key != "format_version"}
    others.append(replace(stored, meta=foreign))
    for other in others:
        with pytest.raises(ZeroDivisionError):
            tile_statistics(other, whole_graph(6), self_loops=True)


def test_expectation_is_close_on_a_random_graph() -> None:
    """Fails if the expected tiles of a bare shape are off on the graph they describe."""
    rng = np.random.default_rng(31)
    dense = np.zeros((1500, 1500), np.float32)
    for row in dense:
        row[rng.choice(1500, 12, replace=False)] = 1
    np.fill_diagonal(dense, 0)
    graph = make_graph(dense, num_features=2, num_classes=2, seed=4)
    for loops, ranks in itertools.product((False, True), (1, 3)):
        counts = part_sizes(1500, ranks)
        exact = tile_statistics(graph, assign(1500, ranks, "random", 5), self_loops=loops)
        expected = expected_statistics(1500, graph.num_edges, counts, self_loops=loops)
        assert not expected.exact
        np.testing.assert_allclose(expected.nnz, exact.nnz, rtol=0.05)
        np.testing.assert_allclose(expected.rows_needed, exact.rows_needed, rtol=0.05)


def test_critical_path_by_hand() -> None:
    """Fails if the own tile waits, a slot is used too early, or equal tiles cost more than their sum."""
    assert critical_path(np.array([[7]])) == 7
    assert critical_path(np.full((4, 4), 5)) == 20
    # Stage 2 waits until both slots' first blocks are multiplied by the slowest rank: 10, then 1.
    assert critical_path(np.array([[0, 0, 1], [10, 0, 1], [0, 0, 0]])) == 11
    none = np.zeros((3, 3), np.int64)
    assert TileStatistics(none, none, none).critical_path_over_ideal == 1.0


def ranges_of_equal_edges(graph: Graph, ranks: int) -> Assignment:
    """Consecutive ranges with as many edges each."""
    indptr = graph.adj_t.indptr.array()
    owner = np.minimum(indptr[:-1] * ranks // indptr[-1], ranks - 1).astype(np.uint16)
    counts = np.bincount(owner, minlength=ranks)
    local = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return Assignment(owner, local.astype(np.int32), tuple(counts.tolist()))


@pytest.mark.parametrize(
    ("name", "balanced", "none", "random"), [("cnr_2000", 1.65, 1.81, 1.11), ("dblp_2010", 1.14, 1.45, 1.01)]
)
def test_order_decides_the_critical_path(
    data_root: Path, name: str, balanced: float, none: float, random: float
) -> None:
    """Fails if the stages' figures leave those measured before the design, on ranges of equal edges.

    Order none has ranges of equal vertices: its rows are out of balance besides.
    """
    graph = load_source(data_root / name)
    found = [
        tile_statistics(graph, owners, self_loops=False).critical_path_over_ideal
        for owners in (
            ranges_of_equal_edges(graph, 8),
            assign(graph.num_vertices, 8, "none", 20011),
            assign(graph.num_vertices, 8, "random", 20011),
        )
    ]
    assert found[0] == pytest.approx(balanced, abs=0.01)
    assert found[1] == pytest.approx(none, abs=0.01)
    assert 1.0 <= found[2] <= random + 0.01


@pytest.mark.parametrize("loops", [False, True])
def test_aggregated_nonzeros_of_a_small_graph_are_exact(loops: bool) -> None:
    """Fails if the estimate samples where it could count, or forgets self-loops."""
    graph = make_graph(pattern("directed", 61, 9), num_features=40, num_classes=2, sparse=True, seed=4)
    adj_t = dense_csr(graph.adj_t)
    if loops:
        np.fill_diagonal(adj_t, 1)
    exact = np.count_nonzero(adj_t @ (dense_features(graph) != 0))
    assert estimate_aggregated_nnz(graph, self_loops=loops) == exact


def test_estimate_of_a_real_graph(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if S A X of coauthor_cs is not 6.6 times X and A together, or the sample is far from the count."""
    graph = load_source(data_root / "coauthor_cs")
    assert isinstance(graph.features, CSR)
    sampled = estimate_aggregated_nnz(graph, self_loops=True)
    monkeypatch.setattr(statistics_module, "SAMPLED_ROWS", 10**9)
    exact = estimate_aggregated_nnz(graph, self_loops=True)
    assert sampled == pytest.approx(exact, rel=0.05)
    assert exact / (graph.features.nnz + graph.num_edges) == pytest.approx(6.6, abs=0.3)
