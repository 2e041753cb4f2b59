"""Say what is installed, which device and transport work, and how to mend what does not."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if something is broken."""
    from mggcn.report.doctor import diagnose, exit_status, render

    findings = diagnose()
    print(render(findings))
    return exit_status(findings)
