"""One colour for each kind of op, the same in every picture of the timeline; each later stage is lighter."""

from __future__ import annotations

from mggcn.report.busy import ALONE, IDLE
from mggcn.report.figure import INK, PALETTE

COLOURS = {
    "spmm": PALETTE[0],
    "gemm": PALETTE[2],
    "elementwise": "#4d4d4d",
    "activation-grad": PALETTE[3],
    "loss": PALETTE[6],
    "optimizer": PALETTE[5],
    "broadcast": PALETTE[1],
    "all_reduce": "#7a4b00",
    "all_to_all": "#b07d2b",
    ALONE: PALETTE[1],
    IDLE: "#e8e8e8",
}
_OTHER = "#a6a6a6"
_LIGHTEST = 0.62
"""Share of white in the colour of the last stage."""


def colour_of(op: str) -> str:
    """Return the colour of a kind of op; kinds without one of their own share a grey."""
    return COLOURS.get(op, _OTHER)


def shade(colour: str, stage: int | None, num_stages: int) -> str:
    """Return the colour of a stage: the plain one for the first or for none, lighter for later ones."""
    white = _LIGHTEST * stage / (num_stages - 1) if stage and num_stages > 1 else 0.0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def text_colour(background: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(background[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
