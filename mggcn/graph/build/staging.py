"""Where large arrays are while a graph is built: columns in memory, or files of a folder from which work can continue.

A column is written and read at positions, in entries; what was never written takes no memory and no disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mggcn.errors import StoreError
from mggcn.files import read_object, write_text
from mggcn.graph.csr import Array, ArrayRows, Rows
from mggcn.graph.file_rows import FileRows

HEADER_BYTES = 128
MANIFEST = "manifest.json"


class Column(Protocol):
    """A vector of one type that is written and read in parts."""

    def write(self, position: int, entries: Array) -> None: ...

    def take(self, start: int, stop: int) -> Array:
        """Return entries that the caller may change: those in memory change with it."""
        ...

    def rows(self, length: int) -> Rows:
        """Return the first `length` entries, all of them written."""
        ...

    def drop(self) -> None:
        """Release the column's memory or file; it may be written again."""
        ...


class Staging(Protocol):
    """Columns by name, and the state from which interrupted work continues. `InMemory` and `InFolder`."""

    def column(self, name: str, dtype: npt.DTypeLike, capacity: int) -> Column: ...

    def load(self) -> dict[str, Any]:
        """Return the state that was saved last, empty at first."""
        ...

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state that covers everything written before."""
        ...


class InMemory:
    """Columns as arrays; nothing outlives the process."""

    def column(self, name: str, dtype: npt.DTypeLike, capacity: int) -> Column:
        return _MemoryColumn(np.dtype(dtype), capacity)

    def load(self) -> dict[str, Any]:
        return {}

    def save(self, state: Mapping[str, Any]) -> None:
        """Do nothing: nothing in memory outlives the process."""


class _MemoryColumn:
    """An array of which only touched pages are resident."""

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self.data: Array = np.empty(capacity, dtype)

    def write(self, position: int, entries: Array) -> None:
        if position + entries.size > self.data.size:
            # The system moves pages, not their content; only writers know the array so far.
            self.data.resize(max(position + entries.size, self.data.size * 3 // 2), refcheck=False)
        self.data[position : position + entries.size] = entries

    def take(self, start: int, stop: int) -> Array:
        return self.data[start:stop]

    def rows(self, length: int) -> Rows:
        return ArrayRows(self.data[:length])

    def drop(self) -> None:
        self.data = np.empty(0, self.data.dtype)


class InFolder:
    """Columns as `.npy` files in a folder with a manifest; the same work, started again there, continues."""

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """Open a folder for a job; what another job left there is removed.

        Raises: StoreError if it cannot be made, or another process works there.
        """
        self.folder = folder
        self._columns: dict[str, _FileColumn] = {}
        self._job = json.loads(json.dumps(job, default=str))
        self._lock = weakref.finalize(self, os.close, hold(folder))
        with explaining_write_errors(folder):
            if self._read().get("job") != self._job:
                for file in folder.iterdir():
                    file.unlink()

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock()

    def column(self, name: str, dtype: npt.DTypeLike, capacity: int) -> Column:
        self._columns[name] = _FileColumn(self.folder / f"{name}.npy", np.dtype(dtype))
        return self._columns[name]

    def load(self) -> dict[str, Any]:
        found = self._read().get("state", {})
        return found if isinstance(found, dict) else {}

    def save(self, state: Mapping[str, Any]) -> None:
        """Flush all columns and replace the manifest. Raises: StoreError if the disk is full."""
        with explaining_write_errors(self.folder):
            for column in self._columns.values():
                column.flush()
            write_text(self.folder / MANIFEST, json.dumps({"job": self._job, "state": state}))

    def _read(self) -> dict[str, Any]:
        try:
            return read_object(self.folder / MANIFEST)
        except (OSError, ValueError):
            return {}


class _FileColumn:
    """An `.npy` file whose header is written last."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        if path.is_symlink():  # not of ours: whoever put it there may mean another file to be overwritten
            path.unlink()
        path.touch()

    def write(self, position: int, entries: Array) -> None:
        data = np.ascontiguousarray(entries, self.dtype)
        view, at = data.view(np.uint8).data, self._at(position)
        with explaining_write_errors(self.path), self.path.open("r+b", buffering=0) as file:
            file.seek(at)
            while view:
                view = view[file.write(view) :]

    def take(self, start: int, stop: int) -> Array:
        return FileRows(self.path, (stop,), self.dtype, HEADER_BYTES).read(start, stop)

    def rows(self, length: int) -> Rows:
        with explaining_write_errors(self.path), self.path.open("r+b", buffering=0) as file:
            file.write(_header(self.dtype, length))
            file.truncate(self._at(length))
        return FileRows(self.path, (length,), self.dtype, HEADER_BYTES)

    def flush(self) -> None:
        if self.path.exists():
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)

    def _at(self, position: int) -> int:
        return HEADER_BYTES + position * self.dtype.itemsize


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    """Return an `.npy` header of HEADER_BYTES."""
    buffer = io.BytesIO()
    descr = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(buffer, descr)
    text = buffer.getvalue()
    padding = HEADER_BYTES - len(text)
    return text[:8] + (HEADER_BYTES - 10).to_bytes(2, "little") + text[10:-1] + b" " * padding + b"\n"


def hold(folder: Path) -> int:
    """Make a folder and keep other processes out until the descriptor that is returned is closed.

    File systems without locks let every process in. Raises: StoreError if it cannot be made, or another process is there.
    """
    with explaining_write_errors(folder):
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, expected a folder", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(f"{folder} is in use: another process prepares this store; wait for it") from error
    except OSError:
        return descriptor
    if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
        return descriptor
    os.close(descriptor)  # whoever held it has removed it
    return hold(folder)


@contextlib.contextmanager
def explaining_write_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing into one line that says why a file cannot be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = (
            "free some space and run the command again: it continues here" if full else "check the path and its rights"
        )
        raise StoreError(f"cannot write {path}: {error.strerror or error}; {todo}") from error


def free_bytes(folder: Path) -> int:
    """Return the bytes that may be written to the disk of a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return math.prod((found.f_bavail, found.f_frsize))
