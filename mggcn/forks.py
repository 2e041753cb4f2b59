"""Forks of a process that has computed: OpenMP's threads end before the fork, and the child starts its own.

libgomp cannot know of a fork: a child that inherits its pool of threads waits for them for ever, in torch as well.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterable

HARD = 2
"""omp_pause_hard: end the threads. The next parallel region starts them again, in some 0.1 ms."""


def watch() -> None:
    """Prepare this process for forks, once. Cost: nothing until the first fork."""
    _watch()


def lacks_threads() -> bool:
    """Return whether this is a forked child of a process whose threads could not be ended before."""
    return _watch().lost


class _Forks:
    def __init__(self) -> None:
        self.lost = self._had = False
        os.register_at_fork(before=self._before, after_in_child=self._after)

    def _before(self) -> None:
        """End the threads; where that fails, note whether there are any that Python has not started."""
        try:
            self._had = not _pause() and len(os.listdir("/proc/self/task")) > threading.active_count()
        except OSError:  # no /proc: nobody has computed without one of these
            self._had = bool(sys.modules.keys() & {"torch", "mggcn.native"})

    def _after(self) -> None:
        self.lost = self.lost or self._had


@functools.cache
def _watch() -> _Forks:
    return _Forks()


def _pause() -> bool:
    """Return whether no runtime of OpenMP is loaded, or each has ended its threads; within a parallel region it cannot."""
    with open("/proc/self/maps") as maps:
        return all([_paused(path) for path in _runtimes(maps)])  # each of them, also behind one that fails


def _runtimes(maps: Iterable[str]) -> list[str]:
    """Return the files of GNU's OpenMP among those that are mapped; the path is the sixth field, and may hold blanks."""
    paths = {fields[5] for line in maps if len(fields := line.rstrip("\n").split(None, 5)) == 6}
    return sorted(path for path in paths if os.path.basename(path).startswith("libgomp"))


def _paused(path: str) -> bool:
    import ctypes  # only where there is a fork

    try:
        return int(ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW).omp_pause_resource_all(HARD)) == 0
    except (OSError, AttributeError):  # unloaded meanwhile, or of a compiler before GCC 9
        return False
