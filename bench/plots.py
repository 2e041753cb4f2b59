"""What `mggcn report` draws of a benchmark's record: the entries of its `plots`, see mggcn/report/bench_plots.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def bars(title: str, quantity: str, cells: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """A bar for every series (inner keys) in every group (outer keys); no plot without any value."""
    names = list(dict.fromkeys(name for group in cells.values() for name in group))
    series = {name: [group.get(name) for group in cells.values()] for name in names}
    plot = {"kind": "bars", "title": title, "quantity": quantity, "groups": list(cells), "series": series}
    return [plot] if series else []


def lines(
    title: str, quantity: str, abscissa: str, points: Mapping[str, Sequence[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """A line through the points of every series; no plot without any point."""
    series = {name: [list(point) for point in found] for name, found in points.items() if found}
    plot = {"kind": "lines", "title": title, "quantity": quantity, "abscissa": abscissa, "series": series}
    return [plot] if series else []
