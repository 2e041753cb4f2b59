"""What a batch takes beside its step, and which of the three sets the pace."""

from __future__ import annotations

from typing import Any

import pytest

from mggcn.config import SampleConfig
from mggcn.cost.batches import CROWD, MAX_AHEAD, BatchCost, RelayCost, Sample, scored_s
from mggcn.errors import ConfigError


@pytest.mark.parametrize(
    ("ahead", "computing", "expected", "words"),
    [
        (0, 2.0, 2.0 + 3.0 + 12.0, "one after the other"),
        (1, 2.0, 12.0, "as fast as the host; sample.ahead = 5 would keep up"),
        (5, 2.0, 3.0, "as fast as the upload"),
        (6, 5.0, 5.0, "as fast as computing"),
        (6, 0.0, 3.0, "as fast as the upload"),
    ],
)
def test_the_slowest_sets_the_pace_of_a_gpu(ahead: int, computing: float, expected: float, words: str) -> None:
    """Fails if what runs beside the step is added to it, or threads that draw batches do not share them."""
    cost = BatchCost(sample_s=12.0, upload_s=3.0, ahead=ahead, cores=0.0)
    assert cost.step_s(computing) == expected
    assert cost.limit(computing) == words


def test_uploads_that_wait_for_the_step_are_added_to_it() -> None:
    """Fails if batches of R-GCN, and those that ranks share, are said to be uploaded beside the step."""
    cost = BatchCost(sample_s=12.0, upload_s=3.0, ahead=4, cores=0.0, beside=False)
    assert cost.step_s(2.0) == 5.0
    assert cost.limit(2.0) == "as fast as upload and computing in turn"


@pytest.mark.parametrize(("ahead", "expected"), [(0, 17.5), (2, 15.5 / 2 * 1.03), (6, 3.5), (12, 3.5)])
def test_threads_share_the_lock_of_python(ahead: int, expected: float) -> None:
    """Fails if more threads are said to make batches faster than Python passes them on, or are proposed for it."""
    cost = BatchCost(sample_s=12.0, upload_s=1.0, ahead=ahead, cores=0.0, lock_s=3.5)
    assert cost.step_s(1.0) == pytest.approx(expected)
    if ahead == 2:
        assert cost.limit(1.0) == "as fast as the host; sample.ahead = 5 would keep up"
    if ahead == 12:
        assert cost.limit(1.0).startswith("as fast as Python passes batches on")


def test_no_setting_is_proposed_that_is_refused() -> None:
    """Fails if more batches are proposed than sample.ahead may be, or the bound is another one."""
    cost = BatchCost(sample_s=100.0, upload_s=0.5, ahead=2, cores=0.0)
    assert cost.limit(100 * (1 + 63 * CROWD) / 64 + 1e-9).endswith("sample.ahead = 64 would keep up")
    assert "no sample.ahead up to 64 keeps up: draw fewer neighbours" in cost.limit(1.0)
    SampleConfig(batch=8, fanout=(2,), ahead=MAX_AHEAD)
    with pytest.raises(ConfigError, match="ahead"):
        SampleConfig(batch=8, fanout=(2,), ahead=MAX_AHEAD + 1)


@pytest.mark.parametrize(
    ("ahead", "cores", "expected"), [(0, 4.0, 14.0), (2, 1.0, 14.0), (2, 2.0, 14.0), (2, 4.0, 8.0), (8, 48.0, 2.5)]
)
def test_threads_of_a_host_share_its_cores(ahead: int, cores: float, expected: float) -> None:
    """Fails if drawing beside the step takes nothing from it, where both have the same cores, or more than before it."""
    assert BatchCost(sample_s=12.0, upload_s=0.0, ahead=ahead, cores=cores).step_s(2.0) == expected


def test_threads_that_gather_share_a_batch() -> None:
    """Fails if cores that gather are said to draw, too, or so many batches are proposed that each has several cores."""
    sample = Sample(400_000, 1_000_000, 400)
    gathered_s = sample.seconds - Sample(0, 1_000_000, 0).seconds
    assert sample.seconds_on(8) == pytest.approx(sample.seconds - gathered_s * 7 / 8)
    cost = BatchCost(sample_s=6.0, alone_s=12.0, upload_s=1.0, ahead=2, cores=0.0)
    assert cost.step_s(1.0) == pytest.approx(3.0 * (1 + CROWD))
    assert cost.limit(1.0).endswith("sample.ahead = 19 would keep up")


