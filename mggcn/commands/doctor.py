"""Report what is installed, which devices and transports work, and how to fix what does not."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="do not compute on the GPUs: for use beside a running training"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if something is broken."""
    from mggcn.report.doctor import diagnose, exit_status, render

    findings = diagnose(compute=not arguments.quick)
    print(render(findings))
    return exit_status(findings)
