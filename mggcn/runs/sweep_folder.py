"""Files of a sweep's folder: its record, its table, and the run folders of its trials."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

from mggcn.errors import RunError
from mggcn.files import read_text

FILE, TABLE = "sweep.json", "sweep.csv"


def trial_folder(sweep: Path, number: int) -> Path:
    """Return the run folder of a trial, numbered from 1."""
    return sweep / "trials" / f"{number:03d}"


def refuse_sweep(folder: Path) -> None:
    """Refuse a sweep's folder where a run's is expected. Raises: RunError that names the best trial's folder."""
    if not (folder / FILE).is_file():
        return
    which = f"such as {trial_folder(folder, 1)}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StopIteration):
        first = next(csv.DictReader(read_text(folder / TABLE).splitlines()))
        if first["val"]:
            which = f"the best is {trial_folder(folder, int(first['trial']))}"
    raise RunError(f"{folder} is the folder of a sweep, expected that of a run; name one of its trials: {which}")
