"""The report of `python -m bench.gpu`: all rows as JSON, the acceptance figures as Markdown."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.graphs import CASES, ORDERED, PRECISIONS
from bench.gpu.predict import epoch_work, from_ceilings, plan_case, total
from bench.gpu.pyg import KINDS, SHIPPED
from bench.gpu.tasks import ORDER, digest, read_rows
from bench.report import GIB, RESULTS, milliseconds, table, verdict, write_report
from mggcn.errors import BackendError
from mggcn.report.figure import require_matplotlib
from mggcn.report.gantt import draw_epoch, draw_stages
from mggcn.report.timeline import read_timeline

Row = dict[str, Any]
Rows = list[Row]
Parts = Mapping[str, Rows]
"""The rows of every part by name, such as `spmm GRAPH` and `ceilings`."""
OVER_CUSPARSE, NOWHERE_BELOW, BF16_OVER_FP32 = 1.2, 0.9, 1.7
"""Own float32 over the best of cuSPARSE, in the geometric mean and anywhere; bf16 over float32 from width 64 on."""
FASTER, FASTER_REDDIT = {"fp32": 2.0, "mixed": 3.0, "bf16": 4.5}, 5.0
"""Seconds of PyG's fastest way in float32 over mggcn's."""
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
        notes += ["other sources than now" if any(row["digest"] != digest() for row in starts) else ""]
        notes += [f"no measurement: scale {settings['scale']:g}" if dry else ""]
        text += f"- {name}: {'; '.join(filter(None, notes))}\n" if any(notes) else ""
    missing = [task.name for task in ORDER if task.name not in parts and task.name not in left_out]
    return text + (f"- not measured: {', '.join(missing)}\n" if missing else "")


def sections(parts: Parts) -> str:
    """The Markdown of every part that has rows."""
    found = {
        "Ceilings": ceilings(parts.get("ceilings", [])),
        "Sparse products": sparse_products(parts),
        "Epochs": epochs(parts),
        "Accuracy": accuracy(parts.get("accuracy cora", [])),
        "Overlap": overlap(parts.get(OVERLAP, [])),
        "Ranks": ranks(parts.get(RANKS, [])),
        "Shapes of the sparse kernel": shapes(parts),
        "What failed": failures(parts),
    }
    return "\n".join(f"## {title}\n\n{text}" for title, text in found.items() if text)


def timed(rows: Rows, *kinds: str) -> Rows:
    return [row for row in rows if row["kind"] in kinds and row.get("median") is not None]


def tabled(rows: Rows, **columns: str | Callable[[Row], Any]) -> str:
    """A table of rows: a column is an entry, or what a function makes of a row; "" without rows."""

    def cell(row: Row, column: str | Callable[[Row], Any]) -> Any:
        found = row.get(column) if isinstance(column, str) else column(row)
        return "" if found is None else found

    lines = [[cell(row, column) for column in columns.values()] for row in rows]
    return table([name.replace("_", " ") for name in columns], lines) + "\n" if rows else ""


def ms(row: Row) -> str:
    return f"{1e3 * row['median']:.3f}"


def gb_per_s(row: Row) -> str:
    return f"{row['gb_per_s']:.0f}"


def ceilings(rows: Rows) -> str:
    """Copies, launches, rows gathered at random by footprint, dense products."""
    memory = tabled(
        timed(rows, "copy", "read", "gather"),
        what="kind",
        footprint="footprint",
        row_bytes="row_bytes",
        ms=ms,
        GB_per_s=gb_per_s,
    )
    launches = tabled(
        timed(rows, "launch"),
        us_of_a_kernel_in_a_graph=lambda r: f"{1e6 * r['median']:.2f}",
        from_the_host=lambda r: f"{1e6 * r['launched']:.2f}",
    )
    dense = tabled(
        timed(rows, "gemm"),
        product="product",
        precision="precision",
        ms=ms,
        TFLOP_per_s=lambda r: f"{r['tflop_per_s']:.1f}",
        GB_per_s=gb_per_s,
    )
    return memory + launches + dense


def sparse_products(parts: Parts) -> str:
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
    return f"{ms(row)} ({gb_per_s(row)})" + ("" if row["how"] in ("captured", "emulated") else " *")


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
        text += tabled(
            found,
            contender=lambda r: r["contender"] + (", as shipped" if r.get("pyg") in SHIPPED else ""),
            precision="precision",
            mode="mode",
            ms_per_epoch=ms,
            range_ms=lambda r: milliseconds(r)[1],
            peak_GiB=lambda r: f"{r['memory']['allocated'] / GIB:.2f}",
            planned_GiB=lambda r: f"{r['planned'] / GIB:.2f}" if "planned" in r else "",
            products_with_the_graph="products",
            launches="kernels",
            first_loss=lambda r: f"{r['losses'][0]:.6f}",
        )
    return text


def predictions(case: str, rows: Rows, parts: Parts) -> dict[str, float]:
    """Seconds by precision as the measured ceilings let expect; none for a scaled graph or without ceilings."""
    whole = rows[0].get("settings", {}).get("scale") == 1.0 and "ceilings" in parts
    if case not in CASES or CASES[case][0] == ORDERED or not whole:
        return {}
    rates = from_ceilings(parts["ceilings"], parts["ceilings"][0].get("device", {}))
    return {name: total(epoch_work(plan_case(*CASES[case], name)), rates) for name in PRECISIONS}


def fastest_peer(rows: Rows, kinds: Sequence[str] = KINDS) -> Row | None:
    """PyG's fastest way in float32 among some kinds."""
    peers = [row for row in rows if row.get("pyg") in kinds and row["precision"] == "fp32"]
    return min(peers, key=lambda row: row["median"], default=None)


