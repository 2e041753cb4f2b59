"""Tables for notebooks, which display an object through its `_repr_html_`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of two columns under a title; everything is escaped."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
