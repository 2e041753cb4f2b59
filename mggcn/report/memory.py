"""memory.png: where each buffer of the train program is in the arena and when, and what the memory is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mggcn.report.figure import (
    GRID,
    INK,
    MUTED,
    PALETTE,
    byte_unit,
    drawable,
    format_bytes,
    new_figure,
    save,
    tidy,
)
from mggcn.report.run_folder import Json

RUNTIME = "runtime"
"""The region that Python, torch and their libraries take, whatever the graph."""
_LIFETIMES = {"constant": "#b7c9d9", "state": "#f2c894", "kept": "#8fc7ad", "scratch": "#e8b6cf"}
_OTHER = "#cccccc"
_MAP_INCHES = 4.6
_LABEL_PT = 7.0
_CHAR_INCHES = 0.062
"""Width of a character of 7 points, rounded up; a label that may not fit is left to the table."""


def draw_memory(plan: Json, path: Path) -> Path:
    """Draw the arena of rank 0 over the ops of the training program, and the regions of every rank."""
    ops = [str(op) for op in plan["programs"]["train"]] or ["(no ops)"]
    ranks = plan["per_rank"]
    width = min(max(6.5, 0.36 * len(ops) + 1.2), 26.0)
    bars = min(1.2 + 0.3 * len(ranks), 6.0)
    figure = new_figure(width + bars + 2.2, _MAP_INCHES + 1.6)
    map_axes, bar_axes = figure.subplots(1, 2, width_ratios=[width, bars])
    _draw_map(map_axes, ops, ranks[0], width)
    _draw_regions(bar_axes, ranks)
    return save(figure, path)


def _draw_map(axes: Any, ops: list[str], rank: Json, width: float) -> None:
    buffers = [b for b in rank["buffers"] if b["program"] == "train" and b["nbytes"] > 0]
    arena = max([rank["arena_bytes"], *(b["offset"] + b["nbytes"] for b in buffers), 1])
    unit, unit_name = byte_unit(arena)
    inches = (width - 1.0) / len(ops), _MAP_INCHES / (1.04 * arena)
    unlabelled = sum([not _draw_buffer(axes, buffer, len(ops), unit, inches) for buffer in buffers])
    axes.axhline(rank["arena_bytes"] / unit, color=INK, linewidth=1.0)
    axes.set_ylim(0, 1.04 * arena / unit)
    axes.set_xlim(-0.5, len(ops) - 0.5)
    axes.set_xticks(range(len(ops)), [drawable(op, 24) for op in ops], parse_math=False)
    axes.tick_params(axis="x", rotation=90)
    axes.set_ylabel(f"offset in the arena ({unit_name})", fontsize=9)
    axes.grid(True, axis="x", color=GRID, linewidth=0.4)
    axes.set_axisbelow(True)
    tidy(axes)
    axes.tick_params(axis="x", labelsize=7, length=2)
    title = f"arena of rank {rank['rank']}, train program: {format_bytes(rank['arena_bytes'])}"
    hidden = f" ({unlabelled} too small to name)" if unlabelled else ""
    axes.set_title(title + hidden, fontsize=10, loc="left", color=INK)
    _draw_lifetimes(axes, buffers)


def _draw_buffer(axes: Any, buffer: Json, num_ops: int, unit: float, inches: tuple[float, float]) -> bool:
    """Draw one buffer as ops x bytes; return whether its name fitted."""
    from matplotlib.patches import Rectangle

    first, last = (min(max(int(buffer[end]), 0), num_ops - 1) for end in ("first", "last"))
    x, y = first - 0.5, buffer["offset"] / unit
    length, height = last - first + 1, buffer["nbytes"] / unit
    colour = _LIFETIMES.get(buffer["lifetime"], _OTHER)
    axes.add_patch(Rectangle((x, y), length, height, facecolor=colour, edgecolor="white", linewidth=0.8))
    axes.plot([x + 0.04, x + length - 0.04], [y, y], color=MUTED, linewidth=0.6)
    across, up = length * inches[0], buffer["nbytes"] * inches[1]
    name, size = drawable(buffer["name"], 24), format_bytes(buffer["nbytes"])
    text, turned = _label(name, f"{buffer['rows']:,} x {buffer['cols']:,}", size, across, up)
    if text:
        axes.text(x + length / 2, y + height / 2, text, fontsize=_LABEL_PT, ha="center", va="center", color=INK,
                  rotation=90 if turned else 0, parse_math=False, linespacing=1.1)  # fmt: skip
    return bool(text)


def _label(name: str, shape: str, size: str, across: float, up: float) -> tuple[str, bool]:
    """Return the fullest label that fits into across x up inches, and whether it is turned."""
    line = _LABEL_PT * 1.25 / 72
    choices = (f"{name}\n{shape}\n{size}", f"{name}\n{size}", f"{name}  {size}", name)
    for turned, (wide, high) in ((False, (across, up)), (True, (up, across))):
        for text in choices:
            lines = text.split("\n")
            if max(map(len, lines)) * _CHAR_INCHES <= wide - 0.04 and len(lines) * line <= high:
                return text, turned
    return "", False


def _draw_lifetimes(axes: Any, buffers: list[Json]) -> None:
    from matplotlib.patches import Patch

    present = dict.fromkeys(str(b["lifetime"]) for b in buffers)
    if not present:
        axes.text(0.5, 0.5, "no buffers in the arena", transform=axes.transAxes, ha="center", color=MUTED)
        return
    handles = [Patch(color=_LIFETIMES.get(name, _OTHER), label=drawable(name)) for name in present]
    legend = axes.legend(
        handles=handles, fontsize=8, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.03)
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_regions(axes: Any, ranks: list[Json]) -> None:
    """Stack the regions of each rank; the legend carries rank 0's sizes.

    The runtime, which would squash the rest, is left out.
    """
    names = list(dict.fromkeys(name for rank in ranks for name in rank["regions"] if name != RUNTIME))
    unit, unit_name = byte_unit(max([1, *(sum(rank["regions"].get(name, 0) for name in names) for rank in ranks)]))
    bottom = [0.0] * len(ranks)
    for number, name in enumerate(names):
        heights = [rank["regions"].get(name, 0) / unit for rank in ranks]
        label = f"{drawable(name)}: {format_bytes(ranks[0]['regions'].get(name, 0))}"
        # Where colours repeat, hatches tell the regions apart.
        hatch = ("", "///", "...")[number // len(PALETTE) % 3]
        colour = PALETTE[number % len(PALETTE)]
        axes.bar(
            range(len(ranks)),
            heights,
            0.75,
            bottom,
            label=label,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    tidy(axes)
    axes.margins(x=0.08 if len(ranks) > 1 else 0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(ranks) <= 16:
        axes.set_xticks(range(len(ranks)), [str(rank["rank"]) for rank in ranks])
    axes.set_xlabel("rank", fontsize=9)
    axes.set_ylabel(f"memory ({unit_name})", fontsize=9)
    own = format_bytes(sum(ranks[0]["regions"].get(name, 0) for name in names))
    apart = f"\n(runtime: {format_bytes(ranks[0]['regions'][RUNTIME])})" if RUNTIME in ranks[0]["regions"] else ""
    axes.set_title(f"planned, rank 0: {own}{apart}", fontsize=10, loc="left", color=INK)
    handles, labels = axes.get_legend_handles_labels()
    legend = axes.legend(
        handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1)
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
