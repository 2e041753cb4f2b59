"""What compilers made for tests, kept in build/tests/ by the content that it was made from."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "tests"


def compiled(sources: object, name: str, make: Callable[[Path], None]) -> Path:
    """Return the file `name` that `make` wrote for these sources, options and compiler, told apart by their repr."""
    folder = FOLDER / hashlib.sha256(repr(sources).encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # who wants the same at the same time waits for it
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                make(Path(beside) / name)
                (Path(beside) / name).replace(folder / name)
    finally:
        os.close(handle)
    return folder / name


@functools.cache
def version_of(*command: str) -> str:
    """Return what a compiler says of itself."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
