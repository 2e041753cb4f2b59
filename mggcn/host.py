"""This machine: its free memory, the limit of the cgroup around this process, how busy its cores are, and the user's
cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import final

# cgroup v1 writes a number near 2^63 where there is no limit.
_NO_LIMIT = 2**60
PR_SET_PDEATHSIG = 1
IN_MEMORY = (b"/memfd:", b"/dev/", b"/SYSV", b"/anon_hugepage")
"""How the names of mapped files begin that lie in memory, not on a disk."""


def user_cache() -> Path:
    """Return the folder for results that can be computed again: below $XDG_CACHE_HOME, by default ~/.cache.

    A relative $XDG_CACHE_HOME counts as none, as its specification says: ranks may have other working folders.
    """
    if (given := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return given / "mggcn"
    try:
        return Path.home() / ".cache" / "mggcn"
    except RuntimeError:  # a user of a container, of whom nothing is known, keeps nothing
        return Path(os.devnull) / "mggcn"


PACKAGE = Path(__file__).resolve().parents[1]
"""The folder that holds the package."""


def python(module: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of the package as a program, whatever files the working folder has.

    flags: of the interpreter. -m alone would look there first, and take a user's types.py or queue.py for the library's.
    """
    found = f"import runpy, sys; sys.path.append({str(PACKAGE)!r}); runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, *flags, "-P", "-c", found]


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_ALONE = 4 << 20
"""Bytes from which malloc maps a chunk alone, and gives it back when it is freed; twice as many of the heap it may keep."""


def settle_malloc() -> None:
    """Have malloc keep no more freed memory than it does at first. Does nothing without glibc, or where its own variables,
    MALLOC_..., are set. For processes that are mggcn's.

    Once glibc has freed a chunk of some MiB, it takes others of up to its size from its heaps, one for each thread, and
    keeps twice as much in each (mallopt(3), "dynamic mmap threshold"): 24 MiB of what set-up reads at a time stayed beside
    the epochs' memory.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_ALONE)
        library.mallopt(M_TRIM_THRESHOLD, 2 * MAPPED_ALONE)


def release_freed() -> None:
    """Give back to the system what malloc keeps of freed memory. Does nothing without glibc. Cost: some milliseconds."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def compiles_modules(module: str = "torch") -> bool:
    """Return whether Python compiles a module for this process, or would, and so the others of its package: at the first
    start after an installation, or at every start where the result cannot be written.
    """
    try:
        found = importlib.util.find_spec(module)
        return found is not None and found.cached is not None and Path(found.cached).stat().st_mtime > _started()
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def _started() -> float:
    """Return when this process began, in seconds since the epoch."""
    # The name, in brackets, may hold spaces; the 22nd field counts from the boot.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, also if that has happened already. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of this machine, in bytes."""

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


def process_bytes(name: str, root: Path = Path("/")) -> int:
    """Return the bytes that this process holds now (VmRSS) or held at most (VmHWM); without /proc always the latter."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MAP = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(?P<name>.*)$", re.MULTILINE)
"""A line of /proc/self/smaps with addresses, rights, offset, device, inode, and the name if there is one."""
_SIZE = re.compile(rb"^(Rss|Pss|Anonymous): +(\d+) kB$", re.MULTILINE)


def mapped_bytes(root: Path = Path("/")) -> int:
    """Return the resident bytes that are not the process's own: pages of files, of libraries and arrays (.npy) alike, which
    the system takes back as it needs, and of memory that ranks share (comm/shared_memory.py) the part that others count.

    Pages of a library that the loader has changed are the process's own. How many others are resident depends on the page
    cache, by 90 MiB of torch's between two environments.
    """
    try:
        text = (root / "proc/self/smaps").read_bytes()
    except OSError:
        return 0
    total, maps = 0, list(_MAP.finditer(text))
    for one, following in zip_longest(maps, maps[1:]):
        name = one["name"]
        shared = name.startswith(b"/memfd:mggcn-")
        if not shared and b".npy" not in name and (not name.startswith(b"/") or name.startswith(IN_MEMORY)):
            continue
        sizes = dict(_SIZE.findall(text, one.end(), following.start() if following else len(text)))
        # Pages of files that were changed; of shared ones each page divided by the maps that have it.
        total += 1024 * (int(sizes.get(b"Rss", 0)) - int(sizes.get(b"Pss" if shared else b"Anonymous", 0)))
    return total


GLANCE_S = 0.02
"""Seconds between two glances at the memory of this process: products read some 16 MB of mapped edges meanwhile."""

TRIES = 4
"""Readings of a process's maps, of which the one counts in which the fewest pages of files came or went."""


