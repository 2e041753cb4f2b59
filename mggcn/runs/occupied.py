"""A run folder belongs to one command at a time; what a killed command left half written is removed by the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mggcn.comm.launch import remove_stale
from mggcn.errors import RunError
from mggcn.files import remove_abandoned

UNFINISHED = (
    *(f".{name}.*tmp" for name in ("config.toml", "*.json", "history.jsonl", "*.safetensors", "rank-*", "sweep.csv")),
    "optuna.log.lock*",
    "rank-*.error.draft",
    "checkpoints/.states/.*.tmp",
    "checkpoints/.*.tmp",
    "repeats/.*.tmp",
    "status/.*.tmp",
)
"""Files and folders that a command which was killed may leave; whatever they were to replace is still there."""


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Keep other commands out of a run folder, by a lock of the folder that ends with this process at the latest.

    File systems without locks let every command in. Raises: RunError if another command works there.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunError(f"the run folder {folder} cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another command is at work in the run folder {folder}; wait for its end, or name another folder"
            ) from None
        except OSError:
            pass
        remove_stale(folder)
        remove_abandoned(folder)
        for path in (path for pattern in UNFINISHED for path in folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
