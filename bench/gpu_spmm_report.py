"""The Markdown of the sparse products: milliseconds, bytes per second against the ceilings, and the ratios aimed at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from common import table

Rows = list[dict[str, Any]]
GOAL_MEAN, GOAL_LEAST, GOAL_BF16 = 1.2, 0.9, 1.7
"""Own float32 over the best of cuSPARSE, in the geometric mean and anywhere; bf16 over float32 from width 64 on."""
FACTORS = {"float32": 4, "bfloat16": 2}


def describe(parts: Mapping[str, Rows]) -> str:
    """All graphs: `parts` are the rows of every part by name; `spmm GRAPH`, `variants GRAPH` and `ceilings` are read."""
    names = dict.fromkeys(name.partition(" ")[2] for name in parts if name.startswith(("spmm ", "variants ")))
    found = {name: [*parts.get(f"spmm {name}", []), *parts.get(f"variants {name}", [])] for name in names}
    graphs = {name: [row for row in rows if row.get("contender") != "own shape"] for name, rows in found.items()}
    if not graphs:
        return ""
    text = verdicts(graphs)
    for name, rows in graphs.items():
        facts = next((row for row in rows if row["kind"] == "graph"), {})
        text += f"\n### {name}\n\n"
        if facts:
            text += f"{facts['rows']:,} rows, {facts['nnz']:,} nonzeros, the longest row {facts['longest']:,}.\n\n"
        for dtype in FACTORS:
            text += one_table(
                [row for row in rows if row.get("type") == dtype], dtype, facts, parts.get("ceilings", [])
            )
    return text


def one_table(rows: Rows, dtype: str, facts: dict[str, Any], ceilings: Rows) -> str:
    """Contenders by width: milliseconds, GB/s."""
    widths = sorted({row["width"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        found = {row["width"]: row for row in rows if row["contender"] == name}
        lines.append([name, *(cell(found.get(width)) for width in widths)])
    if facts and ceilings:
        limits = [ceiling(ceilings, width * FACTORS[dtype], facts["rows"]) for width in widths]
        lines.append(["gather ceiling, GB/s", *("" if limit is None else f"{limit:.0f}" for limit in limits)])
    head = [f"{dtype}: ms (GB/s)", *(f"width {width}" for width in widths)]
    return table(head, lines) + "\n" if lines else ""


def cell(row: dict[str, Any] | None) -> str:
    """A measurement in a table."""
    if row is None:
        return ""
    if "median" not in row:
        return "failed"
    mark = "" if row["how"] in ("captured", "emulated") else " *"
    return f"{1e3 * row['median']:.3f} ({row['gb_per_s']:.0f}){mark}"


def ceiling(rows: Rows, row_bytes: int, num_rows: int) -> float | None:
    """GB/s of rows gathered at random: of the next wider or equal width, of the footprint of about the operand's size."""
    gathered = [row for row in rows if row["kind"] == "gather" and "median" in row]
    if not gathered:
        return None
    wide = min((r["row_bytes"] for r in gathered if r["row_bytes"] >= row_bytes), default=gathered[-1]["row_bytes"])
    places = list(dict.fromkeys(row["footprint"] for row in gathered))
    size = num_rows * row_bytes
    place = places[0] if size < 25e6 else places[-2] if size < 800e6 else places[-1]
    return next((r["gb_per_s"] for r in gathered if r["row_bytes"] == wide and r["footprint"] == place), None)


def mean(values: Iterable[float]) -> float:
    """The geometric mean, nan of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratios(graphs: Mapping[str, Rows]) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """By graph and width: time of the best of cuSPARSE over own float32, own float32 over own bf16 from width 64 on."""
    over_cusparse, over_fp32 = {}, {}
    for name, rows in graphs.items():
        seconds = {(r["type"], r["width"], r["contender"]): r["median"] for r in rows if "median" in r and "type" in r}
        for width in sorted({key[1] for key in seconds}):
            own = seconds.get(("float32", width, "own"))
            half = seconds.get(("bfloat16", width, "own"))
            theirs = [
                s for (t, w, c), s in seconds.items() if (t, w) == ("float32", width) and c.startswith("cuSPARSE")
            ]
            if own and theirs:
                over_cusparse[name, width] = min(theirs) / own
            if own and half and width >= 64:
                over_fp32[name, width] = own / half
    return over_cusparse, over_fp32


def verdicts(graphs: Mapping[str, Rows]) -> str:
    """The acceptance ratios with their goals."""
    over_cusparse, over_fp32 = ratios(graphs)
    text = ""
    if over_cusparse:
        average, (where, least) = mean(over_cusparse.values()), min(over_cusparse.items(), key=lambda item: item[1])
        text += f"- own float32 over the best of cuSPARSE: geometric mean {judged(average, GOAL_MEAN)}, least "
        text += f"{judged(least, GOAL_LEAST)} ({where[0]}, width {where[1]})\n"
    if over_fp32:
        text += f"- own bfloat16 over own float32, widths from 64: {judged(mean(over_fp32.values()), GOAL_BF16)}\n"
    return text + "- `*`: the capture was refused; launched from the host, for which short products wait\n"


def judged(ratio: float, goal: float) -> str:
    return f"{ratio:.2f} ({'met' if ratio >= goal else 'MISSED'}, goal {goal})"
