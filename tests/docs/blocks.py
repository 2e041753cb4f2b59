"""Code blocks of a page, and a shell and a Python session that run them."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.cli.entry import main

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?: (?:[KMG]iB|m?s)\b)?")
TOLERANCE = 0.06
"""Between the scores of two machines, whose rounding differs: some vertices in a hundred."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is saved as, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def without_numbers(line: str) -> str:
    """Return a line with every number and size replaced."""
    return _NUMBER.sub("#", line.rstrip())


def alike(expected: str, printed: str) -> bool:
    """Return whether two lines say the same: words and counts equal, scores within the tolerance.

    Sizes and seconds are those of a machine, and so are differences that rounding makes (2e-08) and the best epoch.
    """
    if without_numbers(expected) != without_numbers(printed):
        return False
    pairs = zip(_NUMBER.finditer(expected), _NUMBER.finditer(printed), strict=True)
    return all(_close(one, two[0]) for one, two in pairs if not _of_a_machine(one) and not _of_a_machine(two))


def _of_a_machine(number: re.Match[str]) -> bool:
    best_epoch = number.string[: number.start()].endswith("best validation (")
    return best_epoch or " " in number[0] or "e" in number[0]


def _close(one: re.Match[str], two: str) -> bool:
    if "." not in one[0]:
        return one[0] == two
    return abs(float(one[0].replace(",", "")) - float(two.replace(",", ""))) <= TOLERANCE


def unprinted(expected: str, printed: str) -> list[str]:
    """Return the lines that do not follow each other in the output; `...` stands for any lines."""
    rest = iter(printed.splitlines())
    lines = [line for line in expected.splitlines() if line != "..."]
    return [line for line in lines if not any(alike(line, found) for found in rest)]


class Session:
    """Runs the blocks of a page in the current folder: one Python session, and commands one after the other."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> str:
        """Save a block that has a title, run any other; return what it printed."""
        if block.title:
            Path(block.title).write_text(block.text)
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if block.language == "python":
                exec(compile(block.text, "page", "exec"), self.names)
            else:
                for line in block.text.splitlines():
                    _command(shlex.split(line))
        return printed.getvalue()


def _command(words: list[str]) -> None:
    """Run `mggcn ...` and `python FILE` in this process, which saves their imports, and `head -n N FILE`."""
    match words:
        case ["mggcn", *arguments]:
            code = main(arguments)
            assert code == 0, f"{shlex.join(words)} exited with code {code}"
        case ["python", script]:
            runpy.run_path(script, run_name="__main__")
        case ["head", "-n", count, file]:
            print("\n".join(Path(file).read_text().splitlines()[: int(count)]))
        case _:
            raise AssertionError(f"no shell here: {shlex.join(words)}")
