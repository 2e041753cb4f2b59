"""The answer of a command as JSON (--json): one document on standard output; all else goes to standard error."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json. A command leaves its answer in `arguments.answer`, which is printed once the command is done."""
    parser.set_defaults(answer=None)
    parser.add_argument(
        "--json", action="store_true", help="print the answer as one JSON document, and all else on standard error"
    )


@contextlib.contextmanager
def printing(arguments: argparse.Namespace) -> Iterator[None]:
    """Print the answer of a command under --json; an error leaves standard output empty."""
    if not getattr(arguments, "json", False):
        yield
        return
    sys.stdout.flush()
    # Ranks and libraries know the number of the stream alone.
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    if arguments.answer is not None:
        print(json.dumps(plain(arguments.answer), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value in JSON's types: paths as text, records as objects, and numbers that are not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({item.name: getattr(value, item.name) for item in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
