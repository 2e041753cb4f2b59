"""Files that are read or written whole: regular files of a bounded size are read, and new ones appear whole or not at all.

What is in a folder may have been put there by others: FIFOs, devices and links to them, files that are damaged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import json
import os
import secrets
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, final

LARGEST: Final = 1 << 26
"""Bytes of a small file, unless its reader says otherwise: the plan of 64 ranks takes 2 MB."""
TEMPORARY: Final = "mggcn-"
"""What the name of a temporary folder begins with."""
OWNER: Final = ".owner"
"""File of a temporary folder that names the machine whose processes know whether its owner lives."""
LARGEST_HISTORY: Final = 1 << 30
"""Bytes of a history or a timeline, which grow with epochs: 200 bytes each, and a few thousand for all ops of one."""


def no_regular_file(path: Path) -> str:
    """Return what a path is if it must not be read to its end, such as "a FIFO"; "" for a file or a missing path."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # opening it tells why
        return ""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "")


def require_file(path: Path) -> Path:
    """Return the path if it may be read to its end. Raises: OSError for a FIFO, device, socket or folder."""
    if kind := "a folder" if path.is_dir() else no_regular_file(path):
        raise OSError(errno.EINVAL, f"it is {kind}, expected a file", str(path))
    return path


def open_file(path: Path, largest: int | None = None) -> BufferedReader:
    """Open a file for reading. Raises: OSError if it is not a regular file, or has more than `largest` bytes."""
    file: BufferedReader = BufferedReader(NamedFile(require_file(path)))
    if largest is not None and (size := os.fstat(file.fileno()).st_size) > largest:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {largest}", str(path))
    return file


@final
class NamedFile(io.FileIO):
    """A file whose errors of reading name it; the system's errors do so only on opening."""

    def readinto(self, buffer: Any) -> int | None:
        with self._named():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._named():
            return super().readall()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or os.fspath(self.name)
            raise


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a file. Raises: OSError as `open_file`."""
    with open_file(path, largest) as file:
        return file.read()


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a file without a byte order mark. Raises: OSError as `open_file`; ValueError: it is not UTF-8."""
    return read_bytes(path, largest).decode("utf-8-sig")


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """Return the JSON value in a file. Raises: OSError as `open_file`; ValueError if it is not JSON."""
    return parse_json(read_bytes(path, largest))


def read_object(path: Path, largest: int = LARGEST) -> dict[str, Any]:
    """Return the JSON object in a file. Raises: OSError as `open_file`; ValueError if it holds anything else."""
    return parse_object(read_bytes(path, largest))


def read_toml(path: Path, largest: int = 1 << 20) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises: OSError as `open_file`; ValueError if it is not TOML."""
    try:
        return tomllib.loads(read_text(path, largest))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, also for one that is nested deeper than Python's stack."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text. Raises: ValueError if it is not JSON, or another value."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it must hold a JSON object, got {type(found).__name__}")
    return found


def reason(error: Exception) -> str:
    """Return why a file could not be read, for a message that names the file."""
    told = error.strerror if isinstance(error, OSError) else None
    return told or str(error) or type(error).__name__


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = True, keep: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` as a whole when the block ends; after an error, the old file stays.

    Until then its name is random, so that no planted link or FIFO is written to; files that killed processes left are
    removed. durable: whether it must survive a loss of power. keep: False only tries whether it can be written.
    Raises: OSError.
    """
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, expected a file", str(path))
    _remove_stale(path)
    temporary, descriptor = _locked_beside(path)
    with open(temporary, "wb", opener=lambda *_: descriptor) as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
            if keep:
                temporary.rename(path)
            else:
                temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _locked_beside(path: Path) -> tuple[Path, int]:
    """Make a file beside another and lock it, which tells other writers that it is no left-over."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for one before it was locked


def _remove_stale(path: Path) -> None:
    """Remove what was to become this file and no living process has locked."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(descriptor)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file as `new_file` does. Raises: OSError."""
    with new_file(path, durable=durable) as file:
        file.write(content)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a text in UTF-8 as `new_file` does. Raises: OSError."""
    write_bytes(path, text.encode(), durable=durable)


@contextlib.contextmanager
def temporary_folder(place: Path | None = None, prefix: str = TEMPORARY) -> Iterator[Path]:
    """Make a temporary folder that is removed when the block ends or, if the process is killed, with the next one.

    place: the folder around it, by default that of the system. prefix: what its name begins with, alike for all that are
    removed together. The lock of the folder around it says that its owner lives. Raises: OSError.
    """
    place = place or Path(tempfile.gettempdir())
    remove_abandoned(place, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        (folder / OWNER).write_text(os.uname().nodename)  # locked by now
        inside = folder / "content"  # who makes a store locks the folder around it, for himself
        inside.mkdir(mode=0o700)
        yield inside
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_abandoned(place: Path, prefix: str = TEMPORARY) -> None:
    """Remove this user's temporary folders that processes of this machine made and no living one has locked."""
    for folder in place.glob(f"{glob.escape(prefix)}{'?' * 8}"):
        with contextlib.suppress(OSError, ValueError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid != os.getuid() or (folder / OWNER).is_symlink():
                    continue
                if read_text(folder / OWNER, 1 << 10) == os.uname().nodename:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(held)


def open_log(path: Path, *, anew: bool = False) -> BinaryIO:
    """Open a file to append lines to; anew: empty it first. Raises: OSError for a link or a FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    if anew:
        path.unlink(missing_ok=True)
        flags |= os.O_EXCL
    file = os.fdopen(os.open(path, flags, 0o666), "ab")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file
