"""plots.py: what a benchmark's file says is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import plots
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


def drawn(monkeypatch: pytest.MonkeyPatch, plot: dict[str, Any]) -> Any:
    """Return the figure of a plot instead of saving it."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.draw_plot(plot, Path("unused.png"))
    figures[0].canvas.draw()
    return figures[0]


def test_bars_begin_at_one_and_end_at_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a bar shows another value or group, an absent value is drawn, or a label is hidden."""
    figure = drawn(monkeypatch, BARS)
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


def test_lines_join_their_points_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a line goes back, or an axis is linear."""
    axes = drawn(monkeypatch, LINES).axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1e6, 0.1], [4e6, 0.4]], [[1e6, 0.3]]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("nonzeros", "seconds per epoch")


def test_every_plot_gets_a_file(tmp_path: Path) -> None:
    """Fails if one is lost or lands elsewhere, or a report without plots ends in silence."""
    record = tmp_path / "peers.json"
    record.write_text(json.dumps({"plots": [BARS, LINES]}))
    plots.main(record)
    assert all((tmp_path / f"peers_{number}.png").read_bytes().startswith(b"\x89PNG") for number in (1, 2))
    record.write_text(json.dumps({"measured": []}))
    with pytest.raises(SystemExit, match="holds no plots"):
        plots.main(record)
