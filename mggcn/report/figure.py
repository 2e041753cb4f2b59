"""Basics of all plots: figures without global state, colours, units, and text that is safe to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mggcn.errors import BackendError
from mggcn.files import new_file

KIB, MIB, GIB = 2**10, 2**20, 2**30

# Okabe and Ito's palette: told apart with any kind of colour vision.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
INK, MUTED, GRID = "#222222", "#666666", "#dddddd"


def require_matplotlib() -> None:
    """Check that matplotlib is installed. Raises: BackendError that says how to install it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BackendError(f'the report needs matplotlib ({error}); pip install "mggcn[report]"') from error


def new_figure(width: float, height: float) -> Any:
    """Return an Agg figure of `width` x `height` inches, unknown to pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> Path:
    """Write the figure as a PNG."""
    with new_file(path, durable=False) as file:  # it can be drawn again
        figure.savefig(file, format="png", metadata={"Software": None})
    return path


def tidy(axes: Any) -> None:
    """Remove the top and right lines of the axes and other decoration."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=8)


def drawable(text: object, limit: int = 40) -> str:
    """Return `text` on one line, cut to `limit`, with `?` for what the font cannot draw.

    Draw it with parse_math=False, else a dollar sign starts a formula.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    plain = "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "?" for c in str(text))
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit in which sizes up to `largest` bytes read best, with its name."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= size:
            return size, name
    return 1, "B"


def format_bytes(nbytes: float) -> str:
    """Return a size as text, such as `1.25 GiB`."""
    size, name = byte_unit(abs(nbytes))
    return f"{nbytes:.0f} B" if size == 1 else f"{nbytes / size:.{_decimals(nbytes / size)}f} {name}"


def format_count(count: float) -> str:
    """Return a count as text, such as `12,345` or, from a hundred thousand on, `1.23 M`."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(count) >= size:
            scaled = count / (1e3 if name == "k" else size)
            return f"{scaled:.{_decimals(scaled)}f} {name}"
    return f"{count:,.0f}"


def count_unit(largest: float) -> tuple[float, str]:
    """Return the unit in which all counts of an axis up to `largest` are written, with its name: `k` for thousands."""
    for size, name in ((1e9, "G"), (1e6, "M")):
        if largest >= size:
            return size, name
    return (1e3, "k") if largest >= 1e4 else (1.0, "")


def _decimals(value: float) -> int:
    """Three significant digits, for values below a thousand or so."""
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


def numbers(values: Sequence[Any]) -> list[float]:
    """Return values as floats, with NaN for those that were not evaluated or are not numbers."""
    return [float(v) if isinstance(v, int | float) and not isinstance(v, bool) else float("nan") for v in values]
