"""Draws the plots of a benchmark's report as PNG files beside it: python -m bench.plots bench/results/FILE.json.

A plot is `bars`: a value of every series for every group, from 1 on a logarithmic scale, since they are ratios; or `lines`:
points (x, y) of every series, both logarithmic. `bench.report` makes both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mggcn.files import read_json
from mggcn.report.figure import GRID, INK, MUTED, PALETTE, drawable, format_count, new_figure, save, tidy

Json = dict[str, Any]
_BAR = 0.8
"""Thickness of a bar, as a share of the height of its line."""
_ROW_INCHES = 0.2


def read_plots(record: Path) -> list[Json]:
    """Read the plots of a report's .json file."""
    plots: list[Json] = read_json(record).get("plots", [])
    return plots


def draw_plot(plot: Json, path: Path) -> Path:
    """Draw one plot."""
    return _draw_bars(plot, path) if plot["kind"] == "bars" else _draw_lines(plot, path)


def _draw_bars(plot: Json, path: Path) -> Path:
    groups, series = [str(group) for group in plot["groups"]], plot["series"]
    rows = len(groups) * (len(series) + 1)
    figure = new_figure(8.0, 1.2 + _ROW_INCHES * rows)
    axes = figure.subplots()
    axes.set_xscale("log")
    values: list[float] = [1.0]
    for number, (name, found) in enumerate(series.items()):
        places = [group * (len(series) + 1) + number for group, value in enumerate(found) if value is not None]
        shown = [float(value) for value in found if value is not None]
        widths = [value - 1.0 for value in shown]
        axes.barh(places, widths, _BAR, left=1.0, color=_colour(number), label=drawable(name, 60))
        for place, value in zip(places, shown, strict=True):
            beside = ("left", 3) if value >= 1 else ("right", -3)
            axes.annotate(
                f"{value:.3g}",
                (value, place),
                (beside[1], 0),
                textcoords="offset points",
                ha=beside[0],
                va="center",
                fontsize=7,
                color=INK,
            )
        values += shown
    middle = (len(series) - 1) / 2
    axes.set_yticks([group * (len(series) + 1) + middle for group in range(len(groups))])
    axes.set_yticklabels([drawable(group) for group in groups], parse_math=False)
    axes.invert_yaxis()
    axes.axvline(1.0, color=MUTED, linewidth=0.8)
    axes.set_xlim(min(values) / 1.5, max(values) * 1.5)
    plain_numbers(axes.xaxis)
    return _finish(figure, axes, plot, path)


def _draw_lines(plot: Json, path: Path) -> Path:
    figure = new_figure(8.0, 4.6)
    axes = figure.subplots()
    for number, (name, points) in enumerate(plot["series"].items()):
        x, y = _columns(points)
        axes.plot(x, y, color=_colour(number), marker="o", markersize=4, linewidth=1.4, label=drawable(name, 60))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
    axes.set_ylabel(drawable(plot["quantity"], 60), fontsize=9, parse_math=False)
    return _finish(figure, axes, plot | {"quantity": plot["abscissa"]}, path)


def _finish(figure: Any, axes: Any, plot: Json, path: Path) -> Path:
    """Title, axis of the abscissa, legend below."""
    axes.set_title(drawable(plot["title"], 90), fontsize=10, loc="left", color=INK, parse_math=False)
    axes.set_xlabel(drawable(plot["quantity"], 90), fontsize=9, parse_math=False)
    axes.grid(True, axis="both" if plot["kind"] == "lines" else "x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    tidy(axes)
    return save(figure, path)


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5, without powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: format_count(value) if value >= 1e4 else f"{value:g}")


def _columns(points: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    ordered = sorted(tuple(point) for point in points)
    return [float(point[0]) for point in ordered], [float(point[1]) for point in ordered]


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def main(record: Path) -> None:
    """Draw every plot of a report as `<name>_<number>.png` beside it; print the paths."""
    plots = read_plots(record)
    for number, plot in enumerate(plots, start=1):
        print(draw_plot(plot, record.with_name(f"{record.stem}_{number}.png")))
    if not plots:
        sys.exit(f"{record} holds no plots; those of bench/peers and bench/cpu/ways.py do")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
