from __future__ import annotations

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph.csr import check_csr
from mggcn.graph.pairs import csr_from_keys, distinct, draw_distinct, fill_uniformly, mirror, num_pairs, pair_keys
from tests.graph.small import dense

NONE = np.empty(0, np.int64)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("num_vertices", [1, 2, 9, 40])
def test_fill_uniformly_gives_exactly_so_many_proper_pairs(num_vertices: int, share: float, directed: bool) -> None:
    rng = np.random.default_rng(6113)
    count = round(share * num_pairs(num_vertices, directed))
    start = fill_uniformly(NONE, count // 2, num_vertices, directed, rng)
    keys = fill_uniformly(start, count, num_vertices, directed, rng)
    assert keys.size == count
    assert np.all(np.diff(keys) > 0)
    assert np.isin(start, keys).all()
    u, v = keys // num_vertices, keys % num_vertices
    assert np.all(u != v if directed else u < v)


def test_too_many_pairs_are_refused() -> None:
    with pytest.raises(GraphError, match="at most 6"):
        fill_uniformly(NONE, 7, 4, False, np.random.default_rng(1))


def test_draw_distinct_stops_at_the_count_or_when_stuck() -> None:
    rng = np.random.default_rng(29)
    assert draw_distinct(lambda count: rng.integers(10**9, size=count), 50_000, rng).size == 50_000
    np.testing.assert_array_equal(draw_distinct(lambda count: rng.integers(3, size=count), 10, rng), [0, 1, 2])
    assert draw_distinct(lambda _: NONE, 10, rng).size == 0


def test_uniform_fill_is_uniform() -> None:
    """Each of the 45 pairs of 10 vertices in about a third of 900 draws of 15: three standard deviations are 43."""
    rng = np.random.default_rng(137)
    hits = np.zeros(100, np.int64)
    for _ in range(900):
        hits[fill_uniformly(NONE, 15, 10, False, rng)] += 1
    assert np.abs(hits[hits > 0] - 300).max() < 60


def test_keys_to_csr_and_back() -> None:
    keys = distinct(pair_keys(np.array([3, 0, 2, 2, 3]), np.array([1, 1, 2, 0, 1]), 4, True))
    matrix = csr_from_keys(keys, 4)
    check_csr(matrix, "adjacency")
    expected = np.zeros((4, 4))
    expected[[0, 2, 3], [1, 0, 1]] = 1
    np.testing.assert_array_equal(dense(matrix), expected)
    np.testing.assert_array_equal(dense(csr_from_keys(mirror(keys, 4), 4)), expected.T)
