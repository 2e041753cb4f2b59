"""breakdown.py: bars as long as an epoch, their parts as long as the kinds of op took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from mggcn.report import breakdown
from mggcn.report.busy import breakdown as seconds_by_kind
from mggcn.report.opcolours import COLOURS
from tests.report.pictures import outside, overlaps
from tests.report.timelines import Made, staged_run, timeline_of


@pytest.mark.parametrize("ranks", [1, 4, 20])
def test_bars_are_the_breakdown(ranks: int, drawn: Callable[..., Any]) -> None:
    """Fails if a part has another length or colour, parts leave a gap, or a text covers another."""
    timeline = timeline_of(staged_run(ranks))
    figure = drawn(breakdown, breakdown.draw_breakdown, timeline)
    axes = figure.axes[0]
    shown = min(ranks, 16)
    for rank in range(shown):
        parts = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == rank]
        parts.sort(key=lambda bar: float(bar.get_x()))
        wanted = {COLOURS[op]: 0.0 for op in COLOURS}
        for op, value in seconds_by_kind(timeline)[rank].items():
            wanted[COLOURS[op]] += 1e3 * value
        found = dict.fromkeys(wanted, 0.0)
        at = 0.0
        for bar in parts:
            assert bar.get_x() == pytest.approx(at)
            at += bar.get_width()
            found[to_hex(bar.get_facecolor())] += bar.get_width()
        assert found == pytest.approx(wanted)
    fixed = [axes._left_title, axes.xaxis.label, *axes.get_yticklabels(), *figure.legends[0].get_texts()]
    assert overlaps(figure, [*axes.texts, *fixed]) == []
    assert outside(figure, [*axes.texts, *fixed]) == []
    assert len(axes.texts) >= 2 * shown


def test_the_legend_gives_the_shares_of_all_ranks(drawn: Callable[..., Any]) -> None:
    """Fails if the shares are of one rank alone, do not sum to all, or kinds without a colour are lost."""
    parts = [Made(0), Made(1)]
    for made, length in zip(parts, (10.0, 30.0), strict=True):
        made.epoch(1, 0, length)
        made.add("compute", 0, 5, "spmm")
        made.add("compute", 5, 7, "gather")
        made.add("compute", 7, 9, "scatter")
    figure = drawn(breakdown, breakdown.draw_breakdown, timeline_of(parts))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["spmm 25.0 %", "other 20.0 %", "idle or waiting 55.0 %"]
    assert sum(float(label.split()[-2]) for label in labels) == pytest.approx(100)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(widths, [5, 4, 1, 5, 4, 21])
