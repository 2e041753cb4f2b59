"""Reuse distances against a plain count, what a sample of the columns makes of them, and what they say of orders."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mggcn.graph.csr import Graph
from mggcn.graph.generate import community, rmat
from mggcn.partition.locality import chunks as chunks_module
from mggcn.partition.locality import reuse as reuse_module
from mggcn.partition.locality.order import LocalitySettings, locality
from mggcn.partition.locality.reuse import (
    BOUNDS,
    UNKNOWN,
    Reuse,
    Shares,
    estimate_part_reuse,
    estimate_reuse,
    near_share,
)
from mggcn.partition.order import Assignment, assign
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of


def counted(dense: Any, owners: Assignment) -> list[Shares]:
    """Shares by bound of own tiles and of the others, use by use."""
    found: list[list[int]] = [[], []]
    ranks = range(owners.num_ranks)
    for i, j in itertools.product(ranks, ranks):
        used: list[int] = []
        first = 0
        mine = found[i != j]
        for v in owners.owned(i):
            for u in np.flatnonzero(dense[:, v]):
                if owners.owner_of(np.array([u]))[0] != j:
                    continue
                if u in used:
                    mine.append(len(used) - 1 - used.index(u))
                    used.remove(u)
                else:
                    first += 1
                used.append(int(u))
        mine += [first] * first
    shares = []
    for distances in found:
        buckets = np.searchsorted(BOUNDS, distances) if distances else np.zeros(0, int)
        counts = np.bincount(buckets.clip(max=len(BOUNDS) - 1), minlength=len(BOUNDS))
        shares.append(tuple(counts / len(distances)) if distances else ())
    return shares


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_distances_of_small_graphs(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a use is lost, belongs to the wrong tile, or its distance is not the number of other rows in between."""
    monkeypatch.setattr(chunks_module, "EDGES", 60)
    monkeypatch.setattr(chunks_module, "ROWS", 13)
    dense = dense_of(kind)
    for order, threads in itertools.product(("random", "permute", "none"), (1, 3)):
        owners = assign(dense.shape[0], ranks, order, 17)
        reuse = estimate_reuse(graph_of(dense), owners, threads)
        for got, expected in zip((reuse.own, reuse.others), counted(dense, owners), strict=True):
            assert got == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_distances_of_a_part(kind: str) -> None:
    """Fails if edges to vertices that a rank does not hold count, or its rows are taken in another order than its own."""
    dense = dense_of(kind)
    n, rank = dense.shape[0], 3
    ids = np.random.default_rng(71).permutation(n)[: 2 * n // 3]
    owner, local = np.full(n, rank + 1, np.uint16), np.full(n, -1, np.int32)
    owner[ids], local[ids] = rank, np.arange(ids.size)
    got = estimate_part_reuse(graph_of(dense), Assignment(owner, local, (0, 0, 0, ids.size, 0)), rank, 2)
    assert got == pytest.approx(counted(dense[np.ix_(ids, ids)], assign(ids.size, 1, "none", 0))[0])


def test_distances_beyond_the_first_bound() -> None:
    """Fails if distances that differ are not told apart: rows of a band are used again soon, those of its mirror late."""
    n = 1200
    dense = np.zeros((n, n), np.float32)
    for k in (0, 1, 40):
        dense[np.arange(n - k), np.arange(k, n)] = 1
    dense[np.arange(n), np.arange(n)[::-1]] = 1
    graph, owners = graph_of(dense), assign(n, 1, "permute", 23)
    for each in (owners, assign(n, 1, "none", 0)):
        reuse = estimate_reuse(graph, each, 2)
        assert reuse.own == pytest.approx(counted(dense, each)[0])
        assert 0 < near_share(reuse.own, 256) < near_share(reuse.own, 1024) < 1
        assert reuse.others == ()


def graphs() -> list[Graph]:
    return [rmat(scale=14, edge_factor=12, seed=3), community(20000, 150000, 0, 30, seed=4)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sample_tells_about_the_same(which: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if distances in the sample are not scaled to those of all columns, or the sample leans to some columns."""
    graph = graphs()[which]
    owners = locality(graph, LocalitySettings(parts=ranks, seed=3)).owners
    exact = estimate_reuse(graph, owners, 2)
    monkeypatch.setattr(reuse_module, "SAMPLED", graph.num_edges // 16)
    sampled = estimate_reuse(graph, owners, 2)
    assert sampled != exact
    pairs = [(exact.own, sampled.own)] + ([(exact.others, sampled.others)] if ranks > 1 else [])
    for all_of_them, some in pairs:
        assert np.abs(np.cumsum(all_of_them) - np.cumsum(some)).max() < 0.06


def test_random_columns_have_all_distances_equally_often() -> None:
    """Fails if the estimate does not meet what the cost model takes a random order to be: distances of 0 to N."""
    graph = graph_of_random(columns=30000, degree=20)
    shares = estimate_reuse(graph, assign(graph.num_vertices, 1, "none", 0), 2).own
    assert near_share(shares, 4096) == pytest.approx(4096 / 30000, abs=0.02)
    assert near_share(shares, 16384) == pytest.approx(16384 / 30000, abs=0.06)
    assert sum(shares) == pytest.approx(1)


def graph_of_random(columns: int, degree: int) -> Graph:
    return community(columns, columns * degree // 2, 0, 1, seed=6, homophily=0.0, power=50.0)


def test_an_order_by_locality_is_seen() -> None:
    """Fails if gathers of the clustered order are not found nearer than those of the stored one, which is random."""
    graph = graphs()[1]
    before = estimate_reuse(graph, assign(graph.num_vertices, 1, "random", 0), 2).own
    after = estimate_reuse(graph, locality(graph, LocalitySettings(parts=1)).owners, 2).own
    assert near_share(before, 1024) < 0.2
    assert near_share(after, 1024) > 0.5


def test_shares() -> None:
    """Fails if own and other tiles are not weighed by their nonzeros, or a plan's figures do not come back."""
    reuse = Reuse((0.5, 0.5, 0.0), (1.0, 0.0, 0.0))
    assert reuse.together(30, 10) == (0.625, 0.375, 0.0)
    assert Reuse((), (0.25,)).together(0, 4) == (0.25,)
    assert UNKNOWN.together(1, 1) == ()
    assert Reuse.from_dict(reuse.to_dict()) == reuse
    assert near_share((0.125, 0.25, 0.5), BOUNDS[1]) == 0.375
