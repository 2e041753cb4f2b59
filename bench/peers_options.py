"""Options that the comparisons with other libraries share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from peers_cases import CACHE
from peers_env import FOLDER

OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"type": float, "default": 1.0, "help": "of generated graphs; goals are for 1"},
    "threads": {"type": int, "default": 2},
    "peers": {"type": Path, "default": FOLDER, "help": "folder of the environment that peers/setup.sh makes"},
    "ceilings": {"type": Path, "help": "figures of ceilings.py --json (default: measured first)"},
    "data": {"type": Path, "help": "folder of the real graphs (default: $MGGCN_DATA)"},
    "cache": {"type": Path, "default": CACHE, "help": "folder that keeps the graphs"},
    "out": {"type": Path, "help": "folder of the report (default: bench/results)"},
}


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add some of the shared options."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
