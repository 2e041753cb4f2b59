"""The rows that the loss needs, layer by layer, and their tiles, against a dense matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.splits import training_rows
from mggcn.partition import sweep as sweep_module
from mggcn.partition.make import stats_from_dict, stats_of
from mggcn.partition.order import assign, part_sizes
from mggcn.partition.rows.partition import RowPartition, RowStats, row_stats
from mggcn.partition.rows.required import (
    LEAST_SAVED,
    count_required,
    expected_required,
    expected_shares,
    required_sets,
    required_stats,
)
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr


def graph_of(dense: np.ndarray) -> Graph:
    return make_graph(dense, num_features=2, num_classes=2, seed=4)


def some_rows(n: int, share: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(n) < share


def random_dense(n: int, degree: int, seed: int) -> np.ndarray:
    """A directed graph with `degree` out-neighbours of every vertex, at random."""
    rng = np.random.default_rng(seed)
    dense = np.zeros((n, n), np.float32)
    for row in dense:
        row[rng.choice(n, degree, replace=False)] = 1
    np.fill_diagonal(dense, 0)
    return dense


@pytest.mark.parametrize("kind", ["random", "directed", "empty", "hub-row", "path"])
@pytest.mark.parametrize("loops", [False, True])
def test_counts_equal_brute_force(kind: str, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tile takes an entry of a row that is not required, or loses one, or a needed row is miscounted."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (101, 20))
    graph, required = graph_of(pattern(kind, 83, 3)), some_rows(83, 0.3, 12)
    kept = dense_csr(graph.adj_t) != 0
    if loops:
        np.fill_diagonal(kept, True)
    kept &= required[:, None]
    for ranks, order, threads in ((1, "none", 1), (3, "random", 2), (70, "permute", 1)):
        owners = assign(83, ranks, order, 5)
        found = count_required(graph, owners, required, self_loops=loops, threads=threads)
        ids = [owners.owned(r) for r in range(ranks)]
        assert found.rows == tuple(required[mine].sum() for mine in ids)
        for i, j in itertools.product(range(ranks), range(ranks)):
            block, block_t = kept[np.ix_(ids[i], ids[j])], kept.T[np.ix_(ids[i], ids[j])]
            assert found.tiles.nnz[i, j] == block.sum()
            assert found.tiles.rows_needed[i, j] == block.any(0).sum()
            assert found.tiles.rows_needed_t[i, j] == block_t.any(0).sum()


@pytest.mark.parametrize("kind", ["random", "directed", "star", "path"])
def test_sets_are_neighbourhoods(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a set lacks a row that the layer above reads, or takes out-neighbours for in-neighbours."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (101, 20))
    graph, training = graph_of(pattern(kind, 61, 3)), some_rows(61, 0.05, 9)
    sets = required_sets(graph, training, 4, 1)
    adj_t = dense_csr(graph.adj_t) != 0
    assert len(sets) == 4
    assert sets[0] is training
    for above, below in itertools.pairwise(sets):
        assert np.array_equal(below, above | adj_t[above].any(0))


def test_sets_end_where_no_more_is_saved() -> None:
    """Fails if layers are counted that would not be pruned, or a layer that would be is not."""
    path = graph_of(pattern("path", 100, 1))
    training = np.zeros(100, bool)
    training[50] = True
    owners, entries = assign(100, 2, "random", 3), 2 * 99 + 100

    def sizes(graph: Graph, training: np.ndarray, depth: int) -> list[int]:
        found = required_stats(graph, owners, training, depth, entries, self_loops=True, threads=1)
        return [rows.num_rows for rows in found]

    assert sizes(path, training, 0) == []
    assert sizes(path, training, 3) == [1, 3, 5]
    # Three nonzeros a row, two at the ends: the first set above 75 % of them is the last that is counted.
    many = sizes(path, training, 99)
    assert many[-1] == next(n for n in range(1, 100, 2) if 3 * n > (1 - LEAST_SAVED) * entries)
    assert sizes(path, np.ones(100, bool), 9) == [100]
    # No edge leads on from a pair by itself.
    pair = np.zeros((100, 100), np.float32)
    pair[3, 4] = pair[4, 3] = 1
    assert sizes(graph_of(pair), np.arange(100) == 3, 9) == [1, 2]


def test_expectation_is_close_on_a_random_graph() -> None:
    """Fails if what a bare shape is taken to need is off on the graph that it describes."""
    graph = graph_of(random_dense(1500, 6, 31))
    training = some_rows(1500, 0.06, 7)
    shares = expected_shares(training.mean(), graph.num_edges / 1500, 3)
    assert len(shares) == 3
    assert expected_shares(0.9, 3.0, 5) == [(0.9, 0.9)]
    for loops, ranks in itertools.product((False, True), (1, 3)):
        owners, counts = assign(1500, ranks, "random", 5), part_sizes(1500, ranks)
        expected = expected_required(1500, graph.num_edges, counts, shares, self_loops=loops)
        for level, required in zip(expected, required_sets(graph, training, 3, 1), strict=True):
            counted = count_required(graph, owners, required, self_loops=loops, threads=1)
            np.testing.assert_allclose(level.num_rows, counted.num_rows, rtol=0.1)
            np.testing.assert_allclose(level.num_entries, counted.num_entries, rtol=0.1)
            # Small numbers scatter.
            np.testing.assert_allclose(level.tiles.rows_needed, counted.tiles.rows_needed, rtol=0.1, atol=15)
            np.testing.assert_allclose(level.tiles.rows_needed_t, counted.tiles.rows_needed_t, rtol=0.1, atol=15)
            assert not level.tiles.exact


def test_figures_keep_what_is_wanted() -> None:
    """Fails if a run folder's plan, or one for another number of ranks, forgets the rows of training epochs."""
    graph, training = graph_of(random_dense(200, 3, 5)), some_rows(200, 0.1, 8)
    partition = RowPartition(assign(200, 3, "random", 5))
    stats = row_stats(stats_of(graph, partition, self_loops=True, training=training, depth=2))
    assert len(stats.required) == 2
    again = row_stats(stats_from_dict(stats.to_dict()))
    for level in (0, 1):
        one, other = stats.only(level), again.only(level)
        assert np.array_equal(one.tiles.nnz, other.tiles.nnz)
        assert np.array_equal(one.tiles.rows_needed_t, other.tiles.rows_needed_t)
        assert stats.required[level].rows == again.required[level].rows
        assert one.num_entries < stats.num_entries
    for ranks in (1, 3, 7):
        other = stats.resized(200, graph.num_edges, ranks, self_loops=True)
        assert other.counts == part_sizes(200, ranks)
        for mine, theirs in zip(stats.required, other.required, strict=True):
            assert theirs.num_rows == pytest.approx(mine.num_rows, abs=ranks)
            assert theirs.num_entries == pytest.approx(mine.num_entries, abs=ranks * ranks)
    assert row_stats(stats_of(graph, partition, self_loops=True)).required == ()
    assert RowStats.expected(200, 600, 2, self_loops=True).required == ()


def test_who_trains() -> None:
    """Fails if the second family or another split is taken for the first, or a missing one is an error in a plan."""
    graph = graph_of(pattern("path", 9, 1))
    rows = np.stack([np.arange(9) == 2, np.arange(9) > 5])
    graph.splits["alt_train"] = ArrayRows(rows)  # type: ignore[index]
    for split in (0, 1):
        found = training_rows(graph, "alt", split)
        assert found is not None
        assert np.array_equal(found, rows[split])
    assert training_rows(graph, "alt", 2) is None
    assert training_rows(graph_of(pattern("path", 9, 1)), "alt", 0) is None
