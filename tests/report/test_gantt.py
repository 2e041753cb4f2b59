"""gantt.py: every stretch is drawn in its row, at its time, in its colour, and can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from mggcn.report import gantt
from mggcn.report.opcolours import COLOURS, shade, text_colour
from mggcn.report.timeline import Timeline
from tests.report.pictures import outside, overlaps
from tests.report.run_folders import HOSTILE
from tests.report.timelines import Made, staged_run, timeline_of


def bars(axes: Any) -> list[tuple[float, float, float, str]]:
    """Row, start, end and colour of every bar."""
    found = []
    for collection in axes.collections:
        colour = to_hex(collection.get_facecolor()[0])
        for path in collection.get_paths():
            (x0, y0), (x1, y1) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((round((y0 + y1) / 2), x0, x1, colour))
    return found


def wanted(timeline: Timeline, step: str | None = None) -> list[tuple[float, float, float, str]]:
    last = [s for s in timeline.stretches if s.epoch == 2 and (step is None or s.step == step)]
    epochs = [start for (_, epoch), (start, _) in timeline.epochs.items() if epoch == 2]
    origin = min(epochs) if step is None else min(s.start_s for s in last)
    several = len(timeline.ranks) > 1
    return [
        (
            s.rank * (1 + several) + (s.row == "communication"),
            1e3 * (s.start_s - origin),
            1e3 * (s.end_s - origin),
            shade(COLOURS[s.op], s.stage, len(timeline.ranks)),
        )
        for s in last
    ]


def assert_same_bars(found: list[Any], expected: list[Any]) -> None:
    def key(bar: Any) -> Any:
        return bar[0], round(bar[1], 6), bar[3]

    found, expected = sorted(found, key=key), sorted(expected, key=key)
    assert [(row, colour) for row, *_, colour in found] == [(row, colour) for row, *_, colour in expected]
    np.testing.assert_allclose([b[1:3] for b in found], [b[1:3] for b in expected], atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_epoch_shows_every_stretch_once(ranks: int, drawn: Callable[..., Any]) -> None:
    """Fails if a bar is missing, in another row, at another time, or in the colour of another kind or stage."""
    timeline = timeline_of(staged_run(ranks))
    axes = drawn(gantt, gantt.draw_epoch, timeline).axes[0]
    assert_same_bars(bars(axes), wanted(timeline))
    assert len(axes.get_yticklabels()) == (1 if ranks == 1 else 2 * ranks)
    low, high = axes.get_xlim()
    assert low == 0
    assert high >= max(end for _, _, end, _ in bars(axes))


def test_a_long_epoch_is_a_plain_number(drawn: Callable[..., Any]) -> None:
    """Fails if the milliseconds of an epoch of more than a second have an exponent."""
    made = Made(0)
    made.epoch(1, 0, 1880)
    made.add("compute", 0, 10, "spmm", epoch=1, step="aggregate 1")
    assert drawn(gantt, gantt.draw_epoch, timeline_of([made])).axes[0].get_title(loc="left") == "epoch 1: 1,880 ms"


def test_stages_are_numbered(drawn: Callable[..., Any]) -> None:
    """Fails if the picture is of another step than the longest, or a number is not the stage of its bar."""
    timeline = timeline_of(staged_run(4))
    axes = drawn(gantt, gantt.draw_stages, timeline).axes[0]
    step = gantt.longest_staged_step(timeline)
    assert step is not None
    assert step.startswith("aggregate")
    assert_same_bars(bars(axes), wanted(timeline, step))
    numbered = {(round(t.get_position()[1]), t.get_text()) for t in axes.texts}
    of_step = [s for s in timeline.stretches if (s.epoch, s.step) == (2, step) and s.stage is not None]
    assert numbered == {(2 * s.rank + (s.row == "communication"), str(s.stage)) for s in of_step}
    assert step in axes.get_title(loc="left")


def test_the_longest_step_is_found() -> None:
    """Fails if a step of one stage, or of another epoch, is taken."""
    made = Made(0)
    for epoch in (1, 2):
        made.epoch(epoch, 100 * epoch, 100 * epoch + 99)
    made.add("compute", 100, 190, "spmm", epoch=1, step="aggregate 4", stage=0)
    made.add("compute", 190, 195, "spmm", epoch=1, step="aggregate 4", stage=1)
    made.add("compute", 200, 240, "spmm", epoch=2, step="sparse-linear 1")
    made.add("compute", 240, 270, "spmm", epoch=2, step="aggregate 1", stage=0)
    made.add("compute", 270, 272, "spmm", epoch=2, step="aggregate 2", stage=0)
    made.add("compute", 272, 274, "spmm", epoch=2, step="aggregate 2", stage=1)
    made.add("compute", 274, 277, "spmm", epoch=2, step="aggregate 3", stage=1)
    made.add("compute", 277, 280, "spmm", epoch=2, step="aggregate 3", stage=0)
    assert gantt.longest_staged_step(timeline_of([made])) == "aggregate 3"


def test_one_rank_has_no_stages(tmp_path: Path) -> None:
    """Fails if a picture is drawn of which every bar has the same number."""
    assert gantt.draw_stages(timeline_of(staged_run(1)), tmp_path / "stages.png") is None
    assert not (tmp_path / "stages.png").exists()


@pytest.mark.parametrize("ranks", [1, 8, pytest.param(20, marks=pytest.mark.full)])
def test_pictures_are_legible(ranks: int, drawn: Callable[..., Any]) -> None:
    """Fails if texts lie over each other or are cut off, from one rank to more than are drawn."""
    timeline = timeline_of(staged_run(ranks))
    for draw in (gantt.draw_epoch, gantt.draw_stages) if ranks > 1 else (gantt.draw_epoch,):
        figure = drawn(gantt, draw, timeline)
        axes, legend = figure.axes[0], figure.legends[0]
        fixed = [axes._left_title, axes.xaxis.label, *axes.get_yticklabels(), *legend.get_texts(), legend.get_title()]
        assert overlaps(figure, [*axes.texts, *fixed]) == []
        assert outside(figure, [*axes.texts, *fixed]) == []
        assert ("first 16 of 20 ranks" in axes.get_title(loc="left")) == (ranks == 20)


def test_hostile_names_are_drawn_as_text(tmp_path: Path) -> None:
    """Fails if a step or kind reaches matplotlib as a formula or a glyph that it lacks (a warning)."""
    parts = [Made(0), Made(1)]
    for made in parts:
        made.epoch(1, 0, 10)
        for stage in (0, 1):
            made.add("compute", 4 * stage, 4 * stage + 3, HOSTILE, step=HOSTILE, stage=stage)
    timeline = timeline_of(parts)
    for draw, name in ((gantt.draw_epoch, "timeline.png"), (gantt.draw_stages, "stages.png")):
        assert draw(timeline, tmp_path / name) == tmp_path / name
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(("span_ms", "unit"), [(0.5, "µs"), (500.0, "ms"), (5000.0, "s")])
def test_the_axis_has_a_fitting_unit(span_ms: float, unit: str, drawn: Callable[..., Any]) -> None:
    """Fails if a short epoch is shown in seconds or a long one in microseconds."""
    made = Made(0)
    made.epoch(1, 0, span_ms)
    made.add("compute", 0, span_ms / 2, "gemm", step="linear 1")
    axes = drawn(gantt, gantt.draw_epoch, timeline_of([made])).axes[0]
    assert axes.get_xlabel() == f"time ({unit})"
    assert axes.get_xlim()[1] == pytest.approx(span_ms * {"µs": 1e3, "ms": 1.0, "s": 1e-3}[unit])


def test_shades_get_lighter_and_stay_readable() -> None:
    """Fails if two stages share a colour, or a number is written in a colour like its bar."""
    for colour in (COLOURS["spmm"], COLOURS["broadcast"]):
        shades = [shade(colour, stage, 8) for stage in range(8)]
        light = [sum(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in shades]
        assert light == sorted(light)
        assert len(set(shades)) == 8
        assert shades[0] == shade(colour, None, 8) == shade(colour, 0, 1) == colour
    assert text_colour("#000000") == "#ffffff"
    assert text_colour("#f0e442") != "#ffffff"
