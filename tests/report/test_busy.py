"""busy.py: intervals, overlap and sums, on timelines whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from mggcn.report.busy import ALONE, IDLE, breakdown, covered, length, overlap, totals, union
from mggcn.report.timeline import Stretch, Timeline
from tests.report.timelines import Made, staged_run, timeline_of


def stretches(*spans: tuple[float, float]) -> list[Stretch]:
    return [Stretch(rank=0, row="compute", op="spmm", epoch=1, start_s=a, end_s=b) for a, b in spans]


def one_rank(compute: list[tuple[float, float]], moving: list[tuple[float, float]]) -> Timeline:
    made = Made(0)
    made.epoch(1, 0.0, 100.0)
    for start, end in compute:
        made.add("compute", start, end, "spmm")
    for start, end in moving:
        made.add("communication", start, end, "broadcast", nbytes=8)
    return timeline_of([made])


def test_union_joins_what_touches_and_drops_what_is_empty() -> None:
    """Fails if time is counted twice, or a gap is closed."""
    found = union(stretches((5, 6), (0, 1), (1, 2), (3, 3), (0.5, 1.5), (8, 12), (9, 10)))
    np.testing.assert_array_equal(found, [[0, 2], [5, 6], [8, 12]])
    assert length(found) == 7
    assert union([]).shape == (0, 2)


def test_covered_agrees_with_a_raster() -> None:
    """Fails on any arrangement of two sets of intervals; the raster counts whole units."""
    rng = np.random.default_rng(613)
    for _ in range(50):
        sets = []
        for _ in range(2):
            starts = rng.integers(0, 60, rng.integers(0, 9))
            sets.append(union(stretches(*((float(s), float(s + rng.integers(0, 12))) for s in starts))))
        inside = [np.zeros(100, bool), np.zeros(100, bool)]
        for mask, intervals in zip(inside, sets, strict=True):
            for start, end in intervals.astype(int):
                mask[start:end] = True
        assert covered(*sets) == pytest.approx((inside[0] & inside[1]).sum())


@pytest.mark.parametrize(
    ("compute", "moving", "share"),
    [
        ([(0, 50)], [(10, 20), (30, 40)], 1.0),
        ([(0, 50)], [(60, 70)], 0.0),
        ([(0, 50)], [(40, 60)], 0.5),
        ([(0, 10), (20, 30), (40, 50)], [(5, 45)], 0.5),
        ([(0, 10), (5, 20)], [(0, 40)], 0.5),
        ([], [(1, 2)], 0.0),
        ([(0, 50)], [], None),
    ],
)
def test_overlap_is_the_share_of_communication_under_computation(
    compute: list[tuple[float, float]], moving: list[tuple[float, float]], share: float | None
) -> None:
    """Fails if computation that lies double counts twice, or the share is one of the computation."""
    found = overlap(one_rank(compute, moving))
    assert found == {0: share if share is None else pytest.approx(share)}


def test_overlap_is_of_each_rank_alone() -> None:
    """Fails if another rank's computation covers this one's communication."""
    parts = [Made(0), Made(1)]
    for made in parts:
        made.epoch(1, 0.0, 30.0)
    parts[0].add("compute", 0, 30, "spmm")
    parts[0].add("communication", 10, 20, "broadcast", nbytes=8)
    parts[1].add("communication", 10, 20, "broadcast", nbytes=8)
    assert overlap(timeline_of(parts)) == {0: pytest.approx(1.0), 1: 0.0}


@pytest.mark.parametrize("ranks", [1, 4])
def test_breakdown_sums_to_the_epoch(ranks: int) -> None:
    """Fails if a kind is lost, or time is counted as communication that lies under computation."""
    timeline = timeline_of(staged_run(ranks))
    for rank, seconds in breakdown(timeline).items():
        lengths = [end - start for (r, _), (start, end) in timeline.epochs.items() if r == rank]
        assert sum(seconds.values()) == pytest.approx(np.mean(lengths))
        assert min(seconds.values()) >= 0
        assert seconds["gemm"] == pytest.approx((3 * 0.8 + 3 * 0.5 + 2 * 0.4) * 1e-3)
        moved = sum(s.seconds for s in timeline.of(rank, "communication")) / 2
        share = overlap(timeline)[rank]
        assert seconds[ALONE] == pytest.approx(0.0 if share is None else moved * (1 - share))
    assert list(breakdown(timeline)[0])[-2:] == [ALONE, IDLE]


def test_totals_are_of_an_average_epoch() -> None:
    """Fails if parts of a message count as messages, epochs are added up, or a rate is given for what is in flight."""
    made = Made(0)
    for epoch, start in ((1, 0.0), (2, 100.0)):
        made.epoch(epoch, start, start + 50)
        made.add("compute", start, start + 2, "gemm", epoch=epoch, nbytes=100, flop=10)
        made.add("compute", start + 3, start + 9, "spmm", epoch=epoch, nbytes=300, flop=20)
        made.add("compute", start + 9, start + 10, "gemm", epoch=epoch, nbytes=100, flop=10)
        made.add("communication", start + 11, start + 12, "all_reduce", epoch=epoch, nbytes=64)
        made.add("communication", start + 13, start + 14, "all_reduce", epoch=epoch, nbytes=0)
        made.add("communication", start + 15, start + 16, "broadcast", epoch=epoch, nbytes=32, measured="in flight")
    spmm, gemm, summed, sent = totals(timeline_of([made]), 0)
    assert (spmm.op, spmm.calls, spmm.seconds, spmm.nbytes, spmm.flop) == ("spmm", 1, pytest.approx(6e-3), 300, 20)
    assert (gemm.op, gemm.calls, gemm.seconds, gemm.nbytes, gemm.flop) == ("gemm", 2, pytest.approx(3e-3), 200, 20)
    assert (summed.op, summed.calls, summed.seconds, summed.nbytes) == ("all_reduce", 1, pytest.approx(2e-3), 64)
    assert [t.timed for t in (spmm, gemm, summed, sent)] == [True, True, True, False]
