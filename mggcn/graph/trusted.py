"""The record of files that were compared with their digests as a whole: unchanged since, they need no comparison again.

It lies in the user's cache folder, because whoever reads a store writes nothing into it, and records each file's size,
times and inode. Losing it costs one comparison.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from mggcn.errors import StoreError
from mggcn.files import parse_object, read_bytes, write_bytes
from mggcn.graph.digests import sealed, unsealed
from mggcn.host import user_cache

MOST_RECORDS = 512
"""Records that are kept, the latest ones: one of a store has a kilobyte or two."""
SETTLED_NS = 2_000_000_000
"""A file that changed less than that before may change again within one tick of its clock, on some file systems."""


def record_of(folder: Path) -> Path:
    """Return the record of a store, keyed by its path, because it holds only for the files there."""
    return user_cache() / f"trusted-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


class Trusted:
    """The record of a store. Threads share it; of two processes that add to it at once, one addition may be lost."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

    def state(self, name: str) -> list[int]:
        """Return the state by which an unchanged file is known: size, mtime, ctime and inode. Raises: OSError."""
        found = (self._folder / name).stat()
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]

    def known(self) -> dict[str, object]:
        """Return the record: state and SHA-256 by the name of the file; empty if it is missing or damaged."""
        path = record_of(self._folder)
        try:
            found = parse_object(unsealed(read_bytes(path), path))
        except (OSError, ValueError, StoreError):
            return {}
        return found if "meta_sha256" in found else {}

    def add(self, name: str, state: list[int], sha256: str) -> None:
        """Record that a file with this state was compared; where the cache folder cannot be written, nothing is."""
        with contextlib.suppress(OSError), self._lock:
            if self.state(name) != state or time.time_ns() - max(state[1:3]) < SETTLED_NS:
                return
            known = {key: value for key, value in self.known().items() if key != "meta_sha256"}
            record = record_of(self._folder)
            record.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(record, sealed(json.dumps(known | {name: [*state, sha256]}, indent=1)))
            for old in sorted(record.parent.glob("trusted-*.json"), key=os.path.getmtime)[:-MOST_RECORDS]:
                old.unlink(missing_ok=True)
