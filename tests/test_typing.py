"""What a user's type checker sees of the package: `make lint` checks the script that names all of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import mggcn
import mggcn.nn

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_is_in_the_script_that_mypy_checks() -> None:
    """Fails if a public name is left out of users_script.py, or `make lint` of mypy leaves out the script."""
    script = (ROOT / "tests" / "users_script.py").read_text()
    absent = [name for name in mggcn.__all__ if f"mggcn.{name}" not in script]
    absent += [name for name in mggcn.nn.__all__ if f"mggcn.nn.{name}" not in script and f"import {name}" not in script]
    assert not absent
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert checked["strict"]
    assert checked["modules"] == ["tests.users_script"]
