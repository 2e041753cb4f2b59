"""Writes the run folder: history and result; only rank 0 writes, and shows its progress."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from mggcn import output
from mggcn.errors import RunError, shown
from mggcn.files import (
    LARGEST_HISTORY,
    new_file,
    open_file,
    open_log,
    parse_object,
    read_object,
    read_text,
    reason,
    write_text,
)
from mggcn.memory.units import duration


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside the target, then rename: a reader sees the old file or the new one. Raises: RunError."""
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{path} could not be written: {reason(error)}; free space and run again") from error


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Return the content of a file that `write_json` wrote. Raises: RunError if it is unreadable or lacks a key."""
    try:
        found = read_object(path)
        if absent := [key for key in keys if key not in found]:
            raise ValueError(f"it lacks {', '.join(absent)}")
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}; put it back, or start the run again") from error
    return found


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the epochs of a run. Raises: RunError if its history cannot be read, or a line is not an epoch."""
    path, number = folder / "history.jsonl", 0
    try:
        rows = []
        for number, line in enumerate(read_text(path, LARGEST_HISTORY).splitlines(), start=1):  # noqa: B007
            rows.append(parse_object(line))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise RunError(f"{path}, line {number}, is not an epoch: {reason(error)}; restore the file") from error
    return rows


def require_history(folder: Path, lines: int) -> None:
    """Refuse to continue a run whose history has lost lines that its checkpoint counts. Raises: RunError."""
    path = folder / "history.jsonl"
    try:
        with open_file(path) as file:
            found = sum(line.endswith(b"\n") for line in itertools.islice(file, lines))
    except FileNotFoundError:
        found = 0
    except OSError as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from error
    if found < lines:
        raise RunError(
            f"{path} has {found} of the {lines} epochs that the checkpoint of this run stands for: it was cut or removed; "
            "put it back, or begin a new run with these weights: mggcn train STORE --start-from RUN"
        )


log: logging.Logger = logging.getLogger(__name__)
"""Epochs at the level INFO, for programs that import mggcn: logging.getLogger("mggcn") has them, of rank 0."""


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
        """Pass the rows that have arrived to the function. Raises: what the function raises."""
        if self._inode() in (0, self._before):
            return
        with open_file(self._path) as file:
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

    def __init__(self, folder: Path | None, quiet: bool, total_epochs: int, repeat: int = 1) -> None:
        self._folder = folder
        self._path = None if folder is None else folder / "history.jsonl"
        self._file: TextIO | None = None
        self._says = folder is not None and not quiet
        self._bar = self._says and output.is_terminal(sys.stderr)
        self._shown_s = time.monotonic()
        self._total, self._repeat = total_epochs, repeat
        self._began: tuple[float, float] | None = None
        self._width = 0
        self._open = False
        self.lines: int = 0

    def start(self, keep_lines: int) -> None:
        """Open the history, cut after `keep_lines` lines: those of epochs that a resumed run does not repeat.

        The folder is created only now, so that a run that is refused before its first epoch leaves none.
        """
        if self._path is None:
            return
        with self._written():
            # Beside the old one, then renamed: a crash here loses no epoch.
            with new_file(self._path) as file:
                if keep_lines:
                    with open_file(self._path) as old:
                        file.writelines(itertools.islice(old, keep_lines))
            # Whoever follows the file sees every epoch at once.
            self._file = io.TextIOWrapper(open_log(self._path), encoding="utf-8", line_buffering=True)
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
        if log.isEnabledFor(logging.INFO):
            log.info("epoch %s", self._line(row))
        if self._says:
            self._show(row)

    def step(self, row: dict[str, Any], step: int, steps: int) -> None:
        """Show how far the epoch behind those of a row is: its loss is the mean so far, its seconds are at this pace."""
        if self._says:
            self._show(row, f", step {step}/{steps}", step / steps)

    def _show(self, row: dict[str, Any], within: str = "", part: float = 0.0) -> None:
        """Move the bar, or write a line if the last one is PROGRESS_S old. within, part: of the next epoch."""
        done = row["epoch"] + part
        text = f"{self._line(row, within)}{self._left(row.get('run', 0), done)}"
        if self._bar:
            # What a longer text left is wiped out.
            self._width, text = len(text), text.ljust(self._width)
            width = 24
            filled = "#" * int(width * done // self._total)
            self._open = done != self._total
            output.tell(f"\r[{filled:<{width}}] {text}", sys.stderr, end="" if self._open else "\n")
        elif (now := time.monotonic()) >= self._shown_s + PROGRESS_S:
            self._shown_s = now
            output.tell(f"epoch {text}", sys.stderr)

    def _line(self, row: dict[str, Any], within: str = "") -> str:
        """An epoch in words."""
        score = "" if row["val"] is None else f"  val {row['val']:.4f}"
        if (cosine := row.get("gradient_cosine")) is not None:
            score += f"  cosine {cosine:.3f}"
        return f"{row['epoch']}/{self._total}{within}  loss {row['loss']:.4f}{score}  {row['seconds']:.3f} s/epoch"

    def _left(self, run: int, done: float) -> str:
        """The time that the epochs left will take, of all repeats, at the pace since the first; "" before there is one."""
        now, done = time.monotonic(), self._total * run + done
        if self._began is None:
            self._began = now, done
        began, first = self._began
        left = self._total * self._repeat - done
        return f"  {duration((now - began) / (done - first) * left)} left" if done > first and left else ""

    def say(self, text: str) -> None:
        """Print a line for the user, below the progress line; nothing if it is empty."""
        if self._says and text:
            self._end_line()
            output.tell(shown(text), sys.stdout)

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
            raise RunError(f"{self._path} could not be written: {reason(error)}; free space and resume") from error

    def _end_line(self) -> None:
        if self._open:
            output.tell("", sys.stderr)
            self._open = False
