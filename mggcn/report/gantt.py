"""timeline.png and stages.png: an epoch, and its longest aggregation, by rank and row.

Source: MG-GCN, figures 6 and 8: computation blue, communication orange; here stages differ in lightness too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.report.figure import GRID, INK, MUTED, drawable, new_figure, save, tidy
from mggcn.report.opcolours import COLOURS, colour_of, shade, text_colour
from mggcn.report.timeline import COMMUNICATION, COMPUTE, Stretch, Timeline

MAX_RANKS = 16
"""Ranks that are drawn; more would be lines too thin to distinguish."""
_WIDTH = 12.0
_LABEL_PT = 7.0
_CHAR_INCHES = 0.062


@dataclass(frozen=True, slots=True)
class _Scale:
    """From seconds of the trace to what the axis shows."""

    origin_s: float
    span_s: float

    @property
    def unit(self) -> tuple[float, str]:
        return (1.0, "s") if self.span_s >= 2 else (1e3, "ms") if self.span_s >= 2e-3 else (1e6, "µs")

    def at(self, moment_s: float) -> float:
        return (moment_s - self.origin_s) * self.unit[0]

    def inches(self, seconds: float) -> float:
        return seconds / self.span_s * (_WIDTH - 1.6) if self.span_s else 0.0


def draw_epoch(timeline: Timeline, path: Path) -> Path:
    """Draw the last epoch that all ranks recorded: bars coloured by kind of op, shaded by stage."""
    epoch = timeline.common_epochs[-1]
    ranks = timeline.ranks[:MAX_RANKS]
    found = [s for s in timeline.stretches if s.epoch == epoch and s.rank in ranks]
    bounds = [timeline.epochs[rank, epoch] for rank in ranks]
    scale = _scale(min(b[0] for b in bounds), max(b[1] for b in bounds))
    rows = _rows(ranks, found)
    figure, axes = _axes(rows, extra=1.5)
    _draw_bars(axes, found, rows, scale, len(timeline.ranks))
    height = _draw_steps(axes, [s for s in found if s.rank == ranks[0]], scale)
    _finish(axes, rows, scale)
    _title(axes, f"epoch {epoch}: {_duration(scale.span_s)}", timeline, ranks, pad=height + 10)
    _legend(axes, {s.op for s in found}, staged=any(s.stage for s in found))
    return save(figure, path)


def draw_stages(timeline: Timeline, path: Path) -> Path | None:
    """Draw the aggregation that takes longest, its stages numbered; None if nothing is aggregated in stages."""
    step = longest_staged_step(timeline)
    if step is None:
        return None
    epoch, ranks = timeline.common_epochs[-1], timeline.ranks[:MAX_RANKS]
    found = [s for s in timeline.stretches if (s.epoch, s.step) == (epoch, step) and s.rank in ranks]
    scale = _scale(min(s.start_s for s in found), max(s.end_s for s in found))
    rows = _rows(ranks, found)
    figure, axes = _axes(rows, extra=1.1)
    _draw_bars(axes, found, rows, scale, len(timeline.ranks))
    for stretch in found:
        if stretch.stage is not None:
            _number(axes, stretch, rows, scale, len(timeline.ranks))
    _finish(axes, rows, scale)
    title = f"{drawable(step)} in epoch {epoch}: {_duration(scale.span_s)}"
    _title(axes, f"{title}; numbers are stages: the rank that sends its rows", timeline, ranks, pad=8)
    _legend(axes, {s.op for s in found}, staged=True)
    return save(figure, path)


def longest_staged_step(timeline: Timeline) -> str | None:
    """Return the step with products of more than one stage that takes longest, over all ranks, in the last epoch."""
    epoch = timeline.common_epochs[-1]
    stages: dict[str, set[int]] = {}
    seconds: dict[str, float] = {}
    for s in timeline.stretches:
        if s.epoch == epoch and s.stage is not None:
            stages.setdefault(s.step, set()).add(s.stage)
            seconds[s.step] = seconds.get(s.step, 0.0) + s.seconds
    staged = [step for step, seen in stages.items() if len(seen) > 1]
    return max(staged, key=lambda step: seconds[step], default=None)


def _scale(start_s: float, end_s: float) -> _Scale:
    return _Scale(start_s, max(end_s - start_s, 1e-9))


def _rows(ranks: Sequence[int], found: Sequence[Stretch]) -> dict[tuple[int, str], int]:
    """Number the rows from the top; the row of communication only where somebody communicates."""
    names = (COMPUTE, COMMUNICATION) if any(s.row == COMMUNICATION for s in found) else (COMPUTE,)
    return {key: number for number, key in enumerate((rank, name) for rank in ranks for name in names)}


def _axes(rows: dict[tuple[int, str], int], extra: float) -> tuple[Any, Any]:
    figure = new_figure(_WIDTH, 0.3 * len(rows) + extra + 0.6)
    return figure, figure.subplots()


def _draw_bars(
    axes: Any, found: Sequence[Stretch], rows: dict[tuple[int, str], int], scale: _Scale, num_ranks: int
) -> None:
    """Draw all stretches, those of one colour and row at once."""
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for s in found:
        key = rows[s.rank, s.row], shade(colour_of(s.op), s.stage, num_ranks)
        groups.setdefault(key, []).append((scale.at(s.start_s), scale.at(s.end_s) - scale.at(s.start_s)))
    for (row, colour), spans in groups.items():
        axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=colour, linewidth=0)


def _number(axes: Any, s: Stretch, rows: dict[tuple[int, str], int], scale: _Scale, num_ranks: int) -> None:
    """Write the stage onto a bar that is wide enough."""
    text = str(s.stage)
    if scale.inches(s.seconds) >= _CHAR_INCHES * len(text) + 0.03:
        middle = scale.at((s.start_s + s.end_s) / 2)
        colour = text_colour(shade(colour_of(s.op), s.stage, num_ranks))
        axes.text(middle, rows[s.rank, s.row], text, fontsize=_LABEL_PT, ha="center", va="center", color=colour)


def _draw_steps(axes: Any, found: Sequence[Stretch], scale: _Scale) -> float:
    """Name the steps of one rank above the bars, where there is room, with a line at each start; return points of height.

    A name lies flat if its step is wide enough, else it stands.
    """
    bounds: dict[str, tuple[float, float]] = {}
    for s in found:
        if s.step and s.row == COMPUTE:
            start, end = bounds.get(s.step, (s.start_s, s.end_s))
            bounds[s.step] = min(start, s.start_s), max(end, s.end_s)
    taken, height = -1.0, 0.0
    for step, (start, end) in sorted(bounds.items(), key=lambda item: item[1]):
        axes.axvline(scale.at(start), color=GRID, linewidth=0.6, zorder=0)
        text, width = drawable(step, 22), scale.inches(end - start)
        flat = width >= _CHAR_INCHES * len(text)
        middle, half = scale.inches((start + end) / 2 - scale.origin_s), _CHAR_INCHES * len(text) / 2 if flat else 0.08
        if width < 0.04 or middle - half < taken:
            continue
        taken, height = middle + half, max(height, 72 * (0.14 if flat else _CHAR_INCHES * len(text)))
        axes.text(scale.at((start + end) / 2), -0.65, text, fontsize=_LABEL_PT, rotation=0 if flat else 90, ha="center",
                  va="bottom", color=INK, parse_math=False)  # fmt: skip
    return height


def _finish(axes: Any, rows: dict[tuple[int, str], int], scale: _Scale) -> None:
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, scale.at(scale.origin_s + scale.span_s))
    labels = [f"rank {rank}  {name}" if name == COMPUTE else name for rank, name in rows]
    axes.set_yticks(list(rows.values()), labels)
    axes.set_xlabel(f"time ({scale.unit[1]})", fontsize=9)
    axes.grid(True, axis="x", color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    tidy(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for (_, name), number in rows.items():
        if name == COMPUTE and number:
            axes.axhline(number - 0.5, color=GRID, linewidth=0.8)


def _title(axes: Any, text: str, timeline: Timeline, ranks: Sequence[int], pad: float) -> None:
    if len(ranks) < len(timeline.ranks):
        text += f" (first {len(ranks)} of {len(timeline.ranks)} ranks)"
    axes.set_title(text, fontsize=10, loc="left", color=INK, parse_math=False, pad=pad)


def _legend(axes: Any, present: set[str], staged: bool) -> None:
    from matplotlib.patches import Patch

    known = [op for op in COLOURS if op in present]
    handles = [Patch(color=colour_of(op), label=op) for op in known]
    if others := sorted(present - set(known)):
        handles.append(Patch(color=colour_of(others[0]), label=drawable(", ".join(others), 60)))
    title = "kind of op; lighter: later stage" if staged else None
    legend = axes.figure.legend(handles=handles, fontsize=8, frameon=False, ncols=min(len(handles), 9), title=title,
                                loc="outside lower left", title_fontsize=8, alignment="left")  # fmt: skip
    legend.get_title().set_color(MUTED)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _duration(seconds: float) -> str:
    factor, name = _Scale(0.0, seconds).unit
    number = seconds * factor
    return f"{number:,.0f} {name}" if number >= 1000 else f"{number:.3g} {name}"
