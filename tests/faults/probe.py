"""Writes down which test comes by a probe. The package that is probed has a copy of this file, which is pytest's plugin.

In FOLDER: `hits` (number and test, a pair a line), `now` (the test that runs), `tests` (a step of a test a line).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FOLDER = Path(__file__).resolve().parents[1] / "build" / "hits"
OPTIMIZED = 1
"""Flag of a function's code, not of a module's or a class's."""
# Tests plant errors into these: keep what they were.
OPEN, WRITE, CLOSE, READ = os.open, os.write, os.close, Path.read_text
SEEN: set[tuple[int, str]] = set()


def hit(number: int) -> None:
    """Write down that the test which runs came by; "" stands for what runs when a module is imported.

    A process that a test started knows it by its environment, or else by the file.
    """
    test = ""
    if sys._getframe(1).f_code.co_flags & OPTIMIZED:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0] or READ(FOLDER / "now")
    if (number, test) not in SEEN:
        SEEN.add((number, test))
        file = OPEN(FOLDER / "hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        WRITE(file, f"{number}\t{test}\n".encode())
        CLOSE(file)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs."""
    (FOLDER / "now").write_text(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a step of a test took, and whether it passed."""
    result = {"test": report.nodeid, "seconds": report.duration, "passed": not report.failed}
    with (FOLDER / "tests").open("a") as file:
        file.write(json.dumps(result) + "\n")


def pytest_runtest_logfinish() -> None:
    """Say that no test runs."""
    (FOLDER / "now").write_text("")
