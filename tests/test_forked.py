"""Forks in place of new interpreters: what is started, and what comes out, is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.host import python

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", ["--version", "train --help", "store info here", "train"])
def test_a_fork_says_what_a_new_interpreter_does(words: str, tmp_path: Path) -> None:
    """Fails if a fork has another environment or folder, or loses what it printed or its exit code."""
    environment = os.environ | {"COLUMNS": "61", "PYTHONPATH": str(ROOT)}
    commands = [*python("mggcn"), *words.split()], [sys.executable, "-m", "mggcn", *words.split()]
    fork, new = (subprocess.run(c, cwd=tmp_path, env=environment, capture_output=True, text=True) for c in commands)
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)
    assert fork.stdout + fork.stderr
