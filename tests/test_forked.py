"""Forks in place of new interpreters: what is started, and what comes out, is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.host import python
from tests import forked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", ["--version", "train --help", "store info here", "train"])
def test_a_fork_says_what_a_new_interpreter_does(words: str, tmp_path: Path) -> None:
    """Fails if a fork has another environment or folder, or loses what it printed or its exit code."""
    environment = os.environ | {"COLUMNS": "61", "PYTHONPATH": str(ROOT)}
    commands = [*python("mggcn"), *words.split()], [sys.executable, "-m", "mggcn", *words.split()]
    fork, new = (subprocess.run(c, cwd=tmp_path, env=environment, capture_output=True, text=True) for c in commands)
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)
    assert fork.stdout + fork.stderr


ENDS = {
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "at exit": "atexit.register(print, 'end')",
    "killed": "print('last words', file=sys.stderr); os.kill(os.getpid(), signal.SIGKILL)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "an error": "raise ValueError('x')",
    "text": "sys.exit('why')",
    "half a character": r"print('\ud800', file=sys.stderr)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_fork_ends_as_a_new_interpreter_does(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if threads are cut off, what is registered does not run, or last words and the reason are lost."""
    program = tmp_path / "ends.py"
    program.write_text(f"import atexit, os, signal, sys, threading, time\n{ENDS[how]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = (sys.executable, str(program))
    new = subprocess.run(command, capture_output=True, text=True, check=False)
    monkeypatch.setitem(forked.PROGRAMS, command, "ends")
    fork = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (fork.returncode, fork.stdout) == (new.returncode, new.stdout)
    last = [out.stderr.splitlines()[-1:] for out in (fork, new)]  # of a traceback the error
    assert last[0] == last[1]
    assert new.returncode == {"killed": -signal.SIGKILL, "Ctrl-C": -signal.SIGINT, "an error": 1, "text": 1}.get(how, 0)
