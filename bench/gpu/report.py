"""The report of `python -m bench.gpu`: all rows as JSON, the acceptance figures as Markdown."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import report_products
from bench.gpu.graphs import CASES, LAYERS, ORDERED, PRECISIONS
from bench.gpu.predict import epoch_work, from_ceilings, layers_plan, plan_case, total
from bench.gpu.pyg import GAT, KINDS, MAX, SHIPPED
from bench.gpu.report_products import Parts, Row, Rows, timed
from bench.gpu.tasks import ORDER, digest, read_rows
from bench.report import DISTURBED, GIB, MIB, RESULTS, milliseconds, table, verdict, write_report
from mggcn.errors import BackendError
from mggcn.report.figure import require_matplotlib
from mggcn.report.gantt import draw_epoch, draw_stages
from mggcn.report.timeline import read_timeline

FASTER, FASTER_LAYERS = {"fp32": 2.0, "mixed": 2.8, "bf16": 4.5}, {GAT: 2.0, MAX: 2.0}
FASTER_REDDIT = {"reddit-like 2x16": 3.0, "reddit-like 2x512": 5.0}
FASTER_PRODUCTS = FASTER | {"bf16": 4.0}
"""Seconds of PyG's fastest way in float32 over mggcn's, as predicted before the kernels ran (bench/notes/0005)."""
SMALLER = {"fp32": 0.65, "bf16": 0.4}
"""mggcn's peak over that of PyG's fastest way, where PyG needs more than a GiB."""
CORA_US, UNDER_COMPUTATION = 130.0, 0.8
AGREEMENT, AGREEMENT_CPU = 1e-4, 2e-5
"""Largest relative difference of losses: of mggcn's and PyG's, and of GPU and CPU over the curve."""
OVERLAP, RANKS = "overlap products-like", "ranks products-like 3x256"


def report(folder: Path, out: Path | None, left_out: Sequence[str] = ()) -> None:
    """Write gpu_<device>_<date>.json and .md from the rows in a folder; nothing if there are none.

    left_out: tasks whose graph is not here.
    """
    parts = {task.name: rows for task in ORDER if (rows := read_rows(task.file(folder))) and "device" in rows[0]}
    if not parts:
        return
    start = next(iter(parts.values()))[0]
    device = start["device"]["name"]
    around = start["surroundings"] | {"command": "python -m bench.gpu", "date": time.strftime("%Y-%m-%d")}
    del around["began"]  # of a part's process, as every part's end says what others took beside it
    around["hardware"] = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    facts = ", ".join(f"{key} {value}" for key, value in start["device"].items() if key != "name")
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw(parts.get(OVERLAP, []), folder / f"gpu_{around['hardware']}_{around['date']}")
    body = f"{device}: {facts}.\n\n{how_it_went(parts, left_out)}\n{sections(parts)}"
    body += "".join(f"\n![{plot.name}]({plot.name})\n" for plot in plots)
    record = {"surroundings": around, "device": start["device"], "digest": digest(), "parts": parts}
    write_report("gpu", f"mggcn on {device}", body, record, out)


def how_it_went(parts: Parts, left_out: Sequence[str] = ()) -> str:
    """What the data are, which tasks are complete, which are not and why, and whether the sources changed in between."""
    data = sorted({row["data"] for rows in parts.values() for row in rows if row.get("data")})
    text = f"- data: {'; '.join(data)}\n" if data else ""
    if "cora: synthetic" in data:
        text += "- a synthetic cora has no published score: the real one comes from MGGCN_DATA, with --scale 1\n"
    text += f"- left out, their real graphs were not found (MGGCN_DATA): {', '.join(left_out)}\n" if left_out else ""
    for name, rows in parts.items():
        starts = [row for row in rows if row["kind"] == "start"]
        stopped = rows[-1]["stopped"] if rows[-1]["kind"] == "end" else "cut off before its end"
        failed, settings = sum("error" in row for row in rows), starts[0]["settings"]
        dry = settings["scale"] != 1.0 or settings["quick"]
        notes = [stopped, f"{failed} measurements failed" if failed else ""]
        taken = rows[-1].get("taken_by_others", 0.0)
        notes += [
            f"other programs took {taken:.0%} of the cores: measure it again" if taken > DISTURBED and not dry else ""
        ]
        notes += ["other sources than now" if any(row["digest"] != digest() for row in starts) else ""]
        notes += [f"no measurement: scale {settings['scale']:g}" if dry else ""]
        text += f"- {name}: {'; '.join(filter(None, notes))}\n" if any(notes) else ""
    missing = [task.name for task in ORDER if task.name not in parts and task.name not in left_out]
    return text + (f"- not measured: {', '.join(missing)}\n" if missing else "")


def sections(parts: Parts) -> str:
    """The Markdown of every part that has rows."""
    found = {
        "Ceilings": ceilings(parts.get("ceilings", [])),
        "Sparse products": report_products.describe(parts),
        "Epochs": epochs(parts),
        "Accuracy": accuracy(parts.get("accuracy cora", [])),
        "Overlap": overlap(parts.get(OVERLAP, [])),
        "Ranks": ranks(parts.get(RANKS, [])),
        "Shapes of the sparse kernel": report_products.shapes(parts),
        "What failed": failures(parts),
    }
    return "\n".join(f"## {title}\n\n{text}" for title, text in found.items() if text)


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "contender": lambda r: r["contender"] + (", as shipped" if r.get("pyg") in SHIPPED else ""),
    "mode": lambda row: mode_of(row),
    "ms": lambda r: f"{1e3 * r['median']:.3f}",
    "range": lambda r: milliseconds(r)[1],
    "GB/s": lambda r: f"{r['gb_per_s']:.0f}",
    "TFLOP/s": lambda r: f"{r['tflop_per_s']:.1f}",
    "us in a graph": lambda r: f"{1e6 * r['median']:.2f}",
    "us from the host": lambda r: f"{1e6 * r['launched']:.2f}",
    "peak GiB": lambda r: f"{r['memory']['allocated'] / GIB:.2f}",
    "planned GiB": lambda r: f"{r['planned'] / GIB:.2f}" if "planned" in r else "",
    "first loss": lambda r: f"{r['losses'][0]:.6f}",
    "test accuracy, last epoch": lambda r: f"{r['mean']:.4f} +- {r['std']:.4f}",
    "us per epoch, with dropout": lambda r: f"{1e6 * r['epoch_s']:.0f}",
    "predicted ms": lambda r: f"{1e3 * r['predicted']:.3f} ({r['machine']})",
    "MB sent by rank 0": lambda r: f"{(r['bytes_sent_per_epoch'] or 0) / 1e6:.1f}",
    "measured GiB": lambda r: f"{r['measured_peak_bytes'] / GIB:.2f} (planned {r['planned_peak_bytes'] / GIB:.2f})",
    "NCCL MiB": lambda r: f"{r['nccl']['measured_bytes'] / MIB:.0f}" if r.get("nccl") else "",
    "epochs": lambda r: (r["captured"] or {}).get("epoch"),
}
"""What a table has of a row under a name; under another name it has the row's entry of that name."""


