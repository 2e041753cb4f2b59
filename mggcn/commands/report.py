"""Draw curves, memory map and tile balance of a run as PNG and one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")


def run(arguments: argparse.Namespace) -> int:
    """Draw and print the paths."""
    from mggcn.report import write_report

    for path in write_report(arguments.run_folder):
        print(path)
    return 0
