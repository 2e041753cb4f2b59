"""The Markdown of all shapes of the sparse kernel: the fastest for each graph, width and type beside the one chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common import table

Rows = list[dict[str, Any]]


def describe(parts: Mapping[str, Rows]) -> str:
    """`parts` are the rows of every part by name, of which `variants GRAPH` and `spmm GRAPH` are read."""
    lines: list[list[Any]] = []
    for name, rows in parts.items():
        part, _, graph = name.partition(" ")
        if part != "variants":
            continue
        timed = [row for row in rows if row.get("contender") == "own shape" and "median" in row]
        for key in dict.fromkeys((row["width"], row["type"]) for row in timed):
            found = sorted((r for r in timed if (r["width"], r["type"]) == key), key=lambda r: float(r["median"]))
            lines.append([graph, *key, *map(shape, found[:3]), chosen(parts.get(f"spmm {graph}", []), *key, found[0])])
    if not lines:
        return ""
    head = ["graph", "width", "type", "fastest", "second", "third", "chosen: time over the fastest"]
    return "Shapes are lanes x pieces x unroll.\n\n" + table(head, lines)


def shape(row: dict[str, Any]) -> str:
    return f"{row['lanes']} x {row['pieces']} x {row['unroll']}: {1e3 * row['median']:.3f} ms"


def chosen(rows: Rows, width: int, dtype: str, best: dict[str, Any]) -> str:
    """What the choice cost, if it was measured."""
    for row in rows:
        if (row.get("width"), row.get("type"), row.get("contender")) == (width, dtype, "own") and "median" in row:
            return f"{row['lanes']} x {row['pieces']} x {row['unroll']}: {row['median'] / best['median']:.2f}"
    return ""