def mode_of(row: Row) -> str:
    """How epochs were launched: captured, eager, or refused, without the reason."""
    return str(row["mode"]).partition(":")[0]


def tabled(rows: Rows, *names: str) -> str:
    """A table of rows; "" without rows."""
    lines = [[COLUMNS.get(name, lambda r, name=name: r.get(name))(row) for name in names] for row in rows]  # type: ignore[misc]
    return table(names, [["" if cell is None else cell for cell in line] for line in lines]) + "\n" if rows else ""


def ceilings(rows: Rows) -> str:
    """Copies, rows gathered at random by footprint, launches, dense products."""
    text = tabled(timed(rows, "copy", "read", "gather"), "kind", "footprint", "row_bytes", "ms", "GB/s")
    text += tabled(timed(rows, "launch"), "kind", "us in a graph", "us from the host")
    text += tabled(timed(rows, "gemm"), "product", "precision", "ms", "TFLOP/s", "GB/s")
    return text + tabled(timed(rows, "fused"), "product", "precision", "ms", "TFLOP/s")


def epochs(parts: Parts) -> str:
    """Verdicts and a table for each case."""
    text = ""
    for name, rows in parts.items():
        part, _, case = name.partition(" ")
        if part != "epoch":
            continue
        facts = next((row for row in rows if row["kind"] == "case"), {})
        found = timed([*rows, *parts.get(f"compile {case}", [])], "epoch")
        text += f"### {case}\n\n{', '.join(f'{key} {value}' for key, value in facts.items() if key != 'kind')}\n\n"
        text += epoch_verdicts(case, found, predictions(case, rows, parts)) + "\n"
        more = ("peak GiB", "planned GiB", "products", "kernels", "first loss")
        text += tabled(found, "contender", "precision", "mode", "ms", "range", *more)
        refused = {row["contender"]: row["mode"] for row in found if ":" in row["mode"]}
        text += "".join(f"\nCapture of {contender} {mode}\n\n" for contender, mode in refused.items())
    return text


