"""Say how runs are doing: alive, how far, how fast, time left, memory, last checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.commands.answer import add_json
from mggcn.jobs.status import details_of, find_runs, line_of, status_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folders, or folders of runs or sweeps; default: runs"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each run; more of a single one."""
    found = [status_of(folder) for folder in find_runs(arguments.runs or [Path("runs")])]
    arguments.answer = {"runs": found}
    for status in found:
        print(line_of(status))
    if len(found) == 1:
        print(*details_of(found[0]), sep="\n")
    return 0
