"""How much memory a graph may take while it is built, and the folder that takes the rest.

Without a folder all is in memory. With one, small sources stay in memory, too: the bytes of a list of edges decide.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mggcn.errors import StoreError
from mggcn.graph.build.build import Job, Tell, silent
from mggcn.graph.build.staging import InFolder, InMemory, Staging, free_bytes, hold

WINDOWS_BYTES = 100 << 20
"""Peak bytes of one window of edges during bucketing, temporaries included: measured, bench/notes/0028."""
SHARE = 4
"""One part in so many of the memory may be taken by a list's columns that stay there."""


class BuildPlan(NamedTuple):
    """The memory and disk space that building needs, announced before it begins."""

    num_edges: int
    buffer: int
    """Bytes of memory, beside what the process holds and what is of the size of the vertices."""
    disk: int
    """Bytes of the folder at its fullest, what a source was parsed or unpacked to among them, the store not."""
    store: int
    """Bytes of the store's edges at most."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes, and a folder for data that exceed it; None for memory alone."""

    folder: Path | None = None
    memory: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What the work depends on: of other work nothing is taken up."""
    tell: Tell = silent
    announce: Callable[[BuildPlan], None] = silent
    announce_columns: Callable[[Path, int], None] = field(default=silent, kw_only=True)
    """Says of what file the columns are parsed to the folder, and about how many bytes these take."""

    def part(self, name: str) -> Room:
        """Return the room of one of several graphs."""
        return self if self.folder is None else replace(self, folder=self.folder / name)

    def based_on(self, **paths: str | Path) -> Room:
        """Return the room for work that depends on these files (keyed by purpose), or on words instead of files."""
        if self.folder is None:
            return self
        found = {what: fingerprint(Path(path)) if os.path.exists(path) else str(path) for what, path in paths.items()}
        return replace(self, identity={**self.identity, **found})

    def for_list(self, path: Path, most: int, about: int) -> Staging:
        """Return a place for the columns of a file, given the most bytes and about how many they take; 0: unknown.

        Raises: StoreError if the disk has too little space.
        """
        if self.folder is None or most * SHARE <= self.memory:
            return InMemory()
        _require(f"parsing {path}", about, self.folder, "list")
        if about:
            self.announce_columns(path, about)
        return InFolder(self.folder / "list", {"file": fingerprint(path)})

    def for_rows(self, path: Path, nbytes: int) -> Staging:
        """Return a place for the numbers of a table, given the most bytes they take; tables are read again each time."""
        if self.folder is None or nbytes * SHARE <= self.memory:
            return InMemory()
        return InFolder(self.folder / "table", {"file": fingerprint(path)})

    def for_build(self, job: Job) -> tuple[Staging, int | None]:
        """Return where a graph is built, and how many records are sorted at once; None: all.

        Raises: StoreError if the disk has too little space.
        """
        records = job.edges.count * (1 + job.options.symmetrize)
        records += job.num_vertices if job.options.self_loops == "add" else 0
        sorting = sort_bytes(job)
        if self.folder is None or records * (sorting + 2 * job.record_bytes()) <= self.memory // 2:
            return InMemory(), None
        capacity = max(1, (self.memory - WINDOWS_BYTES) // sorting)
        entry = 4 + 4 * job.weighted + (0 if job.type_dtype is None else np.dtype(job.type_dtype).itemsize + 4)
        pointers = 8 * (job.num_vertices + 1)
        one, directions = records * entry + pointers, 1 if job.one_direction else 2
        passing = 0 if job.one_direction else records * job.record_bytes()
        listed = _bytes_in(self.folder) - _bytes_in(self.folder / "build")
        plan = BuildPlan(
            job.edges.count,
            WINDOWS_BYTES + min(capacity, records) * sorting,
            listed + max(records * job.record_bytes() + passing + one, passing + directions * one),
            directions * one,
        )
        _require(f"preparing {plan.num_edges:,} edges", plan.disk + plan.store, self.folder)
        self.announce(plan)
        options = asdict(job.options) | {"row_normalize": None}
        identity = {"n": job.num_vertices, "types": str(job.type_dtype), "capacity": capacity, "options": options}
        return InFolder(self.folder / "build", {**self.identity, **identity}), capacity


IN_MEMORY = Room()


def _require(what: str, nbytes: int, folder: Path, part: str = "") -> None:
    """Refuse what needs more disk than is free, besides what a part of the folder holds already. Raises: StoreError."""
    need, free = nbytes - _bytes_in(folder / part), free_bytes(folder)
    if need > free:
        raise StoreError(
            f"{what} needs {need / 2**30:.1f} GiB of disk at {folder.parent}, {free / 2**30:.1f} GiB are free; free some "
            "space, or write the store elsewhere"
        )


def _bytes_in(folder: Path) -> int:
    """Return the bytes of all files of a folder, 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def sort_bytes(job: Job) -> int:
    """Return the bytes that sorting a record takes: its key alone in place, else with an order and a copy of a field."""
    if job.edges.weights is None and job.type_dtype is None and job.options.self_loops != "add":
        return 8 + 8 * job.marks_reverses
    return 2 * job.record_bytes() + 16 + 16 * (job.type_dtype is not None)


def fingerprint(path: Path) -> list[list[Any]]:
    """Return name, size, mtime and ctime of a file, or of all files of a folder.

    `cp -p` and `touch` can set the first time, nothing the second.
    """
    # Of a store the graph alone: readers and runs leave records there.
    names = ("meta.json", "*.npy") if (path / "meta.json").is_file() else ("**/*",)
    inside = (file for name in names for file in path.glob(name) if file.is_file())
    files = sorted(inside) if path.is_dir() else [path]
    found = ((file, file.stat()) for file in files)
    return [[os.path.abspath(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in found]


@contextlib.contextmanager
def beside(store: Path) -> Iterator[Path]:
    """Yield the folder in which a store's graph is built, and keep other commands out of it.

    It is removed at the end, unless work can continue there later: after a signal or an error of the disk, and after a
    mistake of a command that found an earlier one's work. Raises: StoreError if another command works there, or it cannot
    be made.
    """
    target = Path(os.path.abspath(store))
    folder = target.parent / f".{target.name}.prepare"
    missing = [parent for parent in folder.parents if not os.path.lexists(parent)]
    descriptor = hold(folder)
    found = any(folder.iterdir())
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit, StoreError):
        raise
    except BaseException:
        if not found:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        for empty in (folder, *missing):
            with contextlib.suppress(OSError):
                empty.rmdir()
        os.close(descriptor)
