"""SHA-256 of files as a whole and by blocks of 1 MiB: made while a file is written, compared when a block is first read.

meta.json has the digest of every file, at its end its own, and that of `blocks.sha256`: the digests of the blocks of all
files that have several, 32 bytes each, in the order in which meta.json lists them (note 0027).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from mggcn.errors import StoreError
from mggcn.files import NamedFile, read_bytes, reason, require_file

BLOCK = 1 << 20
"""Bytes of a block: what a first read of one byte costs, and at most 32 bytes of digests for each MiB."""
BLOCKS_FILE = "blocks.sha256"
LARGEST_BLOCKS = 1 << 32
"""Bytes of that file, which has 32 for each MiB of a store."""
WIDTH = 32
"""Bytes of a digest."""
THREADED = 4
"""Unseen blocks of one read from which threads hash them: starting these takes a tenth of hashing one."""
MARK = b',\n "meta_sha256": "'
END = b'"\n}\n'
REMEDY = "copy or prepare it again"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digests of a file: SHA-256 of the whole as text, and of its blocks as 32 bytes each."""

    sha256: str
    blocks: bytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks; 0 for an empty file."""
        return len(self.blocks) // WIDTH


class Hasher:
    """Digests of a file as it is written: the writer of an array calls `update` with each piece, in order."""

    def __init__(self) -> None:
        self._whole, self._block, self._filled = hashlib.sha256(), hashlib.sha256(), 0
        self._done = bytearray()

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes of the file to the digests."""
        self._whole.update(piece)
        view = memoryview(piece).cast("B")
        while view:
            part, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._done += self._block.digest()
        self._block, self._filled = hashlib.sha256(), 0

    def finish(self) -> FileDigest:
        """Return the digests, after the last piece."""
        if self._filled:
            self._end_block()
        return FileDigest(self._whole.hexdigest(), bytes(self._done))


