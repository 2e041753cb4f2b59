"""The loss on a logarithmic scale and the scores over the epochs, the best marked: curves.png, and charts of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.planning.task import LOWER_IS_BETTER
from mggcn.report.chart import Line, line_chart
from mggcn.report.figure import GRID, INK, MUTED, PALETTE, drawable, new_figure, numbers, save, tidy
from mggcn.report.run_folder import Json, RunRecord

Floats = npt.NDArray[np.float64]

_SPLITS = {"train": PALETTE[0], "val": PALETTE[1], "test": PALETTE[2]}
MORE = {
    "gradients of steps beside the exact ones": {"gradient_cosine": "cosine", "gradient_ratio": "ratio of norms"},
    "rows of the input that all batches of an epoch read": {
        "rows_own": "own",
        "rows_cached": "kept",
        "rows_remote": "of other ranks",
        "rows_fetched": "fetched from them",
    },
    "vertices around which all batches of an epoch draw": {"drawn_own": "own", "drawn_remote": "of other ranks"},
}
"""Charts of what only some runs have in their history: titles, and names of the curves."""


def draw_curves(record: RunRecord, path: Path) -> Path:
    """Draw the curves of all repeats, faint, and their mean."""
    figure = new_figure(11, 4.2)
    loss_axes, score_axes = figure.subplots(1, 2)
    _draw_loss(loss_axes, record)
    _draw_scores(score_axes, record)
    for axes in (loss_axes, score_axes):
        axes.set_xlabel("epoch", fontsize=9)
        axes.grid(True, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _widen(axes)
        tidy(axes)
    return save(figure, path)


def curve_charts(record: RunRecord) -> list[str]:
    """Return the charts of loss and scores as HTML: the curves of all repeats, faint, and their mean."""
    losses, lost = _lines(record, "loss", "loss", 5), _num_lost(record)
    best, several = best_epochs(record), len(record.runs) > 1
    repeats = f", mean of {len(record.runs)} runs" if several else ""
    title = f"training loss{repeats}" + (f"; {lost} epochs without a finite loss" if lost else "")
    scores = [line for number, split in enumerate(_SPLITS) for line in _lines(record, split, split, number)]
    named = (
        f"{record.metric}{repeats}"
        if several or not best
        else f"{record.metric}, best validation at {best[0]['epoch']}"
    )
    charts = [
        line_chart(title, losses, logarithmic=True),
        line_chart(named, scores, [float(epoch["epoch"]) for epoch in best]),
    ]
    for heading, series in MORE.items():
        if any(next(iter(series)) in epoch for epochs in record.runs.values() for epoch in epochs):
            named_lines = (_lines(record, key, name, number) for number, (key, name) in enumerate(series.items()))
            charts.append(line_chart(f"{heading}{repeats}", [line for lines in named_lines for line in lines]))
    return charts


def _lines(record: RunRecord, key: str, name: str, colour: int) -> list[Line]:
    series = [points(epochs, key) for epochs in record.runs.values()]
    if len(series) == 1:
        return [Line(name, series[0][0].tolist(), series[0][1].tolist(), colour)]
    runs = [Line("", x.tolist(), y.tolist(), colour, faint=True) for x, y in series]
    x, y = mean_of(series)
    return [*runs, Line(name, x.tolist(), y.tolist(), colour)]


def _num_lost(record: RunRecord) -> int:
    return sum(not np.isfinite(numbers([epoch["loss"]])[0]) for epochs in record.runs.values() for epoch in epochs)


def _draw_loss(axes: Any, record: RunRecord) -> None:
    drawn = _draw_series(axes, record, "loss", PALETTE[5], "loss")
    repeats = f", mean of {len(record.runs)} runs" if len(record.runs) > 1 else ""
    axes.set_title(f"training loss{repeats}", fontsize=10, loc="left", color=INK)
    if drawn.size and drawn.min() > 0:
        _log_scale(axes, drawn)
        axes.set_ylabel("loss, logarithmic", fontsize=9)
    elif not drawn.size:
        _say(axes, "no finite loss")
    lost = _num_lost(record)
    if lost and drawn.size:
        axes.set_title(f"{lost} epochs without a finite loss", fontsize=8, loc="right", color=PALETTE[5])


def _draw_scores(axes: Any, record: RunRecord) -> None:
    found = [name for name, colour in _SPLITS.items() if _draw_series(axes, record, name, colour, name).size]
    axes.set_ylabel(drawable(record.metric), fontsize=9, parse_math=False)
    if not found:
        axes.set_title("scores", fontsize=10, loc="left", color=INK)
        _say(axes, "no evaluation in the history")
        return
    best = best_epochs(record)
    axes.set_title(_best_title(record, best), fontsize=10, loc="left", color=INK)
    for number, epoch in enumerate(best):
        style = {"alpha": 0.9, "linewidth": 1.0} if len(best) == 1 else {"alpha": 0.3, "linewidth": 0.8}
        axes.axvline(epoch["epoch"], color=MUTED, linestyle="--", label=None if number else "best validation", **style)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _draw_series(axes: Any, record: RunRecord, key: str, colour: str, label: str) -> Floats:
    """Draw one quantity of every run and, for repeats, the mean; return the finite values drawn."""
    series = [points(epochs, key) for epochs in record.runs.values()]
    several = len(series) > 1
    for x, y in series:
        # Evaluations far apart are dots on the line: without dots one cannot see where the line is only a guess.
        marker = "o" if len(x) <= 30 and not several else None
        width, alpha = (0.7, max(0.15, 0.6 / len(series) ** 0.5)) if several else (1.6, 1.0)
        axes.plot(x, y, color=colour, linewidth=width, alpha=alpha, marker=marker, markersize=3.5,
                  label=None if several or not x.size else label)  # fmt: skip
    if several:
        x, y = mean_of(series)
        axes.plot(x, y, color=colour, linewidth=2.0, label=label if x.size else None)
    return np.concatenate([y for _, y in series])


def points(epochs: list[Json], key: str) -> tuple[Floats, Floats]:
    """Return epochs and values of one quantity, where it is a finite number."""
    x = np.array(numbers([epoch["epoch"] for epoch in epochs]))
    y = np.array(numbers([epoch.get(key) for epoch in epochs]))
    kept = np.isfinite(x) & np.isfinite(y)
    return x[kept], y[kept]


def mean_of(series: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Average over the epochs that every run has: past the shortest run the mean would be of survivors only."""
    values: dict[float, list[float]] = {}
    for x, y in series:
        for epoch, value in zip(x.tolist(), y.tolist(), strict=True):
            values.setdefault(epoch, []).append(value)
    common = sorted(epoch for epoch, found in values.items() if len(found) == len(series))
    return np.array(common), np.array([float(np.mean(values[epoch])) for epoch in common])