def predictions(case: str, rows: Rows, parts: Parts) -> dict[str, float]:
    """Seconds by precision as the measured ceilings let expect; none for a scaled graph or without ceilings."""
    whole = rows[0].get("settings", {}).get("scale") == 1.0 and "ceilings" in parts
    if not whole or (case in CASES and CASES[case][0] == ORDERED) or case not in CASES | LAYERS:
        return {}
    rates = from_ceilings(parts["ceilings"], parts["ceilings"][0].get("device", {}))
    if case in LAYERS:
        graph, _, kind = LAYERS[case]
        return {"fp32": total(epoch_work(layers_plan(graph, kind), rates), rates)}
    return {name: total(epoch_work(plan_case(*CASES[case], name), rates), rates) for name in PRECISIONS}


def fastest_peer(rows: Rows, kinds: Sequence[str] = (*KINDS, GAT, MAX)) -> Row | None:
    """PyG's fastest way in float32 among some kinds."""
    peers = [row for row in rows if row.get("pyg") in kinds and row["precision"] == "fp32"]
    return min(peers, key=lambda row: row["median"], default=None)


def goal_of(case: str, precision: str) -> float | None:
    """How many times as fast as PyG mggcn is to be; None: no goal."""
    if case.startswith("cora"):
        return None
    if case in LAYERS:
        return FASTER_LAYERS[LAYERS[case][2]] if precision == "fp32" else None
    if case.startswith("reddit"):
        return FASTER_REDDIT[case] if precision in FASTER else None
    return (FASTER_PRODUCTS if case.startswith("products") else FASTER).get(precision)


def epoch_verdicts(case: str, rows: Rows, predicted: Mapping[str, float]) -> str:
    """Ratios with their goals, precision by precision."""
    peer, shipped = fastest_peer(rows), fastest_peer(rows, SHIPPED)
    if peer is None:
        return "- no PyG to compare with\n"
    text = f"- PyG's fastest in float32: {peer['contender']}, {mode_of(peer)}"
    text += f"; as shipped: {shipped['contender']}, {mode_of(shipped)}\n" if shipped else "; none as shipped\n"
    for own in (row for row in rows if row["contender"] == "mggcn"):
        where, precision = f"{own['precision']}, {own['mode']}", own["precision"]
        goal, ratio = goal_of(case, precision), peer["median"] / own["median"]
        what = f"{where}: times as fast as PyG's fastest"
        text += verdict(what, ratio, goal) if goal else f"- {what}: {ratio:.2f}\n"
        text += (
            f"- {where}: times as fast as PyG as shipped: {shipped['median'] / own['median']:.2f}\n" if shipped else ""
        )
        used, theirs = own["memory"]["allocated"], peer["memory"]["allocated"]
        if theirs > GIB and precision in SMALLER:
            text += verdict(f"{where}: memory over PyG's", used / theirs, SMALLER[precision], at_most=True)
        if precision in ("fp32", "tf32"):
            off = max((abs(a / b - 1) for a, b in zip(own["losses"], peer["losses"], strict=False)), default=0.0)
            other = ": NOT THE SAME NETWORK" if precision == "fp32" and not off <= AGREEMENT else ""
            text += f"- {where}: losses {off:.1e} apart{other}\n"
        if case.startswith("cora"):
            text += verdict(f"{where}: microseconds of an epoch", 1e6 * own["median"], CORA_US, at_most=True)
        text += f"- {where}: predicted {1e3 * predicted[precision]:.3f} ms\n" if precision in predicted else ""
    return text


