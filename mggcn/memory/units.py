"""Memory in bytes: how much this machine grants a process, and sizes and times as readable text."""

from __future__ import annotations

from pathlib import Path

from mggcn.host import machine_memory

GIB = 2**30
MIB = 2**20


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that new allocations may take: MemAvailable, or what the tightest control group leaves.

    `root`: where proc and sys are, for tests. Without either (not Linux) the result sets no limit.
    """
    memory = machine_memory(root)
    return 2**63 - 1 if memory is None else memory.available


def human(nbytes: float) -> str:
    """Return a size with its unit: 1.50 GiB, 20.1 MiB, 512 B."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as text: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    for unit, name, part, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"
