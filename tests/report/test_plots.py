"""curves.py, memory.py, tiles.py and figure.py: what is drawn is what the run folder says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from mggcn.report import curves, memory, tiles
from mggcn.report.figure import MIB, drawable, format_bytes, format_count
from mggcn.report.run_folder import read_run
from tests.report.pictures import overlaps
from tests.report.run_folders import make_plan, write_run


def visible_ticks(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def test_memory_map_draws_every_train_buffer_in_its_place(drawn: Callable[..., Any]) -> None:
    plan = make_plan(2)
    axes = drawn(memory, memory.draw_memory, plan).axes[0]
    found = {(p.get_x() + 0.5, p.get_y(), p.get_width(), p.get_height()) for p in axes.patches if type(p) is Rectangle}
    wanted = {
        (b["first"], b["offset"] / MIB, b["last"] - b["first"] + 1, b["nbytes"] / MIB)
        for b in plan["per_rank"][0]["buffers"]
        if b["program"] == "train"
    }
    np.testing.assert_allclose(sorted(found), sorted(wanted))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == plan["programs"]["train"]


@pytest.mark.parametrize("layers", [1, 8])
def test_memory_map_is_legible(drawn: Callable[..., Any], layers: int) -> None:
    """Labels stay inside their buffers and tick labels do not overlap, for 8 to 43 ops."""
    figure = drawn(memory, memory.draw_memory, make_plan(3, layers))
    axes = figure.axes[0]
    assert overlaps(figure, axes.texts) == []
    assert overlaps(figure, axes.get_xticklabels()) == []
    assert overlaps(figure, [axes.title, axes._left_title, *axes.get_legend().get_texts()]) == []
    renderer = figure.canvas.get_renderer()
    boxes = [p.get_window_extent(renderer) for p in axes.patches if type(p) is Rectangle]
    assert len(axes.texts) >= layers + 1, "the large buffers are named"
    for text in axes.texts:
        inner = text.get_window_extent(renderer)
        assert any(b.x0 <= inner.x0 and inner.x1 <= b.x1 and b.y0 <= inner.y0 and inner.y1 <= b.y1 for b in boxes)


def test_memory_map_survives_an_empty_program(drawn: Callable[..., Any]) -> None:
    plan = make_plan(1)
    plan["programs"]["train"] = []
    plan["per_rank"][0] |= {"buffers": [], "arena_bytes": 0, "regions": {}, "total_bytes": 0}
    drawn(memory, memory.draw_memory, plan)


@pytest.mark.parametrize("ranks", [40])
def test_regions_stack_to_the_total(drawn: Callable[..., Any], ranks: int) -> None:
    plan = make_plan(ranks)
    axes = drawn(memory, memory.draw_memory, plan).axes[1]
    tops = [0.0] * ranks
    for container in axes.containers:
        for rank, bar in enumerate(container):
            assert bar.get_y() == pytest.approx(tops[rank])
            tops[rank] += bar.get_height()
    np.testing.assert_allclose(
        tops, [(entry["total_bytes"] - entry["regions"]["runtime"]) / MIB for entry in plan["per_rank"]]
    )


def test_no_two_regions_look_alike(drawn: Callable[..., Any]) -> None:
    """Fails if a ninth region has the first one's colour and nothing else."""
    plan = make_plan(1)
    plan["per_rank"][0]["regions"] = {f"region {number}": MIB for number in range(12)}
    bars = [container[0] for container in drawn(memory, memory.draw_memory, plan).axes[1].containers]
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 12


@pytest.mark.parametrize(("nonzeros", "name"), [(9_000, ""), (98_000, "k"), (130_000, "k"), (2_400_000, "M")])
def test_counts_of_an_axis_have_one_unit(drawn: Callable[..., Any], nonzeros: int, name: str) -> None:
    """Fails if an axis mixes `80,000` with `100 k`."""
    plan = make_plan(1)
    plan["partition"]["nnz"] = [[nonzeros]]
    axis = drawn(tiles, tiles.draw_tiles, plan).axes[1].yaxis
    words = [tick.get_text() for tick in visible_ticks(axis)]
    assert words[0] == "0"
    assert {word.partition(" ")[2] for word in words[1:]} == {name}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 16, 40])
def test_tiles_annotate_shares_that_sum_to_all(drawn: Callable[..., Any], ranks: int) -> None:
    plan = make_plan(ranks)
    figure = drawn(tiles, tiles.draw_tiles, plan)
    map_axes, bar_axes = figure.axes
    nnz = np.array(plan["partition"]["nnz"])
    np.testing.assert_allclose([bar.get_height() for bar in bar_axes.patches], nnz.sum(axis=1))
    assert "1.034" in figure._suptitle.get_text()
    shares = [float(text.get_text()) for text in map_axes.texts]
    assert len(shares) == (ranks**2 if ranks <= 16 else 0)
    assert not shares or sum(shares) == pytest.approx(100, abs=0.05 * ranks**2)
    assert overlaps(figure, [*map_axes.texts, *bar_axes.texts]) == []
    assert overlaps(figure, [*visible_ticks(map_axes.xaxis), *visible_ticks(bar_axes.xaxis)]) == []


