"""The GPU benchmark, one command: `python -m bench.gpu`. Needs the checkout, CuPy, torch, numpy, scipy and safetensors.

Tasks come in the order of their worth; each is measured by processes (part.py) that add rows to its file, while graphs
are generated. Called again with the same --out, it goes on with the rows that are missing. PyG is measured if it is there.
The report is written after every task.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from typing import Any

from bench.gpu.graphs import Preparation, available
from bench.gpu.lab import Settings
from bench.gpu.report import report
from bench.gpu.tasks import PARTS, finished, read_rows, run, tasks, usable
from bench.graphs import find_data
from bench.report import ROOT, parse
from mggcn import native

MINUTES = 9.0
REPORT_S = 10.0
"""What is left at the end for the report."""


def options(arguments: list[str] | None = None) -> Any:
    own: dict[str, dict[str, Any]] = {
        "parts": {"default": ",".join(PARTS), "help": "names of parts or of single tasks, such as 'epoch cora 2x16'"},
        "only": {"default": "", "help": "one part or task"},
        "quick": {"action": "store_true", "help": "few widths, contenders and rounds: does it run?"},
        "minutes": {"type": float, "default": MINUTES, "help": "for everything; call again for the rest"},
        "again": {"action": "store_true", "help": "measure again what is finished"},
        "keep": {"action": "store_true", "help": "keep what is finished even if the sources have changed"},
        "device": {"choices": ["cuda", "emulated"], "default": "cuda", "help": "emulated: the tests' dry run"},
    }
    return parse(__doc__, "scale", "rounds", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> int:
    """Run the tasks that are asked for and not yet done. Returns 1 if one of them failed or was left out."""
    args = options(arguments)
    until = time.monotonic() + max(0.0, 60 * args.minutes - REPORT_S)
    if args.quick or args.scale != 1.0 or args.device != "cuda":
        args.out = args.out or ROOT / "build" / "gpu-dry"  # no measurement: not among the results
    rows = (args.out or ROOT / "build" / "gpu") / "rows"
    for folder in (rows, args.cache):
        folder.mkdir(parents=True, exist_ok=True)
    native.installed_or_built()
    data = str(find_data(args.data) or "") if args.scale == 1.0 else ""  # a real graph has one size
    settings = Settings(
        args.device, args.scale, 1 if args.quick else args.rounds, 0.0, str(args.cache), data, args.quick
    )
    wanted = [args.only] if args.only else args.parts.split(",")
    chosen = tasks(wanted)
    left_out = [task.name for task in chosen if task.graph and not available(task.graph, data)]
    for task in chosen:
        if args.again or not usable(read_rows(task.file(rows)), settings, args.keep):
            task.file(rows).unlink(missing_ok=True)
    pending = [t for t in chosen if t.name not in left_out and not finished(t, rows, settings, args.keep)]
    graphs = Preparation([task.graph for task in pending if task.graph], args.scale, args.cache, data)
    failed = []
    while pending:
        task = next((t for t in pending if not t.graph or graphs.ready(t.graph)), pending[0])
        pending.remove(task)
        problem = (graphs.wait(task.graph, until) if task.graph else "") or run(task, rows, settings, until)
        print(f"{task.name}: {problem or 'done'}", file=sys.stderr, flush=True)
        failed += [task] if problem else []
        with contextlib.redirect_stdout(io.StringIO()):
            report(rows, args.out, left_out)
    report(rows, args.out, left_out)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
