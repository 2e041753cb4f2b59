"""Steps are the same for every number of ranks, and their vertices are dealt evenly, to owners where there is room."""

from __future__ import annotations

import numpy as np
import pytest

from mggcn.feed.seeds import Seeds

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
