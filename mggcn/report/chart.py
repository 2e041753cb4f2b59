"""Curves on a page: SVG that follows the page's colours and width, with its values for page.js to show under the pointer.

What is drawn stands in a square of 1000 x 1000 that the browser stretches; numbers on the axes are text beside it, so that
they keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mggcn.report.markup import escape

SIDE = 1000
MOST_POINTS = 2000
"""Points of a line: more than a screen has columns."""
COLOURS = 8
"""Classes c0 .. c7 of page.css."""


@dataclass(frozen=True, slots=True)
class Line:
    """Values over epochs. An empty name keeps a line out of the legend; faint: one of many drawn behind their mean."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    faint: bool = False


def line_chart(title: str, lines: Sequence[Line], marks: Iterable[float] = (), *, logarithmic: bool = False) -> str:
    """Return a figure with the lines over epochs and dashed marks at some; points that are not finite are left out."""
    drawn = [line for line in map(_finite, lines) if line.x]
    if not drawn:
        return f"<figure><figcaption>{escape(title)}</figcaption><p>No finite value in the history.</p></figure>"
    first, last = min(min(line.x) for line in drawn), max(max(line.x) for line in drawn)
    if first == last:  # an epoch alone stands in the middle
        first, last = first - 1, last + 1
    values = [value for line in drawn for value in line.y]
    logarithmic = logarithmic and min(values) > 0
    low, high = _widened(min(values), max(values), logarithmic)

    def up(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
        return SIDE * (1 - share)

    levels = _log_ticks(low, high) if logarithmic else nice_ticks(low, high, 6)
    epochs = [tick for tick in nice_ticks(first, last, 6) if tick == int(tick)]
    across = SIDE / (last - first)
    paths = [f'<path class="grid" d="M0 {up(level):.1f}H{SIDE}"/>' for level in levels]
    paths += [f'<path class="mark" d="M{(mark - first) * across:.1f} 0V{SIDE}"/>' for mark in marks]
    paths += [_path(line, number, first, across, up) for number, line in enumerate(drawn)]
    ys = [f'<span class="y" style="top:{up(level) / SIDE:.2%}">{level:g}</span>' for level in levels]
    xs = [f'<span class="x" style="left:{(e - first) / (last - first):.2%}">{e:g}</span>' for e in epochs]
    keys = [
        f'<span class="c{line.colour % COLOURS}" data-line="{number}">{escape(line.name)} <b></b></span>'
        for number, line in enumerate(drawn)
        if line.name
    ]
    plot = f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">{"".join(paths)}</svg>{"".join(ys + xs)}'
    return (
        f'<figure class="chart" data-range="{first:g} {last:g}"><figcaption>{escape(title)}</figcaption>'
        f'<div class="plot">{plot}</div><div class="legend">{"".join(keys)}<output></output></div></figure>'
    )


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= rough * (1 - 1e-9))
    count = math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1
    return [round((math.ceil(low / step - 1e-9) + k) * step, 12) for k in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, powers alone where the range is wide, even steps where it is narrow."""
    decades = math.log10(high / low)
    if decades < 0.7:
        return nice_ticks(low, high, 6)
    steps = (1, 2, 5) if decades <= 3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in found if low <= tick <= high][:: max(1, round(decades / 8))]


def _widened(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """Leave some room above and below; a constant gets a range of its size."""
    if logarithmic:
        factor = (high / low) ** 0.04 if high > low * (1 + 1e-9) else 1.1
        return low / factor, high * factor
    room = 0.04 * (high - low) if high - low > 1e-9 * max(abs(high), abs(low)) else 0.1 * max(abs(high), 1.0)
    return low - room, high + room


def _finite(line: Line) -> Line:
    """Leave out what is not finite and, of more points than a screen shows, all but every k-th and the last."""
    points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    step = -(-len(points) // MOST_POINTS)
    kept = points[::step] + points[-1:] if step > 1 else points
    return Line(line.name, [x for x, _ in kept], [y for _, y in kept], line.colour, line.faint)


def _path(line: Line, number: int, first: float, across: float, up: Callable[[float], float]) -> str:
    corners = "L".join(f"{(x - first) * across:.1f} {up(y):.1f}" for x, y in zip(line.x, line.y, strict=True))
    classes = f"c{line.colour % COLOURS}" + " faint" * line.faint
    lone = "h0.1" if len(line.x) == 1 else ""  # a point alone has no length to draw
    values = f'data-x="{" ".join(f"{x:g}" for x in line.x)}" data-y="{" ".join(f"{y:.4g}" for y in line.y)}"'
    return f'<path class="{classes}" data-line="{number}" {values} d="M{corners}{lone}"/>'
