"""Report what is installed, which devices and transports work, and how to fix what does not."""

from __future__ import annotations

import argparse

from mggcn.cli.answer import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="do not compute on the GPUs: for use beside a running training"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if something is broken."""
    from mggcn.doctor.diagnose import diagnose, exit_status, render

    findings = diagnose(compute=not arguments.quick)
    code = exit_status(findings)
    arguments.answer = {"usable": code == 0, "findings": findings}
    print(render(findings))
    return code
