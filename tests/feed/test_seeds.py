"""Steps are the same for every number of ranks, and their vertices are dealt evenly, to owners where there is room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mggcn.assemble.plan import partition_graph
from mggcn.config import Config, RunConfig
from mggcn.feed.seeds import Seeds, ranges_of
from mggcn.graph.generate import community
from mggcn.partition.rows.partition import row_owners
from tests.partition.metis.test_run import needs_pymetis

TRAIN = np.sort(np.random.default_rng(5).choice(1000, 333, replace=False)).astype(np.int64)


@pytest.mark.parametrize(
    ("batch", "drop_last", "steps"), [(50, False, 7), (50, True, 6), (333, True, 1), (400, True, 1)]
)
def test_an_epoch_reads_every_training_vertex_once(batch: int, drop_last: bool, steps: int) -> None:
    """Fails if a vertex is read twice or never, a step is too large, or a run with one small step has none."""
    seeds = Seeds(TRAIN, batch, drop_last)
    assert seeds.num_steps == steps
    order = seeds.order(7, 3)
    read = [seeds.of_step(order, step) for step in range(steps)]
    assert all(part.size <= batch and (np.diff(part) > 0).all() for part in read)
    together = np.concatenate(read)
    assert np.unique(together).size == together.size
    assert together.size == (TRAIN.size if not drop_last or batch >= TRAIN.size else steps * batch)
    assert np.isin(together, TRAIN).all()


def test_epochs_and_seeds_differ_and_repeat() -> None:
    """Fails if two epochs or seeds have one order, or an order does not repeat."""
    seeds = Seeds(TRAIN, 50)
    orders = [seeds.order(seed, epoch) for seed, epoch in ((7, 3), (7, 4), (8, 3), (7, 3))]
    assert (orders[0] == orders[3]).all()
    assert all((orders[0] == other).mean() < 0.05 for other in orders[1:3])
    # Vertices move independently of where they stood: the first batches of two epochs share what chance gives.
    assert abs(np.isin(orders[0][:50], orders[1][:50]).sum() - 50 * 50 / 333) < 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("alone", [False, True])
def test_ranks_share_a_step_evenly(ranks: int, alone: bool) -> None:
    """Fails if a vertex goes to two ranks or none, shares differ by two, or an owner with room loses a vertex."""
    owner = np.random.default_rng(ranks).integers(0, ranks, 1000).astype(np.uint16)
    if alone:
        owner[:] = ranks - 1
    seeds = Seeds(TRAIN, 50, owner=owner, ranks=ranks)
    whole = Seeds(TRAIN, 50)
    for step in range(seeds.num_steps):
        together = seeds.of_step(seeds.order(1, 0), step)
        assert (together == whole.of_step(whole.order(1, 0), step)).all()
        shares = [seeds.of_rank(together, rank) for rank in range(ranks)]
        assert (np.sort(np.concatenate(shares)) == together).all()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(map(len, shares)) <= seeds.most
        for rank, share in enumerate(shares):
            mine = together[owner[together] == rank]
            assert np.isin(mine, share).all() or share.size == np.isin(share, mine).sum()


def test_fewer_vertices_than_ranks() -> None:
    """Fails if a step of two vertices cannot be shared by four ranks."""
    seeds = Seeds(np.array([3, 8]), 2, owner=np.full(10, 3, np.uint16), ranks=4)
    shares = [seeds.of_rank(seeds.of_step(seeds.order(0, 0), 0), rank) for rank in range(4)]
    assert sorted(share.size for share in shares) == [0, 0, 1, 1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("batch", [50, 64, 400])
def test_ranges_share_a_step_evenly(ranks: int, batch: int) -> None:
    """Fails if shares differ by two, a rank reads a vertex of another's range, or an epoch reads one twice or never."""
    owner = np.random.default_rng(ranks).integers(0, ranks, 1000).astype(np.uint16)
    dealt = ranges_of(TRAIN, owner, ranks)
    counts = np.bincount(dealt, minlength=ranks)
    assert counts.max() - counts.min() <= 1
    seeds = Seeds(TRAIN, batch, owner=owner, ranks=ranks, dealt=dealt)
    order, read = seeds.order(5, 2), []
    for step in range(seeds.num_steps):
        together = seeds.of_step(order, step)
        shares = [seeds.of_rank(together, rank) for rank in range(ranks)]
        assert (np.sort(np.concatenate(shares)) == together).all()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all((dealt[np.searchsorted(TRAIN, share)] == rank).all() for rank, share in enumerate(shares))
        read.append(together)
    assert (np.sort(np.concatenate(read)) == TRAIN).all()
    # Each rank shuffles its own range: its first vertices differ from epoch to epoch.
    assert (seeds.of_rank(seeds.of_step(seeds.order(5, 3), 0), 0) != seeds.of_rank(read[0], 0)).any() or batch > 333


def test_ranges_go_to_the_rank_of_largest_overlap() -> None:
    """Fails if a range is not dealt by overlap, or a tie does not go to the lowest rank."""
    # By owner: 0 has two vertices, 2 has four, 1 none: ranges (0, 0), (2, 2), (2, 2).
    owner = np.array([2, 0, 2, 2, 0, 2], np.uint16)
    assert ranges_of(np.arange(6), owner, 3).tolist() == [2, 0, 2, 1, 0, 1]


@needs_pymetis
def test_ranges_follow_a_cut() -> None:
    """Fails if fewer than nine in ten training vertices stay with the owner that METIS gave them."""
    graph = community(4000, 40000, 2, 8, seed=11, train=0.5)
    cut = partition_graph(Config(run=RunConfig(ranks=4, order="metis")), graph)
    owner, train = row_owners(cut).owner_of(slice(None)), np.flatnonzero(graph.splits["train"].array()[0])
    assert (ranges_of(train, owner, 4) == owner[train]).mean() >= 0.9


def weighted(batch: int = 20) -> tuple[Seeds, npt.NDArray[np.float64]]:
    weights = np.random.default_rng(3).choice([1.0, 0.3, 4.0], TRAIN.size)
    return Seeds(TRAIN, batch, weights=weights), weights


def test_a_vertex_is_drawn_as_often_as_its_weight_says() -> None:
    """Fails if a step reads a vertex twice, a chance is not B w / sum(w), or an epoch reads one too often."""
    seeds, weights = weighted()
    epochs, size = 400, 20
    steps, chance = seeds.num_steps, size * weights / weights.sum()
    firsts = np.zeros(TRAIN.size)
    for epoch in range(epochs):
        order = seeds.order(epoch, 1)
        parts = [seeds.of_step(order, step) for step in range(steps)]
        assert all((np.diff(part) > 0).all() and part.size == size for part in parts)
        often = np.bincount(np.searchsorted(TRAIN, np.concatenate(parts)), minlength=TRAIN.size)
        assert (np.abs(often - steps * chance) < 1).all()
        firsts[np.searchsorted(TRAIN, parts[0])] += 1
    score = (firsts - epochs * chance) ** 2 / (epochs * chance * (1 - chance))
    assert score.mean() == pytest.approx(1.0, abs=0.25)


def test_equal_weights_read_every_vertex_once() -> None:
    """Fails if drawing by weight is not the usual epoch where all weigh alike, up to rounding in the last point."""
    seeds = Seeds(TRAIN, 37, weights=np.full(TRAIN.size, 0.1))
    assert (np.sort(seeds.order(1, 0)) == TRAIN).all()
    with_all = Seeds(TRAIN, 1000, weights=np.full(TRAIN.size, 0.1))
    assert (with_all.of_step(with_all.order(4, 4), 0) == TRAIN).all()
