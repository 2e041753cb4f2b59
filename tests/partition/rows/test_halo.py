"""Halos against slices of the dense matrix, and the lists of senders against those of receivers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.partition import sweep as sweep_module
from mggcn.partition.order import assign, concatenated_by_rank
from mggcn.partition.rows.halo import Halo, build_halos
from mggcn.partition.rows.required import count_required
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import Tile
from mggcn.partition.statistics import tile_statistics
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr

KINDS = ["random", "directed", "weighted", "hub-row", "path", "empty", "disconnected"]


def dense_tile(tile: Tile, cols: int) -> np.ndarray:
    data = np.ones(tile.nnz) if tile.values is None else tile.values
    return sp.csr_matrix((data, tile.indices, tile.indptr), (tile.indptr.shape[0] - 1, cols)).toarray()


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_halos_equal_slices(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an entry is lost, a row comes that nobody needs, or two ranks disagree about which rows travel, or when."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (31, 8))
    weighted = kind == "weighted"
    graph = make_graph(pattern(kind, 37, 4), num_features=2, num_classes=2, weighted=weighted, seed=4)
    for order, loops in itertools.product(("random", "permute", "none"), (False, True)):
        options = ShardOptions(aggregates=True, norm="mean", self_loops=loops, dtype="f8", threads=1)
        owners = assign(37, ranks, order, 77)
        ids = [owners.owned(rank) for rank in range(ranks)]
        built = [build_halos(graph, owners, rank, options) for rank in range(ranks)]
        assert all((forward is backward) == graph.symmetric for forward, backward in built)
        full = dense_csr(graph.adj_t)
        if loops:
            np.fill_diagonal(full, np.where(np.diagonal(full) == 0, 1.0, np.diagonal(full)))
        for side, matrix in enumerate((full, full.T)):
            check([halos[side] for halos in built], matrix, ids)


def check(halos: list[Halo], matrix: np.ndarray, ids: list[np.ndarray]) -> None:
    """Hold the halos of all ranks to a dense matrix; ids: of every rank's rows."""
    for rank, halo in enumerate(halos):
        mine = matrix[ids[rank]]
        assert np.array_equal(dense_tile(halo.own, len(ids[rank])), mine[:, ids[rank]])
        came = []
        for owner, sender in enumerate(halos):
            start = sum(sender.sent[:rank])
            rows = sender.rows[start : start + sender.sent[rank]]
            assert len(rows) == halo.received[owner]
            assert np.array_equal(rows, np.flatnonzero((mine[:, ids[owner]] != 0).any(0)) if owner != rank else [])
            came.append(ids[owner][rows])
        assert np.array_equal(dense_tile(halo.halo, sum(halo.received)), mine[:, np.concatenate(came)])
        assert halo.rows.dtype == np.int32
        assert halo.rows.shape == (sum(halo.sent),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_halos_of_wanted_rows(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row travels that no required row needs, or the lists are not as long as the figures say."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (31, 8))
    weighted = kind == "weighted"
    graph = make_graph(pattern(kind, 37, 4), num_features=2, num_classes=2, weighted=weighted, seed=4)
    required = np.random.default_rng(6).random(37) < 0.3
    others = np.arange(ranks)
    for order, loops in (("random", True), ("none", False)):
        options = ShardOptions(aggregates=True, norm="mean", self_loops=loops, dtype="f8", threads=1)
        owners = assign(37, ranks, order, 77)
        ids = [owners.owned(rank) for rank in range(ranks)]
        built = [build_halos(graph, owners, rank, options, required) for rank in range(ranks)]
        full = dense_csr(graph.adj_t)
        if loops:
            np.fill_diagonal(full, np.where(np.diagonal(full) == 0, 1.0, np.diagonal(full)))
        kept = full * required[:, None]
        found = count_required(graph, owners, required, self_loops=loops, threads=1).tiles
        for side, (matrix, needed) in enumerate(((kept, found.rows_needed), (kept.T, found.rows_needed_t))):
            check([halos[side] for halos in built], matrix, ids)
            for rank, halos in enumerate(built):
                assert halos[side].received == tuple(needed[rank] * (others != rank))
                assert halos[side].sent == tuple(needed[:, rank] * (others != rank))


@pytest.mark.parametrize("kind", ["random", "directed"])
def test_lists_are_as_long_as_the_figures_say(kind: str) -> None:
    """Fails if what a plan reads of a partition is not what its ranks send."""
    graph = make_graph(pattern(kind, 83, 3), num_features=2, num_classes=2, seed=4)
    for loops, order in itertools.product((False, True), ("random", "none")):
        owners = assign(83, 4, order, 5)
        found = tile_statistics(graph, owners, self_loops=loops)
        options = ShardOptions(aggregates=True, norm="mean", self_loops=loops, dtype="f8", threads=1)
        built = [build_halos(graph, owners, rank, options) for rank in range(4)]
        for rank, sides in enumerate(built):
            for halo, needed in zip(sides, (found.rows_needed, found.rows_needed_t), strict=True):
                assert halo.received == tuple(needed[rank] * (np.arange(4) != rank))
                assert halo.sent == tuple(needed[:, rank] * (np.arange(4) != rank))


@pytest.mark.parametrize("order", ["random", "permute", "none"])
def test_rank_major_rows(order: str) -> None:
    """Fails if the rows of all ranks, one rank after the other, are not the rows of the whole matrix."""
    for ranks in (1, 3, 40):
        owners = assign(37, ranks, order, 12)
        whole = concatenated_by_rank(owners)
        assert whole.counts == (37,)
        assert whole.local_of(slice(None)).dtype == np.int32
        assert np.array_equal(whole.owned(0), np.concatenate([owners.owned(rank) for rank in range(ranks)]))
        ahead = concatenated_by_rank(owners, first=ranks - 1)
        others = [owners.owned(rank) for rank in range(ranks - 1)]
        assert np.array_equal(ahead.owned(0), np.concatenate([owners.owned(ranks - 1), *others]))
