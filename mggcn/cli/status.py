"""Say how runs are doing: alive, how far, how fast, time left, memory, last checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.cli.answer import add_json
from mggcn.errors import MggcnError, one_line, printable
from mggcn.runs.status import RunStatus, details_of, find_runs, line_of, status_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folders, or folders of runs or sweeps; default: runs"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each run, damaged ones included, or more about a single run. Exit code 2 if one is damaged."""
    folders = find_runs(arguments.runs or [Path("runs")])
    found: list[RunStatus | dict[str, str]] = []
    arguments.answer, damaged = {"runs": found}, False
    for folder in folders:
        try:
            status = status_of(folder)
        except MggcnError as error:
            if len(folders) == 1:
                raise
            damaged, why = True, one_line(str(error))
            found.append({"folder": str(folder), "state": "damaged", "reason": why})
            print(f"{printable(folder)}: damaged: {why}")
            continue
        found.append(status)
        print(line_of(status))
        if len(folders) == 1:
            print(*details_of(status), sep="\n")
    return 2 if damaged else 0
