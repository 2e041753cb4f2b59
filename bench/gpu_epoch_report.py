"""The Markdown of the epochs: seconds, memory, products and launches of every contender, and the ratios aimed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import table
from gpu_cases import CASES, PRECISIONS
from gpu_graphs import ORDERED
from gpu_predict import epoch_work, from_ceilings, plan_case, total
from gpu_pyg import KINDS, SHIPPED

Rows = list[dict[str, Any]]
GIB = 2**30
FASTER = {"fp32": 2.0, "mixed": 3.0, "bf16": 4.5}
"""Seconds of PyG's fastest way in float32 over mggcn's."""
FASTER_REDDIT = 5.0
SMALLER = {"fp32": 0.65, "bf16": 0.4}
"""mggcn's peak over that of PyG's fastest way, where PyG needs more than SIZE bytes."""
SIZE = GIB
CORA_S = 130e-6
AGREEMENT = 1e-4


def describe(parts: Mapping[str, Rows]) -> str:
    """All cases: `parts` are the rows of every part by name, of which `epoch CASE` and `compile CASE` are read."""
    text = ""
    for name, rows in parts.items():
        part, _, case = name.partition(" ")
        if part == "epoch":
            rows = [*rows, *parts.get(f"compile {case}", [])]
            judged = verdicts(case, rows, predictions(case, rows, parts))
            text += f"### {case}\n\n{extents(rows)}{judged}\n{contenders(rows)}\n"
    return text


def predictions(case: str, rows: Rows, parts: Mapping[str, Rows]) -> dict[str, float]:
    """Seconds by precision as the measured ceilings let expect; none for a scaled graph or without ceilings."""
    if (
        case not in CASES
        or CASES[case][0] == ORDERED
        or rows[0].get("settings", {}).get("scale") != 1.0
        or "ceilings" not in parts
    ):
        return {}
    rates = from_ceilings(parts["ceilings"], parts["ceilings"][0].get("device", {}))
    return {name: total(epoch_work(plan_case(*CASES[case], name)), rates) for name in PRECISIONS}


def extents(rows: Rows) -> str:
    row = next((row for row in rows if row["kind"] == "case"), None)
    if row is None:
        return ""
    widths = ", ".join(map(str, row["hidden"]))
    return (
        f"{row['graph']}: {row['rows']:,} vertices, {row['nnz']:,} nonzeros with self-loops, hidden {widths}, "
        f"{row['classes']} classes.\n\n"
    )


def timed(rows: Rows) -> Rows:
    return [row for row in rows if row["kind"] == "epoch" and "median" in row]


def fastest_peer(rows: Rows, kinds: Sequence[str] = KINDS) -> dict[str, Any] | None:
    """PyG's fastest way in float32 among some kinds."""
    peers = [row for row in timed(rows) if row.get("pyg") in kinds and row["precision"] == "fp32"]
    return min(peers, key=lambda row: row["median"], default=None)


def goal_of(case: str, precision: str) -> float | None:
    """How many times as fast as PyG mggcn is to be; None: no goal."""
    if case.startswith("cora"):
        return None
    return FASTER_REDDIT if case.startswith("reddit") and precision in FASTER else FASTER.get(precision)


def verdicts(case: str, rows: Rows, predicted: dict[str, float]) -> str:
    """Ratios with their goals, precision by precision."""
    peer = fastest_peer(rows)
    if peer is None:
        return "- no PyG to compare with\n"
    text = f"- PyG's fastest in float32: {peer['contender']}, {peer['mode']}"
    shipped = fastest_peer(rows, SHIPPED)
    text += f"; as shipped: {shipped['contender']}, {shipped['mode']}\n" if shipped else "; none as shipped\n"
    for own in timed(rows):
        if own["contender"] != "mggcn":
            continue
        precision = own["precision"]
        ratio, aim = peer["median"] / own["median"], goal_of(case, precision)
        text += f"- {precision}, {own['mode']}: {ratio:.2f} times as fast as PyG's fastest"
        text += f" ({'met' if ratio >= aim else 'MISSED'}, goal {aim:g})" if aim else ""
        text += f", {shipped['median'] / own['median']:.2f} times as PyG as shipped" if shipped else ""
        used, theirs = own["memory"]["allocated"], peer["memory"]["allocated"]
        if theirs:
            text += f"; memory {used / theirs:.2f} of PyG's"
            if precision in SMALLER and theirs > SIZE:
                goal = SMALLER[precision]
                text += f" ({'met' if used <= goal * theirs else 'MISSED'}, goal {goal:g})"
        if precision in ("fp32", "tf32"):
            text += f"; losses {apart(own, peer):.1e} apart"
            text += "" if precision == "tf32" or apart(own, peer) <= AGREEMENT else ": NOT THE SAME NETWORK"
        if case.startswith("cora"):
            text += f"; {1e6 * own['median']:.0f} us ({'met' if own['median'] < CORA_S else 'MISSED'}, goal 130 us)"
        text += f"; predicted {1e3 * predicted[precision]:.3f} ms" if precision in predicted else ""
        text += "\n"
    return text


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference between the first losses of two contenders."""
    return max((abs(a / b - 1) for a, b in zip(one["losses"], other["losses"], strict=False)), default=0.0)


def contenders(rows: Rows) -> str:
    """The table of a case."""
    lines = [
        [
            row["contender"] + (", as shipped" if row.get("pyg") in SHIPPED else ""),
            row["precision"],
            row["mode"],
            f"{1e3 * row['median']:.3f}",
            f"{1e3 * row['min']:.3f} .. {1e3 * row['max']:.3f}",
            f"{row['memory']['allocated'] / GIB:.2f}",
            f"{row['planned'] / GIB:.2f}" if "planned" in row else "",
            row.get("products") or "",
            row.get("kernels") or "",
            f"{row['losses'][0]:.6f}",
        ]
        for row in timed(rows)
    ]
    head = ["contender", "precision", "mode", "ms/epoch (median)", "min .. max", "peak GiB", "planned GiB"]
    return table([*head, "products with the graph", "launches", "first loss"], lines)
