"""What bench/peers_spmm.py's figures say: the table, how the goals fared, and what is drawn."""

from __future__ import annotations

from typing import Any

import ceilings
from common import spread, table
from peers_spmm_cases import (
    BF16_FROM_WIDTH,
    BF16_OVER_FP32,
    DGL,
    DRAWN,
    GOALS,
    KINDS,
    NEEDS_PYG_BEST,
    NOWHERE_BELOW,
    ORDERED,
    OVER_TORCH,
    OWN,
)
from plots import bars

Rows = list[list[Any]]


def medians(found: dict[str, Any]) -> dict[str, float]:
    return {kind: spread(values)["median"] for kind, values in found["seconds"].items()}


def lines_of(found: dict[str, Any], figures: dict[str, Any], threads: int) -> Rows:
    """The table's lines of one graph at one width."""
    lines = []
    for kind, values in found["seconds"].items():
        line, cpu = spread(values), spread(found["cpu_seconds"][kind])["median"] / threads
        row = found["width"] * (2 if "bf16" in kind else 4)
        gathers = [(found["nonzeros"] * row, found["vertices"] * row)]
        bound, cached = (ceilings.gathering_s(figures, gathers, in_cache) for in_cache in (False, True))
        lines.append(
            [
                found["graph"],
                found["width"],
                kind,
                f"{1000 * line['median']:.1f}",
                f"{1000 * line['min']:.1f} .. {1000 * line['max']:.1f}",
                f"{line['iqr_over_median']:.0%}",
                f"{1000 * cpu:.1f}",
                f"{gathers[0][0] / line['median'] / 1e9:.1f}",
                f"{2 * found['nonzeros'] * found['width'] / line['median'] / 1e9:.1f}",
                f"{bound / line['median']:.2f}",
                f"{cached / line['median']:.2f}",
                f"{line['median'] / found['base_s'][kind]:.2f}",
                f"{found['apart'][kind]:.0e}",
            ]
        )
    return lines


HEAD = (
    "graph",
    "width",
    "product",
    "ms (median)",
    "min .. max",
    "IQR",
    "cpu ms / threads",
    "gathered GB/s",
    "GFLOP/s",
    "of the bound",
    "of the bound in cache",
    "time / mggcn",
    "apart",
)


def verdict(what: str, ratio: float, goal: float) -> str:
    return f"- {what}: {ratio:.2f} ({'met' if ratio >= goal else 'MISSED'}, goal {goal:g})\n"


def verdicts(results: list[dict[str, Any]]) -> str:
    """How the goals fared, as far as their rows were measured; in the order of the store unless a goal allows the other."""
    text, least = "", []
    for found in results:
        times, where = medians(found), f"{found['graph']}, width {found['width']}"
        if OWN not in times:
            continue
        for goal in (g for g in GOALS if (g.graph, g.width) == (found["graph"], found["width"])):
            own = min(times[OWN], times.get(ORDERED, times[OWN])) if goal.ordered else times[OWN]
            text += verdict(f"{where}: over {DGL}", times[DGL] / own, goal.over_dgl) if DGL in times else ""
            if pyg := [times[kind] for kind in NEEDS_PYG_BEST if kind in times]:
                text += verdict(f"{where}: over torch CSR and PyG's fastest", min(pyg) / own, OVER_TORCH)
        if DGL in times:
            least.append((times[DGL] / times[OWN], where))
        if f"{OWN} bf16" in times and found["width"] >= BF16_FROM_WIDTH:
            text += verdict(f"{where}: bf16 over float32", times[OWN] / times[f"{OWN} bf16"], BF16_OVER_FP32)
    if least:
        ratio, where = min(least)
        text += verdict(f"the least over {DGL}, {where}", ratio, NOWHERE_BELOW)
    return text or "Nothing was measured that has a goal.\n"


def plots_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times of the kinds that matter over mggcn's, by graph and width."""
    cells = {}
    for found in results:
        times = medians(found)
        if OWN in times:
            drawn = {kind: times[kind] / times[OWN] for kind in DRAWN if kind in times}
            cells[f"{found['graph']}, {found['width']}"] = drawn
    return bars("Products of a graph", "time over mggcn's (float32, order of the store), logarithmic", cells)


def describe(record: dict[str, Any]) -> str:
    """The report's text."""
    results, settings = record["measured"], record["settings"]
    lines = [line for found in results for line in lines_of(found, record["ceilings"], settings["threads"])]
    text = (
        f"Scale {settings['scale']:g}, {settings['threads']} threads, {settings['rounds']} rounds in shuffled order, "
        "float32 unless it says bf16, malloc tuned. The bound: every nonzero's row gathered at this machine's rate for an "
        "operand of that size; in cache: at the rate of a shared cache, which blocks and panels aim at.\n\n"
    )
    judged = verdicts(results) if settings["scale"] == 1.0 else "Goals are for graphs at scale 1.\n"
    text += table(HEAD, lines) + f"\n## Goals\n\n{judged}\n## What a call does\n\n"
    text += table(["product", "one call"], [[kind, KINDS[kind][1]] for kind in KINDS])
    ways = [
        [f["graph"], f["width"], kind, facts["way"] or "-", f"{facts['order_seconds']:.2f}"]
        for f in results
        for kind, facts in f["facts"].items()
        if facts["order_seconds"] is not None
    ]
    text += "\n## How mggcn multiplied, and what its order cost\n\n"
    text += table(["graph", "width", "product", "way", "order s"], ways)
    text += "".join(f"\nLeft out: {line}.\n" for line in record["left_out"])
    return text + f"\n## Ceilings\n\n{ceilings.describe(record['ceilings'])}"
