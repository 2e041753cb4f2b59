"""Reads and checks result.json of a complete run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mggcn.errors import RunError
from mggcn.files import read_object, reason

SIZES = ("setup_seconds", "measured_peak_bytes")


def read_result(folder: Path) -> dict[str, Any]:
    """Return the content of a complete run's result.json. Raises: RunError if it cannot be read or is not a result."""
    path = folder / "result.json"
    try:
        result = read_object(path)
        _check(result)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged: {reason(error)}; delete it, and resume the run") from error
    return result


def _check(result: Mapping[str, Any]) -> None:
    """Refuse scores, seconds and bytes that are not there, or no numbers. Raises: ValueError."""
    tables = [result, *result["runs"]] if "runs" in result else [result]
    tables += [result[name] for name in ("mean", "std") if name in result]
    try:
        for scores in (table[kind] for table in tables for kind in ("best", "final")):
            if not all(isinstance(scores[split], int | float | None) for split in ("train", "val", "test")):
                raise TypeError("its scores are not numbers")
        planned = result.get("planned_peak_bytes", 0)  # a module of the user's own has no plan
        if not all(isinstance(size, int | float) for size in (planned, *(result[name] for name in SIZES))):
            raise TypeError("its seconds and bytes are not numbers")
        if not isinstance(result.get("seconds_per_epoch"), int | float | None) or not isinstance(result["metric"], str):
            raise TypeError("its metric is not text, or its seconds are not a number")
        if type(result.get("evaluated_fanout", 0)) is not int:
            raise TypeError("its evaluated_fanout is not a whole number")
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except TypeError as error:
        raise ValueError(str(error)) from error
