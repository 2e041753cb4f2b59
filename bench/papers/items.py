"""What the papers publish, one TOML file a paper, and whether ours meets an item's bar.

An item is a table, a figure or a sentence: its published numbers by the name of their cell, in one unit, and the bars that
our numbers of the same names must meet.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mggcn.planning.shape import GraphShape

FOLDER = Path(__file__).parent
PAPERS = ("mg-gcn", "distgnn", "distdgl", "distgnn-mb", "batchgnn")
HOW = {
    "A": "exact arithmetic, no run",
    "P": "a plan on a described machine",
    "D": "a dry run of partitioner and sampler",
    "T": "trained here, at a reduced scale",
    "X": "only with hardware that is not here",
}
EXACT = 1e-9
"""Relative difference of numbers that are equal but for the rounding of a sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """What our numbers must meet. cells: of these, () of all; of: how many must, 0: all that there are.

    within: the largest difference over the published number; factor: the largest ratio, either way; points: the largest
    difference; least, most: bounds of our number itself; digits: equal to the published number as it is printed, with so
    many digits behind the point. scale: the least one at which it counts, 0: any.
    """

    cells: tuple[str, ...] = ()
    of: int = 0
    scale: float = 0.0
    within: float | None = None
    factor: float | None = None
    points: float | None = None
    least: float | None = None
    most: float | None = None
    digits: int | None = None

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a bar needs one of within, factor, points, least, most and digits")

    @property
    def needs_published(self) -> bool:
        """Whether it compares with a published number."""
        return any(value is not None for value in (self.within, self.factor, self.points, self.digits))

    @property
    def text(self) -> str:
        """The bar in words."""
        kinds = {
            "within": "within {:.0%}",
            "factor": "within a factor of {:g}",
            "points": "within {:g}",
            "least": "at least {:g}",
            "most": "at most {:g}",
            "digits": "equal to {} digits",
        }
        return " and ".join(how.format(value) for k, how in kinds.items() if (value := getattr(self, k)) is not None)

    def is_met(self, ours: float, published: float | None) -> bool:
        """Return whether a number meets the bar. published: None only for bounds of our number itself."""
        met = (self.least is None or ours >= self.least) and (self.most is None or ours <= self.most)
        if published is None:
            return met
        share = abs(ours - published) / abs(published) if published else abs(ours)
        met &= self.within is None or share <= self.within + EXACT
        met &= self.factor is None or published / self.factor <= ours <= published * self.factor
        met &= self.points is None or abs(ours - published) <= self.points + EXACT
        return met and (self.digits is None or round(ours, self.digits) == round(published, self.digits))


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A table, figure or sentence. name: of the command; where: in the paper; how: letters of HOW; does: what ours is.

    needs: graphs by name ("graph ogbn-arxiv"), machines ("machine m5.24xlarge"), libraries ("peer dgl"), packages and
    hardware, of which what is absent leaves cells out; takes: about how many seconds on two cores, at the default scale.
    scale: the least one at which bars count, 0: any. drawn: whether it is a figure, of which ours has a picture.
    """

    name: str
    title: str
    where: str
    how: str
    unit: str
    does: str
    published: Mapping[str, float]
    takes: float = 0.0
    needs: tuple[str, ...] = ()
    scale: float = 0.0
    drawn: bool = False
    says: str = ""
    bars: tuple[Bar, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.how != "X"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A paper's items, and the extents of its graphs as it prints them."""

    name: str
    title: str
    source: str
    items: tuple[Item, ...]
    graphs: Mapping[str, Mapping[str, Any]]

    def item(self, name: str) -> Item:
        """Return an item. Raises: SystemExit that lists the names."""
        found = {item.name: item for item in self.items}
        if name not in found:
            raise SystemExit(f"{self.title} has no item {name}; there are {', '.join(found)}")
        return found[name]

    def shape(self, name: str, **more: Any) -> GraphShape:
        """Return the extents of one of its graphs; more: fields of the shape that they replace."""
        of = self.graphs[name]
        known = {
            "num_vertices": of["vertices"],
            "num_edges": of["edges"],
            "num_features": of["features"],
            "num_classes": of["classes"],
            "num_training": of.get("training"),
        }
        return GraphShape(**{"name": name, "symmetric": of.get("symmetric", True)} | known | more)


