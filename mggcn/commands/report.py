"""Draw curves, memory map and tile balance of a run as PNG and one HTML file, or the plots of a benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.commands.answer import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN", help="folder of a run, or the .json file of a benchmark's report"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Draw and print the paths."""
    from mggcn.report import write_report
    from mggcn.report.bench_plots import write_bench_report

    draw = write_bench_report if arguments.run_folder.suffix == ".json" else write_report
    files = list(draw(arguments.run_folder))
    arguments.answer = {"files": files}
    print(*files, sep="\n")
    return 0
