"""Text that may be packed by gzip or zstd, read as a stream of bytes."""

from __future__ import annotations

import gzip
import importlib
import io
from pathlib import Path
from typing import Any, BinaryIO

from mggcn.errors import GraphError
from mggcn.files import open_file, require_file

PACKED = (".gz", ".zst")
SAMPLES, SAMPLE_BYTES = 64, 1 << 12
"""Places of a text at which words are counted, and bytes that are read at each."""
CHUNK_BYTES = 1 << 12
"""Bytes that are unpacked at once: a hostile file makes 128 MiB of them."""


def open_text(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked if its suffix says that it is packed. Raises: GraphError without zstandard."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        try:
            zstandard: Any = importlib.import_module("zstandard")
        except ImportError as error:
            raise GraphError(f"{path} is packed by zstd; pip install 'mggcn[zstd]', or unpack it") from error
        return io.BufferedReader(_Zstd(path, zstandard))
    opened: BinaryIO = gzip.open(require_file(path), "rb") if suffix == ".gz" else open_file(path)  # type: ignore[assignment]
    return opened


def skip(file: BinaryIO, offset: int) -> None:
    """Skip this many unpacked bytes from the start."""
    if file.seekable():
        file.seek(offset)
        return
    while offset > 0 and (block := file.read(min(offset, 1 << 20))):
        offset -= len(block)


def most_bytes(path: Path) -> int:
    """Return an upper bound on the bytes of numbers in a text, packed or not: `0 1` and a line's end become 16."""
    ratios = {".gz": 1032, ".zst": 1 << 15}
    return 4 * path.stat().st_size * ratios.get(path.suffix.lower(), 1)


def about_bytes(path: Path) -> int:
    """Estimate the bytes of numbers that a text holds, by words at some places of it; 0: packed, which tells nothing.

    Cost: SAMPLES reads of SAMPLE_BYTES.
    """
    size, found, read = path.stat().st_size, 0, 0
    if path.suffix.lower() in PACKED:
        return 0
    with open_file(path) as file:
        for start in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
            file.seek(start)
            text = file.read(SAMPLE_BYTES)
            found, read = found + len(text.replace(b",", b" ").split()), read + len(text)
    return 8 * found * size // max(read, 1)


class _Zstd(io.RawIOBase):
    """Reads concatenated zstd frames; zstandard's own reader does not detect truncation."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file = open_file(path)
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._left, self._inside = b"", False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer. Raises: EOFError if the file ends within a frame, OSError if it is none."""
        while not self._left:
            packed = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(CHUNK_BYTES)
            if not packed:
                if self._inside and not self._frame.eof:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._new() if self._frame.eof else self._frame
            self._inside = True
            try:
                self._left = self._frame.decompress(packed)
            except self._error as error:
                raise OSError(str(error)) from error
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
