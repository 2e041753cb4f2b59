"""The picture of speed and memory in the README: python -m bench.readme_figure REPORT.json PICTURE.png.

Draws the ratios that bench's comparison of epochs with DGL and PyG keeps in the .json file of its report, mggcn's being 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.plots import read_plots
from mggcn.report.figure import GRID, INK, PALETTE, new_figure, save, tidy

SERIES = {"mggcn": "mggcn", "DGL": "DGL", "PyG's fastest way": "PyG, the fastest of its ways"}
TITLES = ("time of a training epoch, mggcn = 1", "peak memory of the process, mggcn = 1")


def draw(report: Path, picture: Path) -> Path:
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
    print(draw(Path(sys.argv[1]), Path(sys.argv[2])))
