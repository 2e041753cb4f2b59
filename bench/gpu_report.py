"""The report of bench/gpu.py: a JSON with all rows, Markdown with the acceptance figures, from what is there so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_accuracy
import gpu_ceilings
import gpu_epoch_report
import gpu_overlap_report
import gpu_ranks
import gpu_spmm_report
import gpu_tune_report
from common import RESULTS, write_report
from gpu_tasks import ORDER, digest, read_rows

Rows = list[dict[str, Any]]
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
    around = start["surroundings"] | {"command": "python bench/gpu.py", "date": time.strftime("%Y-%m-%d")}
    around["hardware"] = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    facts = ", ".join(f"{key} {value}" for key, value in start["device"].items() if key != "name")
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    plots = gpu_overlap_report.draw(parts.get(OVERLAP, []), folder / f"gpu_{around['hardware']}_{around['date']}")
    body = f"{device}: {facts}.\n\n{how_it_went(parts, left_out)}\n{sections(parts, plots)}"
    record = {"surroundings": around, "device": start["device"], "digest": digest(), "parts": parts}
    write_report("gpu", f"mggcn on {device}", body, record, out)


def how_it_went(parts: dict[str, Rows], left_out: Sequence[str] = ()) -> str:
    """What the data are, which tasks are complete, which are not and why, and whether the sources changed in between."""
    data = sorted({row["data"] for rows in parts.values() for row in rows if row.get("data")})
    text = f"- data: {'; '.join(data)}\n" if data else ""
    text += "- a synthetic cora has no published score: the real one comes from MGGCN_DATA, with --scale 1\n" * (
        "cora: synthetic" in data
    )
    text += f"- left out, their real graphs were not found (MGGCN_DATA): {', '.join(left_out)}\n" if left_out else ""
    for name, rows in parts.items():
        starts = [row for row in rows if row["kind"] == "start"]
        end = rows[-1] if rows[-1]["kind"] == "end" else {"stopped": "cut off before its end"}
        failed = sum("error" in row for row in rows)
        notes = [end["stopped"]] if end["stopped"] else []
        notes += [f"{failed} measurements failed"] if failed else []
        notes += ["other sources than now"] if any(row["digest"] != digest() for row in starts) else []
        if starts[0]["settings"]["scale"] != 1.0 or starts[0]["settings"]["quick"]:
            notes.append(f"no measurement: scale {starts[0]['settings']['scale']:g}")
        if notes:
            text += f"- {name}: {'; '.join(notes)}\n"
    missing = [task.name for task in ORDER if task.name not in parts and task.name not in left_out]
    if missing:
        text += f"- not measured: {', '.join(missing)}\n"
    return text


def sections(parts: dict[str, Rows], plots: list[Path]) -> str:
    """The Markdown of every part that has rows."""
    found = {
        "Ceilings": gpu_ceilings.describe(parts["ceilings"]) if "ceilings" in parts else "",
        "Sparse products": gpu_spmm_report.describe(parts),
        "Epochs": gpu_epoch_report.describe(parts),
        "Accuracy": gpu_accuracy.describe(parts["accuracy cora"]) if "accuracy cora" in parts else "",
        "Overlap": gpu_overlap_report.describe(parts.get(OVERLAP, []), plots),
        "Ranks": gpu_ranks.describe(parts.get(RANKS, [])),
        "Shapes of the sparse kernel": gpu_tune_report.describe(parts),
        "What failed": failures(parts),
    }
    return "\n".join(f"## {title}\n\n{text}" for title, text in found.items() if text)


def failures(parts: dict[str, Rows]) -> str:
    """Every measurement that could not be made, with its reason."""
    skip = ("error", "kind", "took_s")
    return "".join(
        f"- {name}: {', '.join(str(v) for k, v in row.items() if k not in skip)}: {row['error']}\n"
        for name, rows in parts.items()
        for row in rows
        if "error" in row
    )