@final
class PeakMemory:
    """The most memory that this process has held of its own: without pages of files, as `mapped_bytes` tells them apart.

    The system knows a peak with pages of files alone. Of one that a look finds to be new, those that are resident then are
    subtracted: what came or went since the last look is not told apart. For any number of threads.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._lock = root, threading.Lock()
        self._peak = self._highest = 0
        self._beside: int | None = None

    def look(self) -> int:
        """Return the peak so far. Cost: some milliseconds; more where pages of files come and go meanwhile."""
        with self._lock:
            tries = list[tuple[int, int]]()
            while not tries or (tries[-1][0] and len(tries) < TRIES):
                before, mapped, after = _resident(self._root)[2], mapped_bytes(self._root), _resident(self._root)[2]
                tries.append((abs(after - before), mapped - after))
            self._beside = min(tries)[1]
            return self._note(self._beside)

    def glance(self) -> None:
        """Look, with as much shared memory, and as many pages of files in memory, as at the last look. Cost: some 50 us."""
        if self._beside is None:
            self.look()
            return
        with self._lock:
            self._note(self._beside)

    def _note(self, beside: int) -> int:
        highest, now, files = _resident(self._root)
        held = highest if highest > self._highest else now
        self._highest, self._peak = highest, max(self._peak, held - files - beside)
        return self._peak


def _resident(root: Path) -> tuple[int, int, int]:
    """Return the bytes that this process held at most, those it holds now, and those of mapped files among these, without
    files in memory. Without /proc: the first twice, and none.
    """
    try:
        with open(f"{root}/proc/self/status", "rb", buffering=0) as file:  # no Path: glances are many
            text = file.read()
        names = (b"VmHWM:", b"VmRSS:", b"RssFile:")
        highest, now, files = (int(text[text.index(name) + len(name) :].split(None, 1)[0]) * 1024 for name in names)
        return highest, now, files
    except (OSError, ValueError):
        most = process_bytes("VmHWM", root)
        return most, most, 0


@contextlib.contextmanager
def again_and_again(act: Callable[[], object], every_s: float = GLANCE_S) -> Iterator[None]:
    """Have a thread call `act` every so many seconds until the block ends."""
    ended = threading.Event()

    def body() -> None:
        while not ended.wait(every_s):
            act()

    thread = threading.Thread(target=body, name="mggcn-glances", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """How far this process got the cores that it asked for, over an interval."""

    waited: float
    """Share of the time in which its threads could run and did not: other programs had the cores."""
    idle_cores: float
    """Cores of the machine that nothing used."""


class ProcessorWatch:
    """Reads Linux's counters of this process's threads and of the machine's cores. Cost: some 50 us per call."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def use(self) -> ProcessorUse | None:
        """Return the use since the last call; None too soon after it, or where the kernel does not count it."""
        now, before = self._counts(), self._before
        if now is None or before is None:
            return None
        ran, waited, idle, total = (later - earlier for later, earlier in zip(now, before, strict=True))
        if total <= 0 or ran + waited <= 0:
            return None
        self._before = now
        return ProcessorUse(waited / (ran + waited), idle / total * (os.cpu_count() or 1))

    def _counts(self) -> tuple[int, int, int, int] | None:
        """Nanoseconds that the threads ran and waited, ticks of idle cores and of all."""
        tasks = self._root / "proc/self/task"
        ran = waited = 0
        try:
            for task in os.listdir(tasks):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
                    times = (tasks / task / "schedstat").read_text().split()
                    ran, waited = ran + int(times[0]), waited + int(times[1])
            with (self._root / "proc/stat").open() as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        return (ran, waited, ticks[3] + ticks[4], sum(ticks)) if len(ticks) > 4 else None
