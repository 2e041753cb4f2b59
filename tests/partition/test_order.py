"""Who owns which vertex."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mggcn.errors import ConfigError
from mggcn.partition.order import MAX_RANKS, assign, part_sizes

SIZES = [(0, 1), (1, 1), (3, 5), (10, 3), (1000, 7), (1001, 1)]


@pytest.mark.parametrize("order", ["random", "permute", "none"])
@pytest.mark.parametrize(("n", "ranks"), SIZES)
def test_every_vertex_has_one_place(order: str, n: int, ranks: int) -> None:
    """Fails if a vertex is lost or owned twice, parts differ by more than one, or local ids have gaps."""
    owners = assign(n, ranks, order, 77)
    assert owners.counts == part_sizes(n, ranks)
    assert max(owners.counts) - min(owners.counts) <= 1
    assert owners.num_ranks == ranks
    ids = [owners.owned(r) for r in range(ranks)]
    assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(n))
    for rank, mine in enumerate(ids):
        assert mine.size == owners.counts[rank]
        assert (owners.owner[mine] == rank).all()
        assert np.array_equal(owners.local[mine], np.arange(mine.size))


def test_larger_parts_are_spread() -> None:
    """Fails if all larger parts lie at one end."""
    assert part_sizes(10, 4) == (2, 3, 2, 3)


def test_what_each_order_keeps() -> None:
    """Fails if random loses the order inside a part, none is not consecutive, or P = 1 reorders without need."""
    n = 501
    for rank in range(4):
        assert (np.diff(assign(n, 4, "random", 5).owned(rank)) > 0).all()
        assert (np.diff(assign(n, 4, "none", 5).owned(rank)) == 1).all()
    assert not (np.diff(assign(n, 4, "permute", 5).owned(1)) > 0).all()
    for order in ("random", "none"):
        assert np.array_equal(assign(n, 1, order, 5).owned(0), np.arange(n))
    assert not np.array_equal(assign(n, 1, "permute", 5).owned(0), np.arange(n))


@pytest.mark.parametrize("order", ["random", "permute"])
def test_seeds_decide(order: str) -> None:
    """Fails if two seeds assign alike, or one seed twice does not."""
    one, same, other = (assign(400, 3, order, seed) for seed in (8, 8, 9))
    assert np.array_equal(one.owner, same.owner)
    assert np.array_equal(one.local, same.local)
    assert not np.array_equal(one.owner, other.owner)


def test_owners_are_balanced_over_the_ids() -> None:
    """Fails if the random assignment follows the ids, so that a rank gets more of one region."""
    owners = assign(8000, 4, "random", 3)
    for part, rank in itertools.product(range(4), range(4)):
        share = (owners.owner[part * 2000 : (part + 1) * 2000] == rank).mean()
        assert abs(share - 0.25) < 5 * (0.1875 / 2000) ** 0.5


def test_wrong_calls_are_refused() -> None:
    """Fails if too many ranks or an unknown order get through."""
    for ranks in (0, MAX_RANKS + 1):
        with pytest.raises(ConfigError, match="ranks"):
            assign(10, ranks, "random", 1)
    with pytest.raises(ConfigError, match="order"):
        assign(10, 2, "sorted", 1)