def best_epochs(record: RunRecord) -> list[Json]:
    """Return the best epoch of each run: the recorded one, else the first with the best validation score."""
    result = record.result or {}
    if len(record.runs) == 1 and "best" in result:
        return [result["best"]]
    best = []
    for epochs in record.runs.values():
        scored = [epoch for epoch in epochs if np.isfinite(numbers([epoch["val"]])[0])]
        if scored:
            sign = -1 if record.metric in LOWER_IS_BETTER else 1
            best.append(max(scored, key=lambda epoch: sign * float(epoch["val"])))
    return best


def _best_title(record: RunRecord, best: list[Json]) -> str:
    if len(record.runs) > 1:
        return f"scores, mean of {len(record.runs)} runs"
    if not best:
        return "scores"
    scores = [(name, numbers([best[0].get(name)])[0]) for name in ("val", "test")]
    text = ", ".join(f"{name} {score:.4f}" for name, score in scores if np.isfinite(score))
    return f"best epoch {best[0]['epoch']}: {text}"


def _log_scale(axes: Any, values: Floats) -> None:
    """Take a logarithmic y axis with plain numbers; 1-2-5 steps, or even steps, where the range is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    decades = np.log10(values.max() / values.min())
    steps = (1.0,) if decades > 3 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12) if decades > 0.7 else MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _widen(axes: Any) -> None:
    """Give one or two epochs an x range in which ticks fall on whole epochs."""
    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim(low - 1, high + 1)


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)
