"""Large arrays of `.npz` archives as files of a room's folder, which are read by ranges; others are read whole."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from pathlib import Path

from mggcn.errors import StoreError
from mggcn.graph.build.room import SHARE, Room
from mggcn.graph.build.staging import explaining_write_errors, free_bytes
from mggcn.graph.file_rows import FileRows

COPY_BYTES = 1 << 20


def large_member(path: Path, name: str, room: Room, kinds: str = "iuf") -> FileRows | None:
    """Return an array of an archive as a file, None for one that is missing, small, of another kind or no plain array.

    Cost: one pass in blocks of 1 MiB; the array's bytes on the disk. Raises: StoreError if the disk has too little space;
    OSError, zipfile.BadZipFile for a damaged archive, whose checksums are compared.
    """
    if room.folder is None:
        return None
    with zipfile.ZipFile(path) as archive:
        info = next((info for info in archive.infolist() if info.filename == f"{name}.npy"), None)
        if info is None or info.file_size * SHARE <= room.memory:
            return None
        target = room.folder / "arrays" / f"{name}.npy"
        free = free_bytes(room.folder)
        if info.file_size > free:
            raise StoreError(
                f"unpacking {name} of {path} needs {info.file_size / 2**30:.1f} GiB of disk at {room.folder.parent}, "
                f"{free / 2**30:.1f} GiB are free; free some space, or write the store elsewhere"
            )
        with archive.open(info) as packed, explaining_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(packed, file, COPY_BYTES)
    with contextlib.suppress(StoreError):  # pickled or by columns: the reader of whole arrays says so
        rows = FileRows.open(target)
        if rows.dtype.kind in kinds:
            return rows
    target.unlink()
    return None
