"""What building a large graph says: its plan, how far it is, and where it continues after an interruption."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mggcn.errors import printable
from mggcn.graph.build.room import BuildPlan, Room, beside
from mggcn.host import process_bytes
from mggcn.memory.units import human

LINE_S = 30.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


def room_for(folder: Path, memory: int) -> Room:
    """Return the memory and the folder for building, which prints its plan and progress."""
    return Room(folder, memory, tell=_Progress().tell, announce=_announce, announce_columns=_announce_columns)


@contextlib.contextmanager
def kept_if_interrupted(store: Path) -> Iterator[Path]:
    """Yield the folder beside a store; if it stays, print that the same command continues from it."""
    folder = None
    try:
        with beside(store) as folder:
            yield folder
    except (KeyboardInterrupt, SystemExit):
        if folder is not None and folder.is_dir():
            print(
                f"note: {printable(folder)} stays: run the same command to continue from there, or delete it",
                file=sys.stderr,
            )
        raise


def _announce(plan: BuildPlan) -> None:
    """Print the plan, once edges need files."""
    peak = human(process_bytes("VmRSS") + plan.buffer)
    print(
        f"{plan.num_edges:,} edges are sorted in parts: planned peak memory {peak}, disk {human(plan.disk)} beside the "
        f"store and at most {human(plan.store)} for its edges",
        file=sys.stderr,
    )


def _announce_columns(path: Path, nbytes: int) -> None:
    """Say what parsing takes, before it is known how many edges there are."""
    print(
        f"{printable(path)} is parsed to files: about {human(nbytes)} of disk, then more for sorting", file=sys.stderr
    )


class _Progress:
    """A bar on the second stream, if that is a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._next = 0.0 if sys.stderr.isatty() else time.monotonic() + LINE_S

    def tell(self, what: str, done: int, total: int) -> None:
        """Draw at most twice a second, and the end."""
        now, what = time.monotonic(), printable(what)
        if not sys.stderr.isatty():
            if total and now > self._next:
                self._next = now + LINE_S
                print(f"{what} {100 * done // total} %", file=sys.stderr, flush=True)
        elif total and (now > self._next or done == total):
            self._next = now + 0.5
            end = "\n" if done == total else ""
            bar = "#" * (24 * done // total)
            print(f"\r[{bar:<24}] {what} {100 * done // total} %  ", end=end, file=sys.stderr, flush=True)
