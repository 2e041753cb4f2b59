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

from mggcn.cli import main

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?: [KMG]iB)?")


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
    """Return a line with every number and size replaced: a machine and its rounding may change them."""
    return _NUMBER.sub("#", line.rstrip())


def unprinted(expected: str, printed: str) -> list[str]:
    """Return the lines that do not follow each other in the output, numbers apart; `...` stands for any lines."""
    rest = iter([without_numbers(line) for line in printed.splitlines()])
    lines = [without_numbers(line) for line in expected.splitlines() if line != "..."]
    return [line for line in lines if line not in rest]


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
            assert code == 0, f"{shlex.join(words)} left with exit code {code}"
        case ["python", script]:
            runpy.run_path(script, run_name="__main__")
        case ["head", "-n", count, file]:
            print("\n".join(Path(file).read_text().splitlines()[: int(count)]))
        case _:
            raise AssertionError(f"no shell here: {shlex.join(words)}")
