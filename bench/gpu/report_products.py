"""The Markdown of the sparse products on a GPU: milliseconds and bytes per second against the ceilings, goals, shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from bench.report import table, verdict

Row = dict[str, Any]
Rows = list[Row]
Parts = Mapping[str, Rows]
"""The rows of every part by name, such as `spmm GRAPH` and `ceilings`."""
OVER_CUSPARSE, NOWHERE_BELOW, BF16_OVER_FP32 = 1.2, 0.9, 1.7
"""Own float32 over the best of cuSPARSE, in the geometric mean and anywhere; bf16 over float32 from width 64 on."""


def timed(rows: Rows, *kinds: str) -> Rows:
    return [row for row in rows if row["kind"] in kinds and row.get("median") is not None]


def ms(row: Row) -> str:
    return f"{1e3 * row['median']:.3f}"


def describe(parts: Parts) -> str:
    """Verdicts, then a table for each graph and type: milliseconds and GB/s by contender and width."""
    graphs = {}
    for name in dict.fromkeys(name.partition(" ")[2] for name in parts if name.startswith(("spmm ", "variants "))):
        rows = [*parts.get(f"spmm {name}", []), *parts.get(f"variants {name}", [])]
        graphs[name] = [row for row in rows if row.get("contender") != "own shape"]
    text = product_verdicts(graphs)
    for name, rows in graphs.items():
        facts = next((row for row in rows if row["kind"] == "graph"), None)
        extents = (
            f"{facts['rows']:,} rows, {facts['nnz']:,} nonzeros, the longest {facts['longest']:,}" if facts else ""
        )
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            found = {(r["contender"], r["width"]): r for r in rows if r.get("type") == dtype}
            widths = sorted({width for _, width in found})
            lines = [
                [c, *(product_cell(found.get((c, w))) for w in widths)] for c in dict.fromkeys(c for c, _ in found)
            ]
            if facts and parts.get("ceilings"):
                limits = [ceiling(parts["ceilings"], width * size, facts["rows"]) for width in widths]
                lines.append(["gather ceiling, GB/s", *("" if limit is None else f"{limit:.0f}" for limit in limits)])
            head = [f"{dtype}: ms (GB/s)", *(f"width {width}" for width in widths)]
            text += f"\n### {name}, {dtype}\n\n{extents}.\n\n{table(head, lines)}" if found else ""
    return text


def product_cell(row: Row | None) -> str:
    """A measurement in a table; `*`: the capture was refused, launches from the host may have been waited for."""
    if row is None or "median" not in row:
        return "" if row is None else "failed"
    return f"{ms(row)} ({row['gb_per_s']:.0f})" + ("" if row["how"] in ("captured", "emulated") else " *")


def ceiling(rows: Rows, row_bytes: int, num_rows: int) -> float | None:
    """GB/s of rows gathered at random: of the next wider or equal width, of the footprint of about the operand's size."""
    gathered = timed(rows, "gather")
    if not gathered:
        return None
    wide = min((r["row_bytes"] for r in gathered if r["row_bytes"] >= row_bytes), default=gathered[-1]["row_bytes"])
    places = list(dict.fromkeys(row["footprint"] for row in gathered))
    size = num_rows * row_bytes
    place = places[0] if size < 25e6 else places[-2] if size < 800e6 else places[-1]
    return next((r["gb_per_s"] for r in gathered if r["row_bytes"] == wide and r["footprint"] == place), None)


def ratios(graphs: Parts) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """By graph and width: time of the best of cuSPARSE over own float32, own float32 over own bf16 from width 64 on."""
    over_cusparse, over_fp32 = {}, {}
    for name, rows in graphs.items():
        seconds = {(r["type"], r["width"], r["contender"]): r["median"] for r in rows if "median" in r and "type" in r}
        for width in sorted({key[1] for key in seconds}):
            own, half = (seconds.get((dtype, width, "own")) for dtype in ("float32", "bfloat16"))
            theirs = [s for (t, w, c), s in seconds.items() if (t, w, c[:8]) == ("float32", width, "cuSPARSE")]
            if own and theirs:
                over_cusparse[name, width] = min(theirs) / own
            if own and half and width >= 64:
                over_fp32[name, width] = own / half
    return over_cusparse, over_fp32


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def product_verdicts(graphs: Parts) -> str:
    over_cusparse, over_fp32 = ratios(graphs)
    text = ""
    if over_cusparse:
        (graph, width), least = min(over_cusparse.items(), key=lambda item: item[1])
        text += verdict(
            "own float32 over the best of cuSPARSE, geometric mean", mean(over_cusparse.values()), OVER_CUSPARSE
        )
        text += verdict(f"the least, {graph}, width {width}", least, NOWHERE_BELOW)
    if over_fp32:
        text += verdict("own bfloat16 over own float32, widths from 64", mean(over_fp32.values()), BF16_OVER_FP32)
    return text


def shapes(parts: Parts) -> str:
    """The three fastest shapes (lanes x pieces x unroll) of each graph, width and type, beside the one chosen."""
    lines: list[list[Any]] = []
    for name, rows in parts.items():
        part, _, graph = name.partition(" ")
        tried = [row for row in timed(rows, "spmm") if row["contender"] == "own shape"] if part == "variants" else []
        for key in dict.fromkeys((row["width"], row["type"]) for row in tried):
            best = sorted((r for r in tried if (r["width"], r["type"]) == key), key=lambda r: float(r["median"]))[:3]
            own = [r for r in timed(parts.get(f"spmm {graph}", []), "spmm") if r["contender"] == "own"]
            chosen = [r for r in own if (r["width"], r["type"]) == key]
            cells = [f"{shape(r)}: {ms(r)} ms" for r in best] + [""] * (3 - len(best))
            cells += [f"{shape(r)}: {r['median'] / best[0]['median']:.2f}" for r in chosen[:1]]
            lines.append([graph, *key, *cells])
    head = ["graph", "width", "type", "fastest", "second", "third", "chosen: time over the fastest"]
    return table(head, lines) if lines else ""


def shape(row: Row) -> str:
    return f"{row['lanes']} x {row['pieces']} x {row['unroll']}"
