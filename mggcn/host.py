"""This machine: its free memory, the limit of the cgroup around this process, and the user's cache folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# cgroup v1 writes a number near 2^63 where there is no limit.
_NO_LIMIT = 2**60


def user_cache() -> Path:
    """Return the folder of what commands find out and can find out again: below $XDG_CACHE_HOME, by default ~/.cache.

    A relative $XDG_CACHE_HOME counts as none, as its specification says: ranks may have other working folders.
    """
    if (given := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return given / "mggcn"
    try:
        return Path.home() / ".cache" / "mggcn"
    except RuntimeError:  # a user of a container, of whom nothing is known, keeps nothing
        return Path(os.devnull) / "mggcn"


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes."""

    total: int
    available: int
    """Bytes that are free without swapping, within the tightest cgroup."""
    cgroup_limit: int | None
    """The tightest limit of the cgroups around this process, None without one."""


def machine_memory(root: Path = Path("/")) -> MachineMemory | None:
    """Read /proc/meminfo and the cgroup files below `root`; None where there is no /proc/meminfo (not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    limits = [
        (limit, used) for folder in _cgroups(root) if (limit := _limit(folder)) and (used := _used(folder)) is not None
    ]
    available = min([kib.get("MemAvailable", kib["MemFree"]) * 1024, *(limit - used for limit, used in limits)])
    return MachineMemory(kib["MemTotal"] * 1024, max(available, 0), min((limit for limit, _ in limits), default=None))


def _cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's memory cgroup and of all around it, version 2 and 1.

    A container often sees its own cgroup as the root of the mount while /proc names the host's path: the mount's root
    is always among the folders.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = PurePosixPath(path.lstrip("/"))
        folders += [mount / inner, *(mount / parent for parent in inner.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    return limit if limit is not None and limit < _NO_LIMIT else None


def _used(folder: Path) -> int | None:
    """Bytes in use, without the page cache that the kernel gives back on demand."""
    used = _number(folder / "memory.current")
    if used is None:
        used = _number(folder / "memory.usage_in_bytes")
    if used is None:
        return None
    try:
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return used
    return max(used - int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0))), 0)
