"""The GPU benchmark, one command: `python bench/gpu.py`. Needs the checkout, CuPy, torch, numpy, scipy and safetensors.

Tasks come in the order of their worth; each is measured by processes (gpu_part.py) that add rows to its file, while graphs
are generated. Called again with the same --out, it goes on with the rows that are missing. PyG is measured if it is there.
The report is written after every task.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The checkout need not be installed: what follows is imported from it (E402).
sys.path.insert(0, str(ROOT))

from gpu_graphs import Preparation, available, data_folder  # noqa: E402
from gpu_lab import Settings  # noqa: E402
from gpu_report import report  # noqa: E402
from gpu_tasks import PARTS, finished, read_rows, run, tasks, usable  # noqa: E402

from mggcn import native  # noqa: E402

MINUTES = 9.0
REPORT_S = 10.0
"""What is left at the end for the report."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--only", default="", help='one task, such as "spmm cnr_2000" or "epoch cora 2x16"')
    parser.add_argument("--quick", action="store_true", help="few widths, contenders and rounds: does it run?")
    parser.add_argument("--rounds", type=int, default=7, help="timed stretches of each measurement")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything; call again for the rest")
    parser.add_argument("--scale", type=float, default=1.0, help="of the generated graphs; goals are for 1")
    parser.add_argument("--again", action="store_true", help="measure again what is finished")
    parser.add_argument("--keep", action="store_true", help="keep what is finished even if the sources have changed")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda", help="emulated: the tests' dry run")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "graphs", help="folder that keeps the graphs")
    parser.add_argument("--out", type=Path, help="folder of rows and report (default: build/gpu and bench/results)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the tasks that are asked for and not yet done. Returns 1 if one of them failed or was left out."""
    args = parse(arguments)
    until = time.monotonic() + max(0.0, 60 * args.minutes - REPORT_S)
    if args.quick or args.scale != 1.0 or args.device != "cuda":
        args.out = args.out or ROOT / "build" / "gpu-dry"  # no measurement: not among the results
    rows = (args.out or ROOT / "build" / "gpu") / "rows"
    for folder in (rows, args.cache):
        folder.mkdir(parents=True, exist_ok=True)
    native.installed_or_built()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    data = str(data_folder() or "") if args.scale == 1.0 else ""  # a real graph has one size
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
