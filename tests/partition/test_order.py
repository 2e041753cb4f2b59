"""Who owns which vertex."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mggcn.errors import ConfigError
from mggcn.partition.order import MAX_RANKS, Ranges, assign, part_sizes
from mggcn.partition.rows.partition import RowPartition
from tests.partition.test_ranges import in_arrays

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
        assert (owners.owner_of(mine) == rank).all()
        assert np.array_equal(owners.local_of(mine), np.arange(mine.size))


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
    everyone = slice(None)
    assert np.array_equal(one.owner_of(everyone), same.owner_of(everyone))
    assert np.array_equal(one.local_of(everyone), same.local_of(everyone))
    assert not np.array_equal(one.owner_of(everyone), other.owner_of(everyone))


def test_owners_are_balanced_over_the_ids() -> None:
    """Fails if the random assignment follows the ids, so that a rank gets more of one region."""
    owners = assign(8000, 4, "random", 3)
    for part, rank in itertools.product(range(4), range(4)):
        share = (owners.owner_of(slice(part * 2000, (part + 1) * 2000)) == rank).mean()
        assert abs(share - 0.25) < 5 * (0.1875 / 2000) ** 0.5


def test_wrong_calls_are_refused() -> None:
    """Fails if too many ranks or an unknown order get through."""
    for ranks in (0, MAX_RANKS + 1):
        with pytest.raises(ConfigError, match="ranks"):
            assign(10, ranks, "random", 1)
    with pytest.raises(ConfigError, match="order"):
        assign(10, 2, "sorted", 1)


@pytest.mark.parametrize("bounds", [[0, 9], [0, 4, 9], [0, 0, 3, 3, 9], [0, 2, 9, 9], [0, 0]])
def test_bounds_say_what_arrays_do(bounds: list[int]) -> None:
    """Fails if a vertex beside a bound, or of a rank beside an empty one, is another rank's, or rows do not begin at 0."""
    ranges = Ranges(np.array(bounds))
    arrays = in_arrays(ranges)
    num, ranks = bounds[-1], len(bounds) - 1
    assert (ranges.counts, ranges.num_ranks) == (arrays.counts, arrays.num_ranks)
    assert ranges.num_vertices == arrays.num_vertices == num
    some = np.array([8, 0, 3, 3, 4, 2], np.int32)[: 6 if num else 0]
    for vertices in (slice(None), slice(1, 7), slice(5, 5), some, some.astype(np.int64)):
        for got, expected in (
            (ranges.owner_of(vertices), arrays.owner_of(vertices)),
            (ranges.local_of(vertices), arrays.local_of(vertices)),
        ):
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)
    chosen = np.arange(num) % 3 != 1
    assert ranges.count(chosen).tolist() == arrays.count(chosen).tolist()
    for rank in range(ranks):
        assert np.array_equal(ranges.owned(rank), arrays.owned(rank))
        assert list(ranges.span(rank)) == ranges.owned(rank).tolist()
        assert set(arrays.span(rank)) >= set(ranges.owned(rank).tolist())
        assert ranges.in_order(rank)
        assert arrays.in_order(rank)
    assert RowPartition(ranges).digest() == RowPartition(arrays).digest()
    assert (ranges.nbytes, arrays.nbytes) == (8 * len(bounds), 6 * num)
