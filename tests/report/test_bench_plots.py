"""bench_plots.py: what a benchmark's file says is drawn, and what it cannot say is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mggcn.errors import RunError
from mggcn.report import bench_plots
from mggcn.report.bench_plots import read_plots, write_bench_report
from tests.report.pictures import outside, overlaps

BARS: dict[str, Any] = {
    "kind": "bars",
    "title": "Epochs",
    "quantity": "time / mggcn",
    "groups": ["reddit-like 2x512", "arxiv-like 2x16"],
    "series": {"DGL": [4.0, 1.5], "PyG fused": [7.0, None], "mggcn bf16": [0.5, 0.75]},
}
LINES: dict[str, Any] = {
    "kind": "lines",
    "title": "Size of the graph",
    "quantity": "seconds per epoch",
    "abscissa": "nonzeros",
    "series": {"mggcn": [[4e6, 0.4], [1e6, 0.1]], "DGL": [[1e6, 0.3]]},
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "peers.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_bars_begin_at_one_and_end_at_their_values(drawn: Callable[..., Any]) -> None:
    """Fails if a bar shows another value or group, an absent value is drawn, or a label is hidden."""
    figure = drawn(bench_plots, bench_plots.draw_plot, BARS)
    axes = figure.axes[0]
    ends = sorted((p.get_y() + p.get_height() / 2, p.get_x() + p.get_width()) for p in axes.patches)
    assert {p.get_x() for p in axes.patches} == {1.0}
    assert [end for _, end in ends] == pytest.approx([4.0, 7.0, 0.5, 1.5, 0.75])
    ticks = dict(zip((label.get_text() for label in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    assert ticks == pytest.approx({"reddit-like 2x512": 1.0, "arxiv-like 2x16": 5.0})
    shown = [
        label.get_text() for label, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True) if 0.4 < at < 9
    ]
    assert shown == ["0.5", "1", "2", "5"]
    assert overlaps(figure, axes.texts) == []
    assert outside(figure, [*axes.texts, axes.title, *axes.get_yticklabels()]) == []


def test_lines_join_their_points_in_order(drawn: Callable[..., Any]) -> None:
    """Fails if a line goes back, or an axis is linear."""
    axes = drawn(bench_plots, bench_plots.draw_plot, LINES).axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1e6, 0.1], [4e6, 0.4]], [[1e6, 0.3]]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("nonzeros", "seconds per epoch")


def test_every_plot_gets_a_file(tmp_path: Path) -> None:
    """Fails if one is lost or lands elsewhere."""
    paths = write_bench_report(write(tmp_path, {"plots": [BARS, LINES]}))
    assert [path.name for path in paths] == ["peers_1.png", "peers_2.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ({"measured": []}, "holds no plots"),
        ({"plots": [{"kind": "pie"}]}, "plot 1 is of no known kind"),
        ({"plots": [BARS, {"kind": "lines", "title": "a", "quantity": "b", "series": {}}]}, "plot 2 lacks abscissa"),
        ({"plots": [BARS | {"series": {}}]}, "has no series"),
        ({"plots": [BARS | {"series": {"DGL": [1.0]}}]}, "'DGL' with other values than groups"),
        ({"plots": [BARS | {"series": {"DGL": [1.0, 0.0]}}]}, "'DGL' with a value that is not a positive number"),
        ({"plots": [LINES | {"series": {"DGL": [[1.0, "2"]]}}]}, "'DGL' with a value that is not a positive number"),
    ],
)
def test_damaged_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    """Fails if a file that cannot be drawn ends in a traceback."""
    with pytest.raises(RunError, match=message):
        read_plots(write(tmp_path, content))
