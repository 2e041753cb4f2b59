"""The walks of docs/architecture.md: few files, in order, and what they name is in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_FILES = 14
STOP = re.compile(r"\[[^\]]+\]\(\.\./([\w/.]+)\)\s+`(\w+)`")
ROOMS = re.compile(r"^\| ((?:`\w+`(?:, )?)+)", re.MULTILINE)


def section(title: str) -> str:
    """The text below a heading."""
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_rooms_are_those_of_the_linter() -> None:
    """Fails if a room comes, goes or changes its place, and the table does not say so."""
    layers, *_ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    expected = [sorted(layer.replace("mggcn.", "").split(" | ")) for layer in reversed(layers["layers"])]
    assert [sorted(re.findall(r"\w+", names)) for names in ROOMS.findall(section("Rooms"))] == expected


def test_a_row_reaches_a_kernel_through_few_files() -> None:
    """Fails if the walk grows, does not start at the command line, does not end in a kernel, or turns back."""
    steps = re.findall(r"^\d+\. \[[^\]]+\]\(\.\./([\w/.]+)\)", section("A walk: one row of features"), re.MULTILINE)
    assert steps[0] == "mggcn/cli/entry.py"
    assert steps[-1].startswith("cpu/")
    assert len(steps) == len(set(steps))
    assert len(steps) <= MOST_FILES


def test_what_the_walks_name_is_in_its_file() -> None:
    """Fails if a function or class on the way is renamed or moves to another file."""
    named = STOP.findall(PAGE)
    assert len(named) > 15
    lost = [(path, name) for path, name in named if not re.search(rf"\b{name}\b", (ROOT / path).read_text())]
    assert lost == []


def test_what_a_section_promises_is_tested() -> None:
    """Fails if one of the ways to extend mggcn is described without a test that does it."""
    for what in ("model", "strategy", "kernel", "source"):
        tests = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", section(f"How to add a {what}"))
        assert tests
        assert all((ROOT / test).is_file() for test in tests)
