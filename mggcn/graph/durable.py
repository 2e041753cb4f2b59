"""Folders that appear whole or not at all: arrays and JSON flushed to the disk, folders renamed into place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mggcn.files import write_bytes
from mggcn.graph.csr import Rows
from mggcn.graph.digests import FileDigest, Hasher, sealed
from mggcn.graph.layout import npy_chunks, npy_nbytes

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2(2): a path that is not absolute is one of this process; both names stay, and change places."""


def write_array(path: Path, rows: Rows) -> FileDigest:
    """Write one array as `.npy`; return the SHA-256 of the file and of its blocks. Raises: OSError."""
    hasher = Hasher()
    with path.open("xb", buffering=0) as file:  # in a folder that is new
        reserve(file.fileno(), npy_nbytes(rows))
        for piece in npy_chunks(rows):
            hasher.update(piece)
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return hasher.finish()


def reserve(descriptor: int, nbytes: int) -> None:
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


@contextlib.contextmanager
def alone(path: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let one process, or thread, in at a time; `path`, the lock, is gone at the end. waits: called before it waits.

    In folders that cannot be written, and on file systems without locks, nothing is locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            waits()
            lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # who waits finds that its file has no name, and locks a new one
            lock.release()


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make an empty folder beside `target`, to be filled and given to `move_folder`; it is removed unless it was moved.

    What killed processes left beside `target` is removed, too: a process locks its folder while it lives. On file systems
    without locks it stays. Raises: OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    descriptor = None
    try:
        with _alone_in(target.parent):
            _remove_stale(target)
            temporary.mkdir()
            descriptor = os.open(temporary, os.O_RDONLY)
            _lock(descriptor)
        yield temporary
    finally:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove folders that no process has locked; an old one that had to make way only where a new one stands."""
    name = f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}"
    for folder in (*target.parent.glob(f"{name}.tmp"), *(target.parent.glob(f"{name}.old") if target.exists() else ())):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:  # another's, which is done with it
            continue
        try:
            if _lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open folder; return False if another process has, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def move_folder(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename a folder to its final name; with `overwrite`, exchange it for the old one in one step and remove that.

    Where that cannot be done the old one is renamed first, and a process that is killed between the two leaves it as
    `.NAME.*.old` until NAME is replaced again. Of several ranks that write the same folder, the last one's stands.
    Raises: OSError.
    """
    old = temporary.with_suffix(".old")
    with _alone_in(target.parent):
        if not (overwrite and target.exists()):
            os.rename(temporary, target)
        elif exchange(temporary, target):
            old = temporary
        else:
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except BaseException:
                os.rename(old, target)
                raise
    try:
        sync_folder(target.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; return False where system or file system cannot. Raises: OSError."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one))
