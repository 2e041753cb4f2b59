"""breakdown.png: the time of an epoch by kind of op, for each rank (MG-GCN, figure 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mggcn.report.busy import ALONE, IDLE, breakdown
from mggcn.report.figure import INK, drawable, new_figure, save, tidy
from mggcn.report.gantt import MAX_RANKS
from mggcn.report.opcolours import COLOURS, colour_of, text_colour
from mggcn.report.timeline import Timeline

_WIDTH = 12.0
_LABEL_PT = 8.0
_OTHER = "other"


def draw_breakdown(timeline: Timeline, path: Path) -> Path:
    """Draw one bar for each rank, an average epoch long, its parts in percent where they are wide enough."""
    shares = {rank: _grouped(seconds) for rank, seconds in breakdown(timeline).items()}
    ranks = list(shares)[:MAX_RANKS]
    longest = max(sum(shares[rank].values()) for rank in ranks) or 1e-9
    factor, unit = (1.0, "s") if longest >= 2 else (1e3, "ms") if longest >= 2e-3 else (1e6, "µs")
    figure = new_figure(_WIDTH, 0.42 * len(ranks) + 1.6)
    axes = figure.subplots()
    kinds = [op for op in (*COLOURS, _OTHER) if any(shares[rank].get(op) for rank in ranks)]
    kinds.sort(key=lambda op: (op == IDLE, op == ALONE))
    for row, rank in enumerate(ranks):
        _draw_bar(axes, row, [(op, shares[rank].get(op, 0.0)) for op in kinds], longest, factor)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, longest * factor)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_xlabel(f"time of an epoch ({unit})", fontsize=9)
    tidy(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    count = len(timeline.common_epochs)
    axes.set_title(f"epoch by kind of op, mean of {count} epoch{'s' * (count > 1)}", fontsize=10, loc="left", color=INK)
    _legend(axes, kinds, shares)
    return save(figure, path)


def _grouped(seconds: dict[str, float]) -> dict[str, float]:
    """Put kinds without a colour of their own into one."""
    grouped: dict[str, float] = {}
    for op, value in seconds.items():
        name = op if op in COLOURS else _OTHER
        grouped[name] = grouped.get(name, 0.0) + value
    return grouped


def _draw_bar(axes: Any, row: int, parts: list[tuple[str, float]], longest: float, factor: float) -> None:
    total, left = sum(value for _, value in parts) or 1e-9, 0.0
    for op, value in parts:
        colour = colour_of(op)
        axes.barh(row, value * factor, 0.72, left * factor, color=colour)
        text = f"{100 * value / total:.0f} %"
        if value / longest * (_WIDTH - 1.2) > 0.075 * len(text) + 0.05:
            axes.text((left + value / 2) * factor, row, text, fontsize=_LABEL_PT, ha="center", va="center",
                      color=text_colour(colour))  # fmt: skip
        left += value


def _legend(axes: Any, kinds: list[str], shares: dict[int, dict[str, float]]) -> None:
    """Name the kinds, with their share of all ranks' time."""
    from matplotlib.patches import Patch

    total = sum(sum(seconds.values()) for seconds in shares.values()) or 1e-9
    handles = []
    for op in kinds:
        share = 100 * sum(seconds.get(op, 0.0) for seconds in shares.values()) / total
        handles.append(Patch(color=colour_of(op), label=f"{drawable(op)} {share:.1f} %"))
    axes.figure.legend(handles=handles, fontsize=8, frameon=False, ncols=6, loc="outside lower left")