def goal_of(case: str, precision: str) -> float | None:
    """How many times as fast as PyG mggcn is to be; None: no goal."""
    if case.startswith("cora"):
        return None
    return FASTER_REDDIT if case.startswith("reddit") and precision in FASTER else FASTER.get(precision)


def epoch_verdicts(case: str, rows: Rows, predicted: Mapping[str, float]) -> str:
    """Ratios with their goals, precision by precision."""
    peer, shipped = fastest_peer(rows), fastest_peer(rows, SHIPPED)
    if peer is None:
        return "- no PyG to compare with\n"
    text = f"- PyG's fastest in float32: {peer['contender']}, {peer['mode']}"
    text += f"; as shipped: {shipped['contender']}, {shipped['mode']}\n" if shipped else "; none as shipped\n"
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
    text += tabled(
        scores,
        device="device",
        test_accuracy_last_epoch=lambda r: f"{r['mean']:.4f} +- {r['std']:.4f}",
        seeds=lambda r: len(r["test"]),
        us_per_epoch_with_dropout=lambda r: f"{1e6 * r['epoch_s']:.0f}",
    )
    return text + ("Published: 0.815 (Kipf and Welling 2017, table 2).\n" if text else "")


def overlap(rows: Rows) -> str:
    """Which share of each rank's messages lies under its own computation; seconds with and without overlap."""
    shares = {rank: share for row in rows for rank, share in row.get("shares", {}).items() if share is not None}
    what = "messages under its own computation"
    text = "".join(verdict(f"rank {rank}: {what}", share, UNDER_COMPUTATION) for rank, share in shares.items())
    runs = tabled(
        timed(rows, "run"),
        messages="messages",
        ms_per_epoch=ms,
        peak_GiB_of_all_ranks=lambda r: f"{r['memory']['allocated'] / GIB:.2f}",
        planned_GiB=lambda r: f"{r['planned'] / GIB:.2f}",
    )
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
    found = timed(rows, "ranks")
    alone = {row["precision"]: row["median"] for row in found if row["ranks"] == 1}
    return tabled(
        found,
        ranks="ranks",
        strategy="strategy",
        precision="precision",
        ms_per_epoch=ms,
        predicted_ms=lambda r: f"{1e3 * r['predicted']:.3f} ({r['machine']})",
        faster_than_one=lambda r: f"{alone[r['precision']] / r['median']:.2f}" if r["precision"] in alone else "",
        MB_sent_by_rank_0=lambda r: f"{(r['bytes_sent_per_epoch'] or 0) / 1e6:.1f}",
        peak_GiB=lambda r: f"{r['measured_peak_bytes'] / GIB:.2f}",
        planned_GiB=lambda r: f"{r['planned_peak_bytes'] / GIB:.2f}",
        NCCL_MiB=lambda r: f"{r['nccl']['measured_bytes'] / 2**20:.0f}" if r.get("nccl") else "",
        epochs=lambda r: (r["captured"] or {}).get("epoch"),
    )


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


def failures(parts: Parts) -> str:
    """Every measurement that could not be made, with its reason."""
    skip = ("error", "kind", "took_s")
    return "".join(
        f"- {name}: {', '.join(str(v) for k, v in row.items() if k not in skip)}: {row['error']}\n"
        for name, rows in parts.items()
        for row in rows
        if "error" in row
    )
