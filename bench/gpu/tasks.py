"""The tasks of `python -m bench.gpu` in the order of their worth, and how one is run: processes that add rows to a file."""

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

from bench.gpu.graphs import LAYERS, real_store
from bench.gpu.lab import Settings
from bench.report import ROOT

PARTS = ("ceilings", "epoch", "accuracy", "spmm", "overlap", "ranks", "variants", "compile")
START_S = 15.0
"""A process is started if it has so long: imports, a context, a row."""
LAST_S = 5.0
"""A process stops by itself so long before it is ended."""
AGAIN = 75
"""Code of a process that wants another one to go on."""


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


FIRST = ("arxiv-hubs gat 3x256", "one-hub gat 3x256")
"""Of other layers the most valuable."""
ORDER = (
    Task("ceilings"),
    Task("epoch", "cora 2x16", "cora"),
    Task("epoch", "arxiv-like 3x256", "arxiv-like"),
    *(Task("epoch", case, LAYERS[case][0]) for case in FIRST),
    Task("accuracy", "cora", "cora"),
    Task("spmm", "arxiv-like", "arxiv-like"),
    Task("epoch", "arxiv-ordered 3x256", "arxiv-ordered"),
    Task("spmm", "cnr_2000", "cnr_2000"),
    Task("epoch", "products-like 3x256", "products-like"),
    Task("spmm", "products-like", "products-like"),
    *(Task("epoch", case, of[0]) for case, of in LAYERS.items() if case not in FIRST),
    Task("epoch", "reddit-like 2x512", "reddit-like"),
    Task("spmm", "reddit-like", "reddit-like"),
    Task("epoch", "reddit-like 2x16", "reddit-like"),
    Task("overlap", "products-like", "products-like"),
    Task("ranks", "products-like 3x256", "products-like"),
    Task("variants", "arxiv-like", "arxiv-like"),
    Task("variants", "cnr_2000", "cnr_2000"),
    Task("variants", "products-like", "products-like"),
    Task("variants", "reddit-like", "reddit-like"),
    Task("compile", "cora 2x16", "cora"),
    Task("compile", "arxiv-like 3x256", "arxiv-like"),
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
    for pattern in ("mggcn/**/*.py", "cuda/*", "cpu/*", "bench/*.py", "bench/gpu/*", "bench/peers/worker_pyg.py"):
        for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
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


def usable(rows: list[dict[str, Any]], settings: Settings, keep: bool) -> bool:
    """Whether rows were measured in this way, with the sources as they are or with any."""
    starts = [row for row in rows if row["kind"] == "start"]
    wanted = dataclasses.asdict(settings)
    same = ("device", "scale", "quick")
    return bool(starts) and all(
        all(row["settings"][key] == wanted[key] for key in same) and (keep or row["digest"] == digest())
        for row in starts
    )


def finished(task: Task, folder: Path, settings: Settings, keep: bool) -> bool:
    """Whether a task came to its end in this way."""
    rows = read_rows(task.file(folder))
    return usable(rows, settings, keep) and bool(rows[-1] == {**rows[-1], "kind": "end", "stopped": ""})


def origin(task: Task, settings: Settings) -> str:
    """What a task's graph is, for the report."""
    if not task.graph:
        return ""
    return f"{task.graph}: {'real' if real_store(task.graph, settings.data) else 'synthetic'}"


def run(task: Task, folder: Path, settings: Settings, until: float) -> str:
    """Go on with a task until it is done or time.monotonic() is `until`; return what is wrong, "" if nothing.

    What its processes say is in a .log.
    """
    file = task.file(folder)
    job = {"part": task.part, "case": task.case, "file": str(file), "digest": digest()}
    job |= {"graph": origin(task, settings)}
    with file.with_suffix(".log").open("a") as log:
        while (left := until - time.monotonic()) > START_S:
            before = rows_of_measurements(file)
            budget = dataclasses.replace(settings, budget_s=left - LAST_S)
            told = json.dumps(job | dataclasses.asdict(budget))
            command = [sys.executable, "-m", "bench.gpu.part", told]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                return "cut off: the time is up; call again with the same --out"
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if code == 0:
                return ""
            if code == 1:
                return f"not finished: {(read_rows(file) or [{}])[-1].get('stopped', 'look into its .log')}"
            if rows_of_measurements(file) == before:
                return f"failed with code {code}"
    return "no time left; call again with the same --out"


def rows_of_measurements(file: Path) -> int:
    """How many rows there are beside those about processes."""
    return sum(row["kind"] not in ("start", "end") for row in read_rows(file))
