"""What somebody may put in the place of a file: FIFOs, links, folders, and files that are damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

DAMAGE = ("FIFO", "device", "socket", "folder", "deep", "a list", "not UTF-8", "empty", "huge", "NaN")
"""Kinds that `plant` knows, apart from "link to FILE"."""
CONTENT = {
    "deep": b"[" * 100_000,
    "a list": b"[1, 2]",
    "not UTF-8": b"\xff\xfe\x00{",
    "empty": b"",
    "NaN": b'{"epoch": NaN, "rank": 1e999, "state": Infinity}',
}


def plant(path: Path, kind: str) -> None:
    """Put one of these in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            try:  # the path of a socket has at most 107 bytes
                os.chdir(path.parent)
                server.bind(path.name)
            finally:
                os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 42)  # takes no disk
    elif kind.startswith("link to "):
        path.symlink_to(kind.removeprefix("link to "))
    else:
        path.write_bytes(CONTENT[kind])
