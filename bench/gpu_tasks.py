"""The tasks of bench/gpu.py in the order of their importance, and how one is run: a process, a budget, a file of rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_graphs import ROOT
from gpu_lab import Settings

PARTS = ("ceilings", "spmm", "epoch", "accuracy", "overlap", "compile", "tune")
START_S = 75.0
"""What a task may take beside its budget: imports, set-up of a graph of 126 million nonzeros, the measurement under way."""


@dataclass(frozen=True)
class Task:
    """A part on one case; `graph` is what it needs to be generated or found."""

    part: str
    case: str = ""
    graph: str = ""

    @property
    def name(self) -> str:
        return f"{self.part} {self.case}".strip()

    def file(self, rows: Path) -> Path:
        return rows / f"{self.name.replace(' ', '_')}.jsonl"


ORDER = (
    Task("ceilings"),
    Task("spmm", "arxiv-like", "arxiv-like"),
    Task("epoch", "cora 2x16", "cora"),
    Task("epoch", "arxiv-like 3x256", "arxiv-like"),
    Task("accuracy", "cora", "cora"),
    Task("spmm", "cnr_2000", "cnr_2000"),
    Task("spmm", "products-like", "products-like"),
    Task("epoch", "products-like 3x256", "products-like"),
    Task("spmm", "reddit-like", "reddit-like"),
    Task("epoch", "reddit-like 2x16", "reddit-like"),
    Task("epoch", "reddit-like 2x512", "reddit-like"),
    Task("overlap", "products-like", "products-like"),
    Task("compile", "cora 2x16", "cora"),
    Task("compile", "arxiv-like 3x256", "arxiv-like"),
    Task("tune", "arxiv-like", "arxiv-like"),
    Task("tune", "cnr_2000", "cnr_2000"),
    Task("tune", "products-like", "products-like"),
    Task("tune", "reddit-like", "reddit-like"),
)


def tasks(wanted: Sequence[str]) -> list[Task]:
    """The tasks of parts, or of full names, in order. Raises: SystemExit naming what is unknown."""
    unknown = [name for name in wanted if name not in PARTS and name not in {task.name for task in ORDER}]
    if unknown:
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are {', '.join(task.name for task in ORDER)}")
    return [task for task in ORDER if task.part in wanted or task.name in wanted]


@functools.cache
def digest() -> str:
    """Of all sources that a figure depends on."""
    found = hashlib.sha256()
    for folder, pattern in (("mggcn", "**/*.py"), ("cuda", "*"), ("cpu", "*"), ("bench", "*.py"), ("bench", "*.cu")):
        for path in sorted((ROOT / folder).glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a task has written so far; a line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def finished(task: Task, folder: Path, settings: Settings, keep: bool) -> bool:
    """Whether a task came to its end in this way, with the sources as they are or with any."""
    rows = read_rows(task.file(folder))
    if not rows or rows[0]["kind"] != "start" or rows[-1] != {**rows[-1], "kind": "end", "stopped": ""}:
        return False
    same = ("device", "scale", "quick")
    wanted = dataclasses.asdict(settings)
    alike = all(rows[0]["settings"][key] == wanted[key] for key in same)
    return alike and (keep or rows[0]["digest"] == digest())


def run(task: Task, folder: Path, settings: Settings, until: float) -> str:
    """Run a task in a process, for its budget at most; return what went wrong, "" if nothing. What it says is in a .log."""
    left = until - time.monotonic()
    if left < 10:
        return "no time left; call again with the same --out"
    job = {"part": task.part, "case": task.case, "file": str(task.file(folder)), "digest": digest()}
    settings = dataclasses.replace(settings, budget_s=min(settings.budget_s, left))
    command = [sys.executable, str(ROOT / "bench" / "gpu_part.py"), json.dumps(job | dataclasses.asdict(settings))]
    with task.file(folder).with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        code = process.wait(min(settings.budget_s + START_S, left))
    except subprocess.TimeoutExpired:
        return "stopped: it overran its budget"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return f"failed with code {code}" if code else ""
