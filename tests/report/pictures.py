"""What tests ask of a drawn figure."""

from __future__ import annotations

from typing import Any

import numpy as np


def overlaps(figure: Any, texts: list[Any]) -> list[tuple[str, str]]:
    """Return the pairs of texts that lie over each other."""
    shown, renderer = [t for t in texts if t.get_text()], figure.canvas.get_renderer()
    low, high = np.array([t.get_window_extent(renderer).get_points() for t in shown]).reshape(-1, 2, 2).swapaxes(0, 1)
    apart = (low[:, None] > high[None]).any(axis=2)
    pairs = np.argwhere(np.triu(~(apart | apart.T), 1))
    return [(shown[i].get_text(), shown[j].get_text()) for i, j in pairs]


def outside(figure: Any, texts: list[Any]) -> list[str]:
    """Return the texts that the edge of the picture cuts."""
    whole, renderer = figure.bbox, figure.canvas.get_renderer()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
    return [text for text, b in boxes if b.x0 < whole.x0 or b.x1 > whole.x1 or b.y0 < whole.y0 or b.y1 > whole.y1]
