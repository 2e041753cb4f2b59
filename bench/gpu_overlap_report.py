"""The Markdown of the overlap: which share of each rank's messages lies under its own computation, and the plot."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import table

from mggcn.errors import BackendError
from mggcn.report.figure import require_matplotlib
from mggcn.report.gantt import draw_epoch, draw_stages
from mggcn.report.timeline import read_timeline

Rows = list[dict[str, Any]]
GOAL = 0.8


def describe(rows: Rows, plots: Sequence[Path] = ()) -> str:
    """Rows of the kinds run (seconds, with and without overlap) and timeline (shares of the ranks)."""
    lines = [
        [rank, f"{share:.1%}", "met" if share >= GOAL else "MISSED"]
        for row in rows
        for rank, share in row.get("shares", {}).items()
        if share is not None
    ]
    text = table(["rank", "messages under its own computation", f"goal {GOAL:.0%}"], lines) if lines else ""
    runs = [row for row in rows if row["kind"] == "run" and "median" in row]
    head = ["messages", "ms/epoch (median)", "min .. max", "peak GiB of all ranks", "planned GiB"]
    lines = [
        [
            row["messages"],
            f"{1e3 * row['median']:.3f}",
            f"{1e3 * row['min']:.3f} .. {1e3 * row['max']:.3f}",
            f"{row['memory']['allocated'] / 2**30:.2f}",
            f"{row['planned'] / 2**30:.2f}",
        ]
        for row in runs
    ]
    if lines:
        text += "\nLogical ranks as threads on one GPU share its memory: this shows order, not speed.\n\n"
        text += table(head, lines)
    return text + "".join(f"\n![{plot.name}]({plot.name})\n" for plot in plots)


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