def accuracy(rows: Rows) -> str:
    """Loss curves, repeated bits and scores on GPU and CPU."""
    text = ""
    for row in (row for row in rows if "apart" in row):
        met = "met" if row["apart"] <= AGREEMENT_CPU else "MISSED"
        text += f"- losses of CPU and GPU over {row['epochs']} epochs with dropout ({row['graph']}): at most "
        text += f"{row['apart']:.1e} apart, relatively ({met}, goal {AGREEMENT_CPU:g}); epochs {row['mode']}\n"
        same = ", ".join(f"{what} {'yes' if value else 'NO'}" for what, value in row["repeats"].items())
        text += f"- a second run has the same bits: {same}\n\n"
    scores = [row for row in rows if row["kind"] == "scores" and row.get("mean") is not None]
    text += tabled(scores, "device", "test accuracy, last epoch", "us per epoch, with dropout")
    return text + ("Published: 0.815 (Kipf and Welling 2017, table 2).\n" if text else "")


def overlap(rows: Rows) -> str:
    """Which share of each rank's messages lies under its own computation; seconds with and without overlap."""
    shares = {rank: share for row in rows for rank, share in row.get("shares", {}).items() if share is not None}
    what = "messages under its own computation"
    text = "".join(verdict(f"rank {rank}: {what}", share, UNDER_COMPUTATION) for rank, share in shares.items())
    runs = tabled(timed(rows, "run"), "messages", "ms", "range", "peak GiB", "planned GiB")
    note = "\nLogical ranks as threads on one GPU share its memory: this shows order, not speed.\n\n"
    return text + (note + runs if runs else "")


def draw(rows: Rows, stem: Path) -> list[Path]:
    """Draw the recorded epoch and its longest aggregation beside the report; nothing without matplotlib or a timeline."""
    content = next((row["content"] for row in rows if "content" in row), None)
    if content is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        file.write_text(json.dumps(content))
        timeline = read_timeline(file)
    try:
        require_matplotlib()
    except BackendError as error:
        print(error, file=sys.stderr)
        return []
    drawn = [draw_epoch(timeline, stem.with_name(f"{stem.name}_overlap.png"))]
    stages = draw_stages(timeline, stem.with_name(f"{stem.name}_stages.png"))
    return drawn + ([stages] if stages else [])


def ranks(rows: Rows) -> str:
    """Seconds beside the plan's prediction; GPU 0 also holds this process, in the peak."""
    more = ("MB sent by rank 0", "measured GiB", "NCCL MiB", "epochs")
    return tabled(timed(rows, "ranks"), "ranks", "strategy", "precision", "ms", "predicted ms", *more)


def failures(parts: Parts) -> str:
    """Every measurement that could not be made, with its reason."""
    skip = ("error", "kind", "took_s")
    return "".join(
        f"- {name}: {', '.join(str(v) for k, v in row.items() if k not in skip)}: {row['error']}\n"
        for name, rows in parts.items()
        for row in rows
        if "error" in row
    )
