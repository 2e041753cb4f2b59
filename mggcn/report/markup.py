"""Pieces of HTML: every text is escaped as it enters, so pieces can be joined freely.

page.css and page.js go into every page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mggcn.files import read_bytes


def escape(text: object) -> str:
    """Return the text as HTML, quotes included; control characters, which HTML forbids, become U+FFFD."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))
    return html.escape(plain, quote=True)


def prose(text: object) -> str:
    """Return a sentence as HTML, what stands in backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))


def image(path: Path, description: str) -> str:
    """Inline a PNG, so that the page is one file."""
    data = base64.b64encode(read_bytes(path)).decode("ascii")
    return f'<div class="wide"><img alt="{escape(description)}" src="data:image/png;base64,{data}"></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """Return a table; the columns listed in `numeric` are aligned to the right. An empty head gives none."""
    right = set(numeric)

    def cells(tag: str, values: Sequence[object]) -> str:
        classes = [' class="n"' if column in right else "" for column in range(len(values))]
        return "".join(f"<{tag}{c}>{escape(v)}</{tag}>" for c, v in zip(classes, values, strict=True))

    lines = [f"<thead><tr>{cells('th', head)}</tr></thead>"] if head else []
    lines += ["<tbody>", *(f"<tr>{cells('td', row)}</tr>" for row in rows), "</tbody>"]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def shaded_table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str], Sequence[float]]]) -> str:
    """Return a table of rows: a name, the text of each cell, and its shade from 0 to 1."""

    def cell(text: str, shade: float) -> str:
        return f'<td class="n" style="background:rgba(var(--shade),{0.6 * shade:.2f})">{escape(text)}</td>'

    top = "".join(f"<th{' class=n' * (number > 0)}>{escape(name)}</th>" for number, name in enumerate(head))
    lines = [f"<tr><td>{escape(name)}</td>{''.join(map(cell, texts, shades))}</tr>" for name, texts, shades in rows]
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table class="shaded">{body}</table></div>'


def details(summary: str, body: str) -> str:
    """Fold `body`, which is HTML, under a line of text."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete document that loads nothing and runs page.js alone, which the policy names by its hash."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{script}</script></body></html>\n"
    )
