"""Draws by name on the host against their twin in Python."""

from __future__ import annotations

import itertools

import numpy as np

from mggcn.feed import history, pairs
from mggcn.graph import links
from mggcn.graph.philox import draw_below
from mggcn.train import learned
from tests.blocks.sample_twin import philox

BIG = 5_000_000_001


def test_draws_are_philox_words_times_the_bound() -> None:
    """Fails if a draw's name, or how 64 bits become a number below the bound, changes."""
    items = np.array([0, 7, BIG])
    for bound in (1, 10, 2**31 - 1):
        found = draw_below(bound, (71, 5), items, 5, stream=0xC0000000, salt=3)
        assert found.shape == (3, 5)
        for item, row in zip(items.tolist(), found.tolist(), strict=True):
            for number, drawn in enumerate(row):
                counter = (0xC0000000 + number // 2, item % 2**32, item >> 32, 3)
                words = philox(71, 5, counter)[2 * (number % 2) :]
                assert drawn == (words[0] << 32 | words[1]) * bound >> 64
    bounds = np.array([3, 10, 2**31])
    found = draw_below(bounds, (71, 5), items, 5, stream=0xC0000000, salt=3)
    for number, bound in enumerate(bounds.tolist()):
        alone = draw_below(bound, (71, 5), items, 5, stream=0xC0000000, salt=3)
        np.testing.assert_array_equal(found[number], alone[number])


def test_draws_are_uniform() -> None:
    """Fails if some numbers are drawn more often than others: a chi-square with 96 degrees of freedom."""
    found = draw_below(97, (1931, 0), np.arange(20_000), 3, stream=0xC0000000)
    counts = np.bincount(found.ravel(), minlength=97)
    mean = found.size / 97
    assert 52 < ((counts - mean) ** 2 / mean).sum() < 152  # p from 0.9999 to 0.0003


def test_streams_lie_apart() -> None:
    """Fails if two kinds of draws have counters in common: each has 2^28 of them."""
    firsts = sorted([pairs.STREAM, history.STREAM, links.STREAM, learned.STREAM])
    assert firsts[0] >= 0xC0000000
    assert all(later - first >= 2**28 for first, later in itertools.pairwise([*firsts, 2**32]))
