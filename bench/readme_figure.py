"""The pictures of the README: python -m bench.readme_figure REPORT.json [REPORT.json ...] PICTURE.png.

Of bench's comparison of epochs with DGL and PyG, ratios of time and memory, mggcn's being 1; of reports of accuracy, the
training seconds until a score is reached, over the whole graph and on batches.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.cpu.accuracy import TIMED, until_reached
from bench.plots import plain_numbers, read_plots
from mggcn.files import read_json
from mggcn.report.figure import GRID, INK, PALETTE, new_figure, save, tidy

SERIES = {"mggcn": "mggcn", "DGL": "DGL", "PyG's fastest way": "PyG, the fastest of its ways"}
WAYS = ("whole graph", "batches")
TITLES = ("time of a training epoch, mggcn = 1", "peak memory of the process, mggcn = 1")


def draw(reports: list[Path], picture: Path) -> Path:
    """Draw the picture that these reports have the numbers of."""
    records = [read_json(report) for report in reports]
    # A graph that was measured again counts as in the last report.
    found = {one["graph"]: one for record in records for what in TIMED for one in record.get(what, [])}
    return draw_seconds([*found.values()], picture) if found else draw_ratios(reports[0], picture)


def draw_seconds(found: list[dict[str, Any]], picture: Path) -> Path:
    """Draw a line for each graph: the median seconds over seeds of both ways; a word where most seeds never got there."""
    figure = new_figure(8.0, 1.3 + 0.5 * len(found))
    axes = figure.subplots()
    for number, way in enumerate(WAYS):
        times = [statistics.median(until_reached(one)[1][way]) for one in found]
        at = [line for line, seconds in enumerate(times) if math.isfinite(seconds)]
        places = [line + (number - 0.5) * 0.38 for line in at]
        bars = axes.barh(places, [times[line] for line in at], 0.36, color=PALETTE[number], label=way)
        axes.bar_label(bars, fmt=lambda s: f"{s:.2g} s" if s < 10 else f"{s:.0f} s", fontsize=8, padding=2, color=INK)
        for line in set(range(len(found))) - set(at):
            axes.text(0.105, line + (number - 0.5) * 0.38, "never", fontsize=8, color=INK, va="center")
    axes.set_xscale("log")
    axes.set_xlim(left=0.1)
    plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(found)), [one["graph"] for one in found])
    axes.invert_yaxis()
    axes.set_title("training time until validation is within a point of the best", fontsize=10, loc="left", color=INK)
    axes.set_xlabel("seconds", fontsize=9)
    axes.grid(True, axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    tidy(axes)
    figure.legend(fontsize=9, frameon=False, ncols=2, loc="outside lower center")
    return save(figure, picture)


def draw_ratios(report: Path, picture: Path) -> Path:
    """Draw both plots side by side, a group of bars for each graph and network."""
    plots = read_plots(report)
    figure = new_figure(10.0, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, plot, title in zip(panels, plots, TITLES, strict=True):
        _draw_bars(axes, plot)
        axes.set_title(title, fontsize=10, loc="left", color=INK)
        axes.grid(True, axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        tidy(axes)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, frameon=False, ncols=3, loc="outside lower center")
    return save(figure, picture)


def _draw_bars(axes: Any, plot: dict[str, Any]) -> None:
    groups = plot["groups"]
    values = {"mggcn": [1.0] * len(groups), **plot["series"]}
    for number, (name, label) in enumerate(SERIES.items()):
        places = [group + (number - 1) * 0.27 for group in range(len(groups))]
        bars = axes.barh(places, values[name], 0.25, color=PALETTE[number], label=label)
        if number:
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=2, color=INK)
    axes.set_yticks(range(len(groups)), groups)


if __name__ == "__main__":
    *given, drawn = map(Path, sys.argv[1:])
    print(draw(given, drawn))
