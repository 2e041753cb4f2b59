"""Pieces of HTML: every text is escaped as it enters, so pieces can be joined freely."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid #ddd; }
p.under { color: #666; margin: 0 0 1rem; overflow-wrap: anywhere; }
p.note { background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem .8rem; }
img { max-width: 100%; height: auto; display: block; margin: .6rem 0; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: left; padding: .22rem .8rem .22rem 0; border-bottom: 1px solid #e6e6e6; vertical-align: top;
         overflow-wrap: anywhere; }
th { color: #555; font-weight: 600; }
th.n, td.n { text-align: right; white-space: nowrap; }
td.code, li { font-family: ui-monospace, monospace; font-size: .86rem; }
div.wide { overflow-x: auto; }
div.columns { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: #0072b2; }
"""


def escape(text: object) -> str:
    """Return the text as HTML, quotes included; control characters, which HTML forbids, become U+FFFD."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))
    return html.escape(plain, quote=True)


def image(path: Path, description: str) -> str:
    """Inline a PNG, so that the page is one file."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """Return a table; the columns listed in `numeric` are aligned to the right. An empty head gives none."""
    right = set(numeric)

    def cells(tag: str, values: Sequence[object]) -> str:
        classes = [' class="n"' if column in right else "" for column in range(len(values))]
        return "".join(f"<{tag}{c}>{escape(v)}</{tag}>" for c, v in zip(classes, values, strict=True))

    lines = [f"<thead><tr>{cells('th', head)}</tr></thead>"] if head else []
    lines += ["<tbody>", *(f"<tr>{cells('td', row)}</tr>" for row in rows), "</tbody>"]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def details(summary: str, body: str) -> str:
    """Fold `body`, which is HTML, under a line of text."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete document that loads nothing."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
