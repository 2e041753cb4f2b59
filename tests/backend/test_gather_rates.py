"""Seconds of gathered rows: what the table of shares by width says, hits of a cache, and slices that fit it."""

from __future__ import annotations

import dataclasses

import pytest

from mggcn.backend.cuda.sizes import A100, H100, V100
from mggcn.backend.cuda.variants import RATES, choose_slices, rates_of, slicings
from mggcn.backend.gather_rates import AGAIN_BYTES, SLICES, CacheRates, gathered_row_s
from mggcn.cost.machine import find_machine

MEMORY = 3.35e12
"""Bytes per second of an H100's memory, by its data sheet."""
FAR = 10**12
SMALL = CacheRates(1000.0, 100.0, 10.0, 0.5)
REDDIT = (232_965, 114_848_857, 232_965)
PRODUCTS = (2_449_029, 126_167_309, 2_449_029)


@pytest.mark.parametrize(
    ("row_bytes", "least", "most"),
    [(64, 0.40, 0.50), (128, 0.52, 0.60), (256, 0.62, 0.70), (512, 0.68, 0.75), (1024, 0.72, 0.80), (2048, 0.72, 0.80)],
)
def test_shares_of_the_memory_by_width(row_bytes: int, least: float, most: float) -> None:
    """Fails if narrow rows come as fast as wide ones, or the model promises what careful estimates of an H100 do not."""
    moved = row_bytes + 4
    seconds = RATES.row_s(row_bytes, FAR) + 4 / 3.0e12
    assert least <= moved / seconds / MEMORY <= most
    cached = moved / (RATES.row_s(row_bytes, 1e6) + 4 / 3.0e12)
    assert 4e12 <= cached <= 5.5e12


def test_the_choice_and_the_machine_have_the_same_rates() -> None:
    """Fails if slices are chosen by other figures than plans and benchmarks predict with."""
    assert find_machine("dgx-h100").device.gather == RATES == rates_of(H100)
    cache = find_machine("dgx-a100").device.gather.points[0][0]
    assert rates_of(A100) == dataclasses.replace(RATES, cache_bytes=cache)


def test_a_random_row_hits_as_often_as_the_cache_holds_it() -> None:
    """Fails if hits are not the cache over the operand, or a row from the cache pays for the memory."""
    assert SMALL.row_s(50, 1000) == pytest.approx(0.5)
    assert SMALL.row_s(50, 4000) == pytest.approx(0.25 * 0.5 + 0.75 * 5.5)
    # At random or with equally frequent distances; rows that were used within the cache's size come from it.
    even = ((1000, 0.25), (2000, 0.25), (4000, 0.5))
    assert gathered_row_s(SMALL, 50, 4000, even) == pytest.approx(SMALL.row_s(50, 4000))
    assert gathered_row_s(SMALL, 50, 4000, ((1000, 0.75), (4000, 0.25))) == pytest.approx(0.75 * 0.5 + 0.25 * 5.5)
    assert gathered_row_s(SMALL, 50, 4000, sharing=2) == pytest.approx(SMALL.row_s(50, 8000))


def test_slices_cost_what_they_are_made_of() -> None:
    """Fails if a slice is not a product of its own width from its part of the operand, or indices are read once."""
    rates = dataclasses.replace(RATES, cache_bytes=30e6)
    rows = 200_000
    size = rates.slice_bytes(1024, 1024 * rows)
    assert size == 128
    found = gathered_row_s(rates, 1024, 1024 * rows, long_rows=True)
    assert found == pytest.approx(8 * rates.row_s(128, 128 * rows) + 7 * AGAIN_BYTES / rates.missed)
    assert gathered_row_s(rates, 1024, 1024 * rows) == rates.row_s(1024, 1024 * rows) > 1.3 * found
    # Rows that were used lately are found by whole rows and slices alike.
    near = ((128 * 1024, 1.0),)
    assert gathered_row_s(rates, 1024, 1024 * rows, near, long_rows=True) < found


def test_slices_are_whole_lines_and_promise_enough() -> None:
    """Fails if slices have less than 128 bytes, or are chosen where the operand fits or never will, or rows are short."""
    assert min(SLICES) == 128
    for width, item in ((64, 4), (128, 4), (256, 4), (512, 4), (128, 2), (512, 2)):
        assert choose_slices(*REDDIT, width, item, H100).panel * item == 128
    for sizes, width, item, traits in (
        (REDDIT, 16, 4, H100),
        (REDDIT, 512, 4, V100),
        (PRODUCTS, 256, 4, H100),
        ((325_557, 3_216_152, 325_557), 512, 4, H100),
        ((60_000, 10_000_000, 60_000), 64, 4, H100),
    ):
        assert choose_slices(*sizes, width, item, traits).way == "rows"
    assert choose_slices(*REDDIT, 20, 2, H100).way == "rows"


def test_what_is_worth_being_timed() -> None:
    """Fails if the model's way is not first, or whole rows or slices are not timed beside it."""
    ways = slicings(*REDDIT, 512, 4, H100)
    assert [way.panel for way in ways] == [32, 64, 128, 0]
    assert [way.panel for way in slicings(*PRODUCTS, 256, 4, H100)] == [0, 128, 64, 32]
    assert len(slicings(*PRODUCTS, 32, 4, H100)) == 1
