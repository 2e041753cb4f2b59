"""Records of many fields name them where they are made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mggcn"
ROOMS = (
    "api",
    "blocks",
    "cli",
    "comm",
    "cost",
    "feed",
    "graph",
    "memory",
    "nn",
    "partition",
    "planning",
    "report",
    "runs",
    "train",
)
MOST = 5


def positional_records(text: str) -> list[str]:
    """Names of the dataclasses in a module that take more than MOST fields by position."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in map(ast.unparse, node.decorator_list):
            lines = [ast.unparse(line) for line in node.body if isinstance(line, ast.AnnAssign)]
            fields = [line for line in lines if "init=False" not in line and "kw_only=True" not in line]
            if decorator.startswith("dataclass") and "kw_only=True" not in decorator and len(fields) > MOST:
                found.append(node.name)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_long_records_are_keyword_only(room: str) -> None:
    """Fails if a record of more than five fields can be made without their names, where two are easily swapped."""
    found = {
        path.stem: names for path in (PACKAGE / room).rglob("*.py") if (names := positional_records(path.read_text()))
    }
    assert not found


def test_a_long_record_is_found() -> None:
    """Fails if the search overlooks a record, or takes a short or keyword-only one for it."""
    fields = "".join(f"    field_{i}: int\n" for i in range(6))
    short = fields[: fields.index("    field_5")]
    made = "    made: int = field(init=False)\n"
    assert positional_records(f"@dataclass(frozen=True)\nclass Long:\n{fields}") == ["Long"]
    assert positional_records(f"@dataclass\nclass Long:\n{fields}{made}") == ["Long"]
    assert not positional_records(f"@dataclass(kw_only=True)\nclass Named:\n{fields}")
    assert not positional_records(f"@dataclass\nclass Short:\n{short}{made}")