def test_a_batch_of_the_samplers_note_takes_what_was_measured() -> None:
    """Fails if the seconds of a batch are far from those that a thread took for one (docs/notes/0034-sampler.md), or one
    beside an H200.
    """
    assert 0.019 < Sample(0, 869_000, 0).seconds < 0.036
    assert 0.8 < Sample(302_723, 773_353, 416).seconds / (0.028 + 0.003 + 0.024 + 0.0023) < 1.2


@pytest.mark.parametrize(("entries", "looked", "took"), [(25_860, 955_560, 0.00635), (406_924, 2_245_370, 0.03628)])
def test_a_draw_that_passes_over_rows_takes_what_was_measured(entries: int, looked: int, took: float) -> None:
    """Fails if LABOR's passes over whole rows are not priced, as were most of the seconds of a graph with hubs."""
    assert 0.75 < Sample(0, entries, 0, looked=looked).seconds / took < 1.25


def test_a_batch_of_links_takes_longer_by_its_pairs() -> None:
    """Fails if drawing and sorting pairs, or scoring them, is not priced, or far from what it took."""
    assert 0.06 < Sample(0, 0, 0, 1_000_000).seconds < 0.16
    assert 0.5 < scored_s(4_000_000, 16, ()) < 2
    assert scored_s(4_000_000, 16, (32,)) > scored_s(4_000_000, 16, ())


@pytest.mark.parametrize(
    ("batches", "computing", "expected"),
    [
        (1, 10.0, 0.5),  # all three are under way in a step, which computes for longer
        (1, 5.0, 0.5 + 6.0 - 5.0),
        (2, 5.0, 0.25),  # the first and the third together, and the second
        (2, 3.0, (0.5 + 4.0 - 3.0) / 2),
        (4, 2.0, (0.5 + 3.0 - 2.0) / 4),
    ],
)
def test_relays_hide_behind_steps(batches: int, computing: float, expected: float) -> None:
    """Fails if messages of relays that are under way in one step do not share it, or macrobatches their steps."""
    relay = RelayCost(
        exchanges=(1.0, 2.0, 3.0),
        latency_s=0.0,
        served_s=0.5,
        batches=batches,
        a_step=1 / batches,
        early=True,
        busy=0.0,
    )
    assert relay.waiting_s(computing) == pytest.approx(expected)
    assert BatchCost(sample_s=0.0, upload_s=0.0, ahead=1, cores=4.0, relay=relay).step_s(computing) == pytest.approx(
        computing + expected
    )


def test_relays_that_take_the_device_hide_nothing() -> None:
    """Fails if messages that the ranks' own cores copy cost nothing, or count twice, or those that nobody began early."""
    given: dict[str, Any] = {"exchanges": (1.0, 2.0, 3.0), "latency_s": 0.0, "served_s": 0.5, "batches": 1}
    given |= {"a_step": 1.0}
    assert RelayCost(early=True, busy=1.0, **given).waiting_s(0.0) == 6.5
    assert RelayCost(early=True, busy=1.0, **given).waiting_s(100.0) == 6.5
    assert RelayCost(early=False, busy=0.0, **given).waiting_s(100.0) == 6.5
    assert RelayCost(early=True, busy=0.0, sums_s=4.0, **given).waiting_s(6.0) == 0.5 + 6.0 - 2.0


@pytest.mark.parametrize(("early", "measured"), [(True, 0.2), (False, 0.667)])
def test_relays_with_late_messages_take_what_was_measured(early: bool, measured: float) -> None:
    """Fails if delays of messages of one step add up, or those of a relay that a step waits for do not: messages that take
    200 ms each, steps of 118 (docs/notes/0041-rows-from-owners.md).
    """
    relay = RelayCost(
        exchanges=(0.0, 0.0, 1e-4), latency_s=0.2, served_s=1e-4, batches=1, a_step=1.0, early=early, busy=0.0
    )
    assert 0.118 + relay.waiting_s(0.118) == pytest.approx(measured, rel=0.1)
