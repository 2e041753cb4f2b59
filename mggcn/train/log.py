"""Writes the run folder: history and result; only rank 0 writes, and shows its progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from mggcn.errors import RunError


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside the target, then rename: a reader sees the old file or the new one. Raises: RunError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}; free space and run again") from error


def require_history(folder: Path, lines: int) -> None:
    """Refuse to go on with a run whose history has lost lines that its checkpoint counts. Raises: RunError."""
    path = folder / "history.jsonl"
    try:
        with path.open("rb") as file:
            found = sum(line.endswith(b"\n") for line in itertools.islice(file, lines))
    except FileNotFoundError:
        found = 0
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if found < lines:
        raise RunError(
            f"{path} has {found} of the {lines} epochs that the checkpoint of this run stands for: it was cut or removed; "
            "put it back, or begin a new run with these weights: mggcn train STORE --start-from RUN"
        )


class HistoryFollower:
    """Calls a function with each row that a rank process appends to history.jsonl, from another process."""

    def __init__(self, folder: Path, keep_lines: int, on_epoch: Callable[[dict[str, Any]], None]) -> None:
        """Follow what comes behind `keep_lines` lines, once the run has replaced the file by one that ends with them."""
        self._path = folder / "history.jsonl"
        self._skip = keep_lines
        self._on_epoch = on_epoch
        self._before = self._inode()
        self._offset = 0

    def _inode(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0

    def poll(self) -> None:
        """Hand on the rows that have come. Raises: what the function raises."""
        if self._inode() in (0, self._before):
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._skip -= 1
                if self._skip < 0:
                    self._on_epoch(json.loads(line))


PROGRESS_S = 10.0
"""Seconds between two lines of progress where stderr is no terminal, such as the log of a batch job."""


class RunLog:
    """history.jsonl and the progress of rank 0: a bar on a terminal, else a line now and then; other ranks are silent."""

    def __init__(self, folder: Path | None, quiet: bool, total_epochs: int) -> None:
        self._folder = folder
        self._path = None if folder is None else folder / "history.jsonl"
        self._file: TextIO | None = None
        self._says = folder is not None and not quiet
        self._bar = sys.stderr.isatty()
        self._shown_s = time.monotonic()
        self._total = total_epochs
        self._open = False
        self.lines = 0

    def start(self, keep_lines: int) -> None:
        """Open the history, cut after `keep_lines` lines: those of epochs that a resumed run does not repeat.

        The folder is created only now, so that a run that is refused before its first epoch leaves none.
        """
        if self._path is None:
            return
        # Beside the old one, then renamed: a crash here loses no epoch.
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with self._written():
            with temporary.open("w") as file:
                if keep_lines:
                    with self._path.open() as old:
                        file.writelines(itertools.islice(old, keep_lines))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
            self._file = self._path.open("a", buffering=1)  # whoever follows the file sees every epoch at once
        self.lines = keep_lines
        self.say(f"run folder {self._folder}")
        self._shown_s = time.monotonic()

    def epoch(self, row: dict[str, Any]) -> None:
        """Append one epoch."""
        self.lines += 1
        if self._file is None:
            return
        with self._written():
            self._file.write(json.dumps(row) + "\n")
        if self._says:
            self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        """Move the bar, or write a line if the last one is PROGRESS_S old."""
        done, score = row["epoch"], "" if row["val"] is None else f"  val {row['val']:.4f}"
        text = f"{done}/{self._total}  loss {row['loss']:.4f}{score}  {row['seconds']:.3f} s/epoch"
        if self._bar:
            width = 24
            filled = "#" * (width * done // self._total)
            self._open = done != self._total
            print(f"\r[{filled:<{width}}] {text}", end="" if self._open else "\n", file=sys.stderr, flush=True)
        elif (now := time.monotonic()) >= self._shown_s + PROGRESS_S:
            self._shown_s = now
            print(f"epoch {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line for the user, below the progress line."""
        if self._says:
            self._end_line()
            print(text, flush=True)

    def flush(self) -> None:
        """Make what was appended durable, before a checkpoint refers to it."""
        if self._file is not None:
            with self._written():
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the history and end the progress line."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what a full disk refused is written once more, in vain
                file.close()
        self._end_line()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Raise RunError where the disk is full or gone."""
        try:
            yield
        except OSError as error:
            raise RunError(f"{self._path} could not be written: {error.strerror}; free space and resume") from error

    def _end_line(self) -> None:
        if self._open:
            print(file=sys.stderr)
            self._open = False