def digests_meta(digests: Mapping[str, FileDigest]) -> tuple[dict[str, Any], bytes]:
    """Return the entries of meta.json for a store's files, by name, and the content of `blocks.sha256`, perhaps empty."""
    several = {name: digest for name, digest in digests.items() if digest.num_blocks > 1}
    content = b"".join(digest.blocks for digest in several.values())
    meta: dict[str, Any] = {"sha256": {name: digest.sha256 for name, digest in digests.items()}}
    if several:
        meta["blocks"] = {
            "nbytes": BLOCK,
            "counts": {name: digest.num_blocks for name, digest in several.items()},
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    return meta, content


def sealed(text: str) -> bytes:
    """Return the JSON text of an object; its last entry is the digest of the text before it."""
    body = text.rstrip().removesuffix("}").rstrip().encode() + MARK
    return body + hashlib.sha256(body).hexdigest().encode() + END


def unsealed(content: bytes, path: Path) -> bytes:
    """Return the bytes of a meta.json. Raises: StoreError if they do not match the digest in it.

    Files of earlier versions have none.
    """
    if b'"meta_sha256"' not in content:
        return content
    body, mark, _ = content.rpartition(MARK)
    body += mark
    if content[len(body) :] != hashlib.sha256(body).hexdigest().encode() + END:
        raise StoreError(
            f"{path} is not as it was written: its SHA-256 differs; {REMEDY}, or, if you edited it, delete its last "
            "entry, meta_sha256"
        )
    return content


def stored_digests(folder: Path, meta: Mapping[str, Any]) -> dict[str, tuple[int, bytes]]:
    """Return the bytes of a block and the digests of all blocks of every file that meta.json names.

    A file without digests of blocks, one of an earlier version or of one block, is a block as a whole, of 0 bytes here.
    Cost: one read of `blocks.sha256`. Raises: StoreError if that is missing or damaged.
    """
    try:
        found = {str(name): (0, bytes.fromhex(digest)) for name, digest in meta["sha256"].items()}
        if any(len(digest) != WIDTH for _, digest in found.values()):
            raise ValueError("expected a SHA-256 of 64 digits")
        if "blocks" not in meta:
            return found
        blocks, place = meta["blocks"], 0
        content = read_bytes(folder / BLOCKS_FILE, LARGEST_BLOCKS)
        if hashlib.sha256(content).hexdigest() != blocks["sha256"]:
            raise ValueError(f"the SHA-256 of {BLOCKS_FILE} differs")
        if type(blocks["nbytes"]) is not int or not 0 < blocks["nbytes"] <= 1 << 30:
            raise ValueError(f"invalid block size {blocks['nbytes']!r}")
        for name, count in blocks["counts"].items():
            found[name] = blocks["nbytes"], content[place : place + WIDTH * count]
            place += WIDTH * count
        return found
    except OSError as error:
        raise StoreError(f"{folder / BLOCKS_FILE} cannot be read: {reason(error)}; {REMEDY}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{folder / 'meta.json'}: the digests of files are damaged ({error}); {REMEDY}") from error


FileState = tuple[int, int, int, int]
"""What tells a file from another one of its name: device, inode, bytes, nanoseconds of the last change of its content."""


def file_state(file: BinaryIO) -> FileState:
    """Return device, inode, size and time of change of an open file."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_again(path: Path, opened: FileState) -> FileIO:
    """Open a file again, unbuffered. Raises: StoreError if it was replaced or changed since it was first opened."""
    with contextlib.suppress(FileNotFoundError):
        file = NamedFile(require_file(path))
        if file_state(file) == opened:
            return file
        file.close()
    raise StoreError(
        f"{path} was replaced or changed since it was opened: let the command that writes {path.parent} end, then "
        "start again"
    )


class CheckedFile:
    """The blocks of one file that this process has compared with their digests.

    Ranks that are threads share it; two that read the same block at once both compare it.
    """

    def __init__(self, path: Path, size: int, nbytes: int, digests: bytes) -> None:
        self._path, self._size = path, size
        self.complete: Callable[[], None] = lambda: None
        """Called once the last block was compared."""
        self._nbytes = nbytes or max(size, 1)
        self._streamed = not nbytes and size > BLOCK
        self._digests = digests
        self._seen = bytearray(-(-size // self._nbytes))
        if len(digests) != WIDTH * len(self._seen):
            raise StoreError(f"{path} has {size} bytes, not the size that its digests in meta.json are of; {REMEDY}")

    def read_into(self, file: FileIO, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the file from `start` on.

        file: open and unbuffered. Cost: as reading, or hashing in threads beside it if that is slower; blocks that are read
        for the first time are read whole.
        Raises: StoreError if a block is not as it was written.
        """
        if self._streamed and not self._seen[0]:
            self.check(file)
        stop = start + len(view)
        blocks = range(start // self._nbytes, -(-stop // self._nbytes))
        unseen = sum(not self._seen[block] for block in blocks)
        if not unseen:
            read_exactly(file, start, view, self._path)
        elif unseen < THREADED:
            self._compare(self._fill(file, start, view, blocks, None))
        else:
            with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
                self._compare(self._fill(file, start, view, blocks, pool))

    def _fill(
        self, file: FileIO, start: int, view: memoryview, blocks: range, pool: Executor | None
    ) -> dict[int, Callable[[], bytes]]:
        """Read what is asked for; return the digests of blocks that were not seen before, or how to wait for them."""
        found: dict[int, Callable[[], bytes]] = {}
        for block in blocks:
            first, last = self._extent(block)
            low, high = max(first, start), min(last, start + len(view))
            part = view[low - start : high - start]
            if self._seen[block]:
                read_exactly(file, low, part, self._path)
                continue
            whole = part if (low, high) == (first, last) else memoryview(bytearray(last - first))
            read_exactly(file, first, whole, self._path)
            if whole is not part:
                part[:] = whole[low - first : high - first]
            if pool is None:
                found[block] = hashlib.sha256(whole).digest
            else:
                future: Future[bytes] = pool.submit(_digest, whole)
                found[block] = future.result
        return found

    def check(self, file: FileIO) -> None:
        """Compare all blocks that were not compared yet, in bounded memory. Raises: StoreError."""
        if self._streamed:
            file.seek(0)
            self._compare({0: hashlib.file_digest(file, "sha256").digest})
            return
        window = memoryview(bytearray(min(self._size, 16 * self._nbytes)))
        for start in range(0, self._size, max(1, len(window))):
            self.read_into(file, start, window[: self._size - start])

    def check_start(self, file: FileIO) -> None:
        """Compare the block that has the header: a changed type or extent need not change the file's size."""
        self.read_into(file, 0, memoryview(bytearray(min(1, self._size))))

    def _extent(self, block: int) -> tuple[int, int]:
        return block * self._nbytes, min((block + 1) * self._nbytes, self._size)

    def _compare(self, found: Mapping[int, Callable[[], bytes]]) -> None:
        for block, digest in found.items():
            if digest() != self._digests[WIDTH * block : WIDTH * (block + 1)]:
                first, last = self._extent(block)
                raise StoreError(
                    f"{self._path} is damaged: bytes {first} to {last - 1} are not as they were written, their SHA-256 "
                    f"differs; {REMEDY}"
                )
            self._seen[block] = 1
        if found and all(self._seen):
            self.complete()


def _digest(view: memoryview) -> bytes:
    return hashlib.sha256(view).digest()


def read_exactly(file: FileIO, start: int, view: memoryview, path: Path) -> None:
    """Fill `view` from an unbuffered file; one read may return fewer bytes than requested. Raises: StoreError."""
    file.seek(start)
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise StoreError(f"{path} became shorter while it was read; leave the store alone during a run")
        filled += count