@dataclass(kw_only=True, slots=True)
class Ours:
    """What ours gave. values: by the names of cells; text: tables and sentences beside them; reason: what was measured that
    explains a bar that is missed; absent: what was needed and is not here; plots: as `bench.report` makes them.
    """

    values: dict[str, float]
    text: str = ""
    reason: str = ""
    absent: list[str] = field(default_factory=list)
    plots: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An item's verdict in words, whether it counts as a failure, and the lines of its table."""

    verdict: str
    failed: bool
    rows: list[list[str]]


HEAD = ["", "published", "ours", "ours / published", "bar", ""]


def read_paper(name: str) -> Paper:
    """Read a paper's file. Raises: ValueError, TypeError naming what is missing, unknown or twice."""
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    items = tuple(_item(table) for table in content.pop("item"))
    names = [item.name for item in items]
    if len(set(names)) != len(names):
        raise ValueError(f"{name}.toml has an item twice among {', '.join(names)}")
    return Paper(name=name, items=items, graphs=content.pop("graphs", {}), **content)


def _item(table: dict[str, Any]) -> Item:
    bars = tuple(Bar(**bar | {"cells": tuple(bar.get("cells", ()))}) for bar in table.pop("bar", ()))
    item = Item(bars=bars, needs=tuple(table.pop("needs", ())), **table)
    if not item.how or not set(item.how) <= set(HOW):
        raise ValueError(f"{item.name}: how is made of {', '.join(HOW)}, got {item.how!r}")
    for bar in bars:
        lacking = [cell for cell in bar.cells if cell not in item.published and bar.needs_published]
        if lacking:
            raise ValueError(f"{item.name}: no published number for {', '.join(lacking)}, which has a bar")
    return item


def judge(item: Item, ours: Ours, scale: float) -> Outcome:
    """Return how an item fared: of every bar, enough of the cells that there are must meet it, and none that it names may
    be lacking unless something is absent.
    """
    rows, failing, judged = [], [], 0
    bar_of = {cell: bar for bar in item.bars for cell in _cells(bar, item, ours)}
    for cell in dict.fromkeys((*item.published, *ours.values)):
        rows.append(_row(cell, item.published.get(cell), ours.values.get(cell), bar_of.get(cell)))
    for bar in (bar for bar in item.bars if scale >= bar.scale):
        there = [cell for cell in _cells(bar, item, ours) if cell in ours.values]
        met = sum(bar.is_met(ours.values[cell], item.published.get(cell)) for cell in there)
        judged += len(there)
        if lacking := [cell for cell in bar.cells if cell not in ours.values and not ours.absent]:
            failing.append(f"no number for {', '.join(lacking)}")
        if there and met < (bar.of or len(there)):
            failing.append(f"{met} of {len(there)} are {bar.text}" + f", {bar.of} should be" * (bar.of > 0))
    verdict = _verdict(item, ours, failing, judged, scale)
    return Outcome(verdict=verdict, failed=verdict.startswith("MISSED"), rows=rows)


def _cells(bar: Bar, item: Item, ours: Ours) -> Iterable[str]:
    every = item.published if bar.needs_published else dict.fromkeys((*item.published, *ours.values))
    return bar.cells or every


def _verdict(item: Item, ours: Ours, failing: list[str], judged: int, scale: float) -> str:
    absent = "; ".join(ours.absent)
    if not ours.values and absent:
        return f"not run: absent: {absent}"
    beside = f" (absent: {absent})" if absent else ""
    if not item.bars:
        return f"reported, there is no bar{beside}"
    if not judged:
        return f"not judged{beside}"
    if scale < item.scale:
        return f"not judged at scale {scale:g}: the bar is for {item.scale:g}{beside}"
    return (f"MISSED: {'; '.join(failing)}" if failing else "met") + beside


def _row(cell: str, published: float | None, ours: float | None, bar: Bar | None) -> list[str]:
    ratio = f"{ours / published:.3g}" if ours is not None and published else ""
    met = "" if bar is None or ours is None else "yes" if bar.is_met(ours, published) else "no"
    return [cell, _number(published), _number(ours), ratio, "" if bar is None else bar.text, met]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
