"""How much memory this machine grants a process: what is free, within the limits of its control group."""

from __future__ import annotations

import re
from pathlib import Path

GIB = 2**30
MIB = 2**20
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: str) -> int:
    """File pages that the group gives back before it is full."""
    try:
        lines = dict(line.split() for line in Path(path).read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))


def free_bytes() -> int:
    """Return the bytes that new allocations may take: MemAvailable, or what the control group leaves if that is less."""
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    for limit_path, usage_path, stat_path in _CGROUPS:
        limit, usage = _number(limit_path), _number(usage_path)
        if limit is not None and usage is not None:
            free = min(free, limit - usage + _reclaimable(stat_path))
    return max(free, 0)


def human(nbytes: float) -> str:
    """Return a size with its unit: 1.50 GiB, 20.1 MiB, 512 B."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def parse_bytes(text: str) -> int:
    """Return a number of bytes from text such as 512MiB, 80GiB, 32GB or 1000000. Raises: ValueError if it is neither."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip().replace("_", "").lower())
    if found is None or found[2] not in units:
        raise ValueError(f"expected bytes such as 512MiB, 80GiB or 32GB, got {text!r}")
    return int(float(found[1]) * units[found[2]])
