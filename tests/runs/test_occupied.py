"""Run folders of one command at a time, and what dead commands leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mggcn.comm.launch import PRIVATE, remove_stale
from mggcn.comm.rank import parent_path
from mggcn.config import Config
from mggcn.errors import RunError
from mggcn.runs.folder import make_run_folder
from mggcn.runs.occupied import UNFINISHED, occupied

HOLD = """
import sys, time, fcntl, os
held = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder until it dies."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_has_one_command_at_a_time(tmp_path: Path) -> None:
    """Fails if a second command enters, or a killed one keeps the folder, or leaving it does not free it."""
    with holder(tmp_path) as process:
        with pytest.raises(RunError, match="another command is at work in the run folder"), occupied(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with occupied(tmp_path), pytest.raises(RunError, match="another command"), occupied(tmp_path):
        pass
    with occupied(tmp_path):
        pass
    with pytest.raises(RunError, match="cannot be opened"), occupied(tmp_path / "none"):
        pass


def test_of_many_commands_one_makes_a_folder(tmp_path: Path) -> None:
    """Fails if two commands that begin at once take the same --out."""
    for attempt in range(10):
        start = threading.Barrier(4)
        made: list[Path] = []
        refused: list[str] = []

        def make(
            out: Path = tmp_path / str(attempt),
            start: threading.Barrier = start,
            made: list[Path] = made,
            refused: list[str] = refused,
        ) -> None:
            start.wait()
            try:
                made.append(make_run_folder(Config(), "any", out))
            except RunError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert all("was taken by another run" in text or "is not empty" in text for text in refused)


def test_what_a_killed_command_left_goes(tmp_path: Path) -> None:
    """Fails if litter stays, or anything goes that a run or a living launcher needs."""
    dead, living, unborn = (tmp_path / f"{PRIVATE}{name}" for name in ("dead", "living", "unborn"))
    for private in (dead, living, unborn):
        private.mkdir()
        (private / "store").touch()
    for private in (dead, living):
        parent_path(private).write_text(str(os.getpid()))
    litter = [tmp_path / pattern.replace("*", "x") for pattern in UNFINISHED]
    kept = [tmp_path / name for name in ("history.jsonl", "config.toml", "checkpoints/latest", ".scores.npy.tmp")]
    for path in (*litter, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "checkpoints" / ".run-000-epoch-000003.tmp").mkdir()
    with holder(living) as process:
        with occupied(tmp_path):
            found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
        process.kill()
    assert {path.relative_to(tmp_path) for path in kept} <= found
    assert {path.parts[0] for path in found if path.parts[0].startswith(PRIVATE)} == {living.name, unborn.name}
    assert not any(path.exists() for path in litter)
    assert not (tmp_path / "checkpoints" / ".run-000-epoch-000003.tmp").exists()
    remove_stale(tmp_path)
    assert not living.exists()
