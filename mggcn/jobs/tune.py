"""`mggcn tune`: measures what plans predict with, and writes it as a machine's file."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.backend.cpu.machine import processor_name
from mggcn.errors import ConfigError
from mggcn.jobs.tune_device import device_table
from mggcn.jobs.tune_links import measure_links
from mggcn.jobs.tune_nccl import measure_nccl
from mggcn.version import __version__


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What is measured: threads of all ranks together, the numbers of ranks, and how long each figure may take."""

    threads: int
    ranks: tuple[int, ...] = (2, 4)
    seconds: float = 0.3

    def __post_init__(self) -> None:
        if self.threads < 1 or not self.ranks or min(self.ranks) < 2:
            raise ConfigError(
                f"mggcn tune needs 1 thread or more and numbers of ranks from 2 on, got {self.threads} and {self.ranks}"
            )
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"--seconds must be 0 or more for each figure, got {self.seconds:g}")


def tune(settings: TuneSettings, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure this machine's cores, memory and transports, and return the content of its file.

    folder: for the ranks' logs and results. say: told what is measured next. Cost: under a minute on two cores, and some
    seconds for each number of GPUs between which NCCL is measured.
    Raises: CommError if ranks cannot be started.
    """
    device = device_table(settings.threads, settings.seconds, say)
    links = measure_links(settings.ranks, settings.threads, settings.seconds, folder, say)
    return {
        "name": "tuned",
        "title": f"this machine ({_processor()}, {settings.threads} core{'s' * (settings.threads > 1)})",
        "origin": "measured",
        "device": device,
        "link": links,
        "nccl": measure_nccl(settings.ranks, folder, say),
    }


def check_writable(path: Path) -> None:
    """Refuse a place for the file before a minute is spent. Raises: ConfigError."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the machine's file cannot be written to {path}; name one with --out")


def write_machine(content: dict[str, Any], path: Path) -> None:
    """Write a machine's file with a comment on its origin, in one step. Raises: ConfigError if it cannot be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M")
    text = f"# Measured by mggcn {__version__} tune, {stamp}, load average {os.getloadavg()[0]:.1f} at its end.\n"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + _toml(content))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the machine's file cannot be written to {path}: {error.strerror}; name one with --out"
        ) from error


def _toml(content: Mapping[str, Any]) -> str:
    """Return a machine's file, one figure a line: its plain values are written in TOML as in JSON."""

    def lines(table: Mapping[str, Any]) -> list[str]:
        return [f"{key} = {_value(value)}" for key, value in table.items()]

    many = ("link", "nccl")
    top = {key: value for key, value in content.items() if key not in ("device", *many)}
    tables = [line for name in many for each in content.get(name, ()) for line in ("", f"[[{name}]]", *lines(each))]
    return "\n".join([*lines(top), "", "[device]", *lines(content.get("device", {})), *tables, ""])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def _processor() -> str:
    return processor_name() or "unknown processor"