def test_a_cut_shows_its_leaves_in_place_of_tiles(drawn: Callable[..., Any]) -> None:
    """Fails if the report of a vertex cut looks for tiles, or shows the nonzeros as if they were copies."""
    plan = make_plan(3)
    leaves = [[[0, 2, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 1], [0, 0, 0], [0, 4, 0]]]
    plan["partition"] = {"kind": "cut", "nnz": [[5, 1, 2], [3, 3, 2], [0, 9, 0]], "leaves": leaves, "replication": 1.25}
    figure = drawn(tiles, tiles.draw_tiles, plan)
    map_axes, bar_axes = figure.axes
    assert [bar.get_height() for bar in bar_axes.patches] == [8, 8, 9]
    assert sorted(float(text.get_text()) for text in map_axes.texts)[-4:] == [12.5, 12.5, 25.0, 50.0]
    assert "1.250 copies" in figure._suptitle.get_text()


def test_tiles_without_edges(drawn: Callable[..., Any]) -> None:
    plan = make_plan(2)
    plan["partition"]["nnz"] = [[0, 0], [0, 0]]
    drawn(tiles, tiles.draw_tiles, plan)


def test_curves_mark_the_recorded_best_epoch(drawn: Callable[..., Any], tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", every=4))
    loss_axes, score_axes = drawn(curves, curves.draw_curves, record).axes
    best = (record.result or {})["best"]
    assert score_axes.get_lines()[-1].get_xdata() == [best["epoch"]] * 2
    assert f"best epoch {best['epoch']}" in score_axes.get_title(loc="left")
    assert loss_axes.get_yscale() == "log"
    assert len(score_axes.get_lines()[0].get_xdata()) == 15, "evaluated epochs only"


def test_mean_of_repeats_ends_with_the_shortest_run(drawn: Callable[..., Any], tmp_path: Path) -> None:
    """Past the shortest run the mean would be of survivors only."""
    record = read_run(write_run(tmp_path / "run", repeats=3, epochs=20))
    axes = drawn(curves, curves.draw_curves, record).axes[0]
    *runs, mean = axes.get_lines()
    assert [len(line.get_xdata()) for line in runs] == [20, 17, 14]
    assert len(mean.get_xdata()) == 14
    assert mean.get_ydata()[5] == pytest.approx(np.mean([line.get_ydata()[5] for line in runs]))
    assert all(line.get_alpha() < 0.5 for line in runs)


@pytest.mark.parametrize(("low", "high"), [(1e-6, 5.0), (0.5, 0.52), (600.0, 601.0), (1.0, 1.0)])
def test_loss_ticks_are_few_and_apart(drawn: Callable[..., Any], tmp_path: Path, low: float, high: float) -> None:
    record = read_run(write_run(tmp_path / "run", epochs=30))
    for number, epoch in enumerate(record.runs[0]):
        epoch["loss"] = high * (low / high) ** (number / 29)
    figure = drawn(curves, curves.draw_curves, record)
    ticks = visible_ticks(figure.axes[0].yaxis)
    assert 2 <= len(ticks) <= 14
    assert overlaps(figure, ticks) == []
    assert len({tick.get_text() for tick in ticks}) == len(ticks)
    assert figure.axes[0].get_ylabel() == "loss, logarithmic"


@pytest.mark.parametrize("losses", [[2.0, 0.0, float("nan"), None], [float("nan")]])
def test_diverged_loss_and_no_evaluation(drawn: Callable[..., Any], tmp_path: Path, losses: list[float | None]) -> None:
    """Zero has no logarithm, nan and null no place: the axis is linear or empty, and says so."""
    record = read_run(write_run(tmp_path / "run", finished=False, epochs=len(losses)))
    for epoch, loss in zip(record.runs[0], losses, strict=True):
        epoch.update(loss=loss, train=None, val=None, test=None)
    loss_axes, score_axes = drawn(curves, curves.draw_curves, record).axes
    assert loss_axes.get_yscale() == "linear"
    assert (
        "without a finite loss" in loss_axes.get_title(loc="right") or loss_axes.texts[0].get_text() == "no finite loss"
    )
    assert score_axes.texts[0].get_text() == "no evaluation in the history"


def test_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536 * 2**10, 99.9 * 2**30, 2**43)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "99.9 GiB", "8192 GiB"
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 99_999, 169_343, 1_166_243, 61_859_140, 3e9)] == [
        "0", "99,999", "169 k", "1.17 M", "61.9 M", "3.00 G"
    ]  # fmt: skip


def test_drawable() -> None:
    assert drawable("h1\n\x07図 µ") == "h1??? µ"
    assert drawable("x" * 50, 10) == "x" * 9 + "…"
