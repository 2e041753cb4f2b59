"""Draw what a run did, as pictures and one HTML page; compare several runs, or the trials of a sweep, on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.cli.answer import add_json
from mggcn.errors import ConfigError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of a run or a sweep; several runs are compared on one page",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page of several runs; default: comparison.html in the folder that they have in common",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Draw the report and print the paths."""
    from mggcn.report import write_reports

    if arguments.out is not None and len(arguments.runs) == 1:
        raise ConfigError(f"--out names the page of several runs, got {arguments.runs[0]} alone; remove --out")
    files = write_reports(arguments.runs, arguments.out)
    arguments.answer = {"files": files}
    print(*map(printable, files), sep="\n")
    return 0
