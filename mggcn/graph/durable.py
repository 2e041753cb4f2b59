"""Folders that appear whole or not at all: arrays and JSON flushed to the disk, folders renamed into place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mggcn.graph.csr import Rows
from mggcn.graph.digests import FileDigest, Hasher, sealed
from mggcn.graph.layout import npy_chunks, npy_nbytes


def write_array(path: Path, rows: Rows) -> FileDigest:
    """Write one array as `.npy`; return the SHA-256 of the file and of its blocks. Raises: OSError."""
    hasher = Hasher()
    with path.open("wb", buffering=0) as file:
        _reserve(file.fileno(), npy_nbytes(rows))
        for piece in npy_chunks(rows):
            hasher.update(piece)
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return hasher.finish()


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk space, so that a full disk fails before hours of writing; some file systems cannot."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except AttributeError:
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def write_meta(path: Path, meta: Mapping[str, Any]) -> None:
    """Write a JSON object with its own digest at the end. Raises: OSError."""
    write_bytes(path, sealed(json.dumps(meta, indent=1, default=str)))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk. Raises: OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time move folders here; on file systems without locks, any number."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def move_folder(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename a folder to its place; with `overwrite`, what was there goes only once the new one stands.

    Of several ranks that write the same folder, the last one's stands. Raises: OSError.
    """
    old = temporary.with_suffix(".old")
    with _alone_in(target.parent):
        if overwrite and target.exists():
            os.rename(target, old)
        try:
            os.rename(temporary, target)
        except BaseException:
            if old.exists():
                os.rename(old, target)
            raise
    try:
        sync_folder(target.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)
