"""The page file of a rank: values that memory does not hold, on disk, read ahead and written behind by threads.

Reads and writes leave the page cache alone (O_DIRECT), which others use and a memory limit counts. Where a file system
refuses that, they pass through it and drop behind them what they put there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.cpu.memory import allocate
from mggcn.errors import PlanError, TrainError
from mggcn.files import reason
from mggcn.graph.durable import reserve
from mggcn.memory.pages import PAGE_BYTES, PIECE_BYTES, THREADS, WINDOW_ROWS, PagePlan, PageRegion, PageSpec
from mggcn.memory.units import human
from mggcn.partition.rows.tiles import MakeArray
from mggcn.train.runtime import DTYPES

Bytes = npt.NDArray[np.uint8]
REFUSED: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR)
"""What kernels and file systems say that lack O_TMPFILE or O_DIRECT."""
ADVICE: Final = {
    errno.ENOENT: "name a folder that exists",
    errno.ENOTDIR: "name a folder",
    errno.EACCES: "name a folder that you may write to",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.ENOSPC: "free space there, or name a folder on another disk",
    errno.EDQUOT: "free some of your quota there, or name a folder on another disk",
    errno.EIO: "check the disk, or name a folder on another one",
}
OTHERWISE: Final = "name a folder on another disk"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a request: bytes of the file, and where they lie in memory, just so or as rows of another stride."""

    offset: int
    nbytes: int
    memory: Bytes
    stride: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request on its way: rows and panels that it reads or writes, until its futures are done."""

    region: PageRegion
    rows: range
    panels: range
    writes: bool
    futures: list[Future[None]] = field(default_factory=list)

    def meets(self, other: Ticket) -> bool:
        """Return whether both touch the same bytes, and one of them writes."""
        if not (self.writes or other.writes):
            return False
        if self.region is other.region:
            return _overlap(self.rows, other.rows) and _overlap(self.panels, other.panels)
        return self.region.offset < other.region.end and other.region.offset < self.region.end

    @property
    def succeeded(self) -> bool:
        return all(future.done() and future.exception() is None for future in self.futures)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@final
class PageFile:
    """A temporary file of `plan.nbytes` without a name: nothing is left behind, however the process ends.

    name: of a file in the folder that stays instead, with what it held, if one is there; it is locked.

    For one thread. A request returns at once, and its tensor belongs to it until `wait`; requests for the same bytes are
    carried out in the order in which they were made. Rows that are asked for start at a multiple of WINDOW_ROWS and end
    at one or with the last row. Tensors have the type and columns of the matrix on disk (V rows, C columns) and unit
    stride within rows; the padding of their rows up to the leading dimension is theirs, and may be overwritten.

    Where a tensor starts at a page and has the leading dimension of the panel on disk, bytes move straight between both.
    Others pass through a piece of `staging` (`plan.staging_bytes`, at a page) and are copied by the thread.

    Raises: PlanError if the folder has too little space or cannot be written, or another process has the named file.
    """

    def __init__(self, folder: Path, plan: PagePlan, staging: Tensor, name: str = "") -> None:
        self._folder = folder
        self._regions = {region.spec.name: region for region in plan.regions}
        pieces = staging[: plan.staging_bytes].numpy().reshape(2 * THREADS, -1)
        self._staging: SimpleQueue[Bytes] = SimpleQueue()
        for piece in pieces:
            self._staging.put(piece)
        nbytes = max(plan.nbytes, PAGE_BYTES)
        self.continues: bool = bool(name) and _size(folder / name) == nbytes
        """Whether the named file was there, as large as planned."""
        self._file, direct = _opened(folder, nbytes, name)
        self.direct: bool = direct
        """Whether reads and writes leave the page cache alone."""
        self._readers = ThreadPoolExecutor(THREADS, "mggcn-reads")
        self._writers = ThreadPoolExecutor(THREADS, "mggcn-writes")
        # One thread of each moves bytes while the other copies: calls at once, of one direction, are slower (THREADS).
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._pending: list[Ticket] = []
        self.bytes_read: int = 0
        self.bytes_written: int = 0
        """Bytes of all requests, as `window_bytes` and `panel_bytes` count them."""
        self.waited_s: float = 0.0
        """Seconds that `wait` has taken."""

    def read_rows(self, name: str, first: int, count: int, out: Tensor) -> Ticket:
        """Read rows first .. first + count - 1 of all panels into out (count, C)."""
        return self._move_rows(name, first, count, out, writes=False)

    def write_rows(self, name: str, first: int, count: int, tensor: Tensor) -> Ticket:
        """Write tensor (count, C) to rows first .. first + count - 1 of all panels."""
        return self._move_rows(name, first, count, tensor, writes=True)

    def read_panel(self, name: str, panel: int, out: Tensor) -> Ticket:
        """Read a panel into out (V, columns of the panel)."""
        return self._move_panel(name, panel, out, writes=False)

    def write_panel(self, name: str, panel: int, tensor: Tensor) -> Ticket:
        """Write tensor (V, columns of the panel) to a panel."""
        return self._move_panel(name, panel, tensor, writes=True)

    def wait(self, ticket: Ticket) -> None:
        """Return when a request is done. Raises: TrainError if the disk failed it, or an earlier one of the same bytes."""
        begin = time.perf_counter()
        try:
            for future in ticket.futures:
                future.result()
        except OSError as error:
            todo = ADVICE.get(error.errno or 0, OTHERWISE)
            verb = "written to" if ticket.writes else "read from"
            raise TrainError(
                f"{ticket.region.spec.name} could not be {verb} the page file in {self._folder}: {reason(error)}; "
                f"{todo}, and resume"
            ) from error
        finally:
            self.waited_s += time.perf_counter() - begin

    def settle(self) -> None:
        """Return when no request is on its way, and forget those that failed: their memory is the caller's again."""
        for future in [future for ticket in self._pending for future in ticket.futures]:
            future.exception()
        self._pending = []

    def sync(self) -> None:
        """Return when what was written, and waited for, outlives a power failure. Raises: OSError."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Give the disk space back. Requests that have not begun never do."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self._file.close()

    def _move_rows(self, name: str, first: int, count: int, tensor: Tensor, *, writes: bool) -> Ticket:
        region = self._regions[name]
        spec, rows = region.spec, range(first, first + count)
        if first % WINDOW_ROWS or (count % WINDOW_ROWS and rows.stop != spec.rows) or rows.stop > spec.rows:
            raise PlanError(
                f"rows of {name} on disk move in windows of {WINDOW_ROWS}, got rows {first} to {rows.stop} of {spec.rows}"
            )
        return self._move(Ticket(region, rows, range(spec.panels), writes), tensor)

    def _move_panel(self, name: str, panel: int, tensor: Tensor, *, writes: bool) -> Ticket:
        region = self._regions[name]
        return self._move(Ticket(region, range(region.spec.rows), range(panel, panel + 1), writes), tensor)

    def _move(self, ticket: Ticket, tensor: Tensor) -> Ticket:
        """Hand the pieces of a request to the threads.

        A thread that waits for an earlier request holds up the later ones of its queue, never an earlier one: both queues
        are in the order of requests, so the earliest that is not done can always go on.
        """
        _require_like(ticket, tensor)
        self._pending = [other for other in self._pending if not other.succeeded]
        before = [future for other in self._pending if other.meets(ticket) for future in other.futures]
        pool, moved = self._writers if ticket.writes else self._readers, 0
        for piece in _pieces(ticket, tensor):
            ticket.futures.append(pool.submit(self._carry, piece, before, writes=ticket.writes))
            moved += piece.nbytes
        self._pending.append(ticket)
        if ticket.writes:
            self.bytes_written += moved
        else:
            self.bytes_read += moved
        return ticket

    def _carry(self, piece: _Piece, before: Sequence[Future[None]], *, writes: bool) -> None:
        """Move a piece once earlier requests are done; what the threads do."""
        for future in before:
            future.result()
        if not piece.stride:
            self._transfer(piece.memory, piece.offset, writes=writes)
            return
        staging = self._staging.get()
        try:
            rows = _rows_in(staging, piece)
            if writes:
                rows[:] = piece.memory
            self._transfer(staging[: piece.nbytes], piece.offset, writes=writes)
            if not writes:
                piece.memory[:] = rows
        finally:
            self._staging.put(staging)

    def _transfer(self, memory: Bytes, offset: int, *, writes: bool) -> None:
        """Read or write all of `memory`, however little the system does at a time."""
        call, alone = (os.pwritev, self._writing) if writes else (os.preadv, self._reading)
        descriptor, done = self._file.fileno(), 0
        with alone:
            while done < memory.size:
                moved = call(descriptor, [memory[done:].data], offset + done)
                if not moved:
                    raise OSError(errno.EIO, "the file ends early")
                done += moved
            if not self.direct:
                # The first call begins to write changed pages, and leaves them; the call for the next piece drops them.
                behind = max(0, offset - PIECE_BYTES)
                os.posix_fadvise(descriptor, behind, offset + done - behind, os.POSIX_FADV_DONTNEED)


def _rows_in(staging: Bytes, piece: _Piece) -> Bytes:
    """Return the rows of a piece in a staging buffer, without their padding."""
    rows, width = piece.memory.shape
    return staging[: piece.nbytes].reshape(-1, piece.stride)[:rows, :width]


def _require_like(ticket: Ticket, tensor: Tensor) -> None:
    """Refuse a tensor of another shape or type than what a request moves. Raises: PlanError."""
    spec = ticket.region.spec
    expected = len(ticket.rows), sum(len(spec.columns(k)) for k in ticket.panels)
    if tensor.shape != expected or tensor.dtype != DTYPES[spec.dtype] or tensor.stride(1) != 1:
        raise PlanError(
            f"{spec.name} on disk: expected {expected[0]} rows of {expected[1]} neighbouring numbers of {spec.dtype}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
        )


def _pieces(ticket: Ticket, tensor: Tensor) -> Iterator[_Piece]:
    """Cut a request into pieces, panel by panel."""
    spec = ticket.region.spec
    left = spec.columns(ticket.panels.start).start
    for panel in ticket.panels:
        columns = spec.columns(panel)
        start = ticket.region.offset + spec.start(panel) + ticket.rows.start * spec.stride(panel)
        yield from _panel_pieces(spec, panel, start, tensor[:, columns.start - left : columns.stop - left])


def _panel_pieces(spec: PageSpec, panel: int, start: int, tensor: Tensor) -> Iterator[_Piece]:
    """Cut rows of a panel, which start at a byte of the file, into pieces: straight ones, then such as are copied."""
    stride, step = spec.stride(panel), spec.piece_rows(panel)
    straight = _straight_rows(tensor, stride)
    flat = tensor.as_strided((straight * tensor.stride(0),), (1,)).view(torch.uint8).numpy()
    for row in range(0, straight, step):
        memory = flat[row * stride : min(row + step, straight) * stride]
        yield _Piece(start + row * stride, memory.size, memory, 0)
    rows = tensor.view(torch.uint8).numpy()
    for row in range(straight, tensor.shape[0], step):
        memory = rows[row : row + step]
        yield _Piece(start + row * stride, -(-len(memory) // WINDOW_ROWS) * WINDOW_ROWS * stride, memory, stride)


def _straight_rows(tensor: Tensor, stride: int) -> int:
    """Return how many rows lie in memory as on disk, at a page: none, or all whole windows."""
    rows = tensor.shape[0] // WINDOW_ROWS * WINDOW_ROWS
    end = (tensor.storage_offset() + rows * tensor.stride(0)) * tensor.itemsize
    alike = tensor.stride(0) * tensor.itemsize == stride and tensor.data_ptr() % PAGE_BYTES == 0
    return rows if alike and end <= tensor.untyped_storage().nbytes() else 0


def _opened(folder: Path, nbytes: int, name: str = "") -> tuple[io.FileIO, bool]:
    """Open a new file without a name, or the named one, whose space is reserved; also return `_set_direct`'s.

    Raises: PlanError.
    """
    with _refusing(folder, nbytes, "page file"):
        file = _reserved(folder, nbytes, name)
        try:
            return file, _set_direct(file.fileno())
        except OSError:
            file.close()
            raise


def mapped_arrays(folder: Path) -> MakeArray:
    """Return what makes arrays in files of a folder that have no name: the system takes their pages back as it needs.

    Raises, when it makes one: PlanError if the folder has too little space or cannot be written.
    """

    def make(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nbytes = count * np.dtype(dtype).itemsize
        if not nbytes:
            return np.empty(count, dtype)
        with _refusing(folder, nbytes, "file of edges"), _reserved(folder, nbytes) as file:
            memory = mmap.mmap(file.fileno(), nbytes)
        memory.madvise(mmap.MADV_SEQUENTIAL)  # products read edges in order
        return np.frombuffer(memory, dtype)

    return make


@contextlib.contextmanager
def _refusing(folder: Path, nbytes: int, what: str) -> Iterator[None]:
    """Turn what the system says inside into what to do. Raises: PlanError."""
    try:
        yield
    except OSError as error:
        todo = ADVICE.get(error.errno or 0, OTHERWISE)
        raise PlanError(f"no {what} of {human(nbytes)} can be made in {folder}: {reason(error)}; {todo}") from error


def _reserved(folder: Path, nbytes: int, name: str = "") -> io.FileIO:
    """Open a new file without a name, or the named one, whose space is reserved. Raises: OSError, PlanError."""
    free = shutil.disk_usage(folder).free + (_size(folder / name) if name else 0)
    if nbytes > free:
        raise PlanError(
            f"values on disk need {human(nbytes)} in {folder}, {human(free)} are free; {ADVICE[errno.ENOSPC]}"
        )
    file = _named(folder / name, nbytes) if name else _unnamed(folder)
    try:
        reserve(file.fileno(), nbytes)
        os.ftruncate(file.fileno(), nbytes)  # where nothing can be reserved
    except OSError:
        file.close()
        raise
    return file


def _size(path: Path) -> int:
    """Return the bytes that a file occupies, 0 if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return min(found.st_size, 512 * found.st_blocks)


def _named(path: Path, nbytes: int) -> io.FileIO:
    """Open a file that stays, as long as planned, and keep other processes out of it. Raises: OSError, PlanError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise PlanError(f"another process is at work in {path}; wait for its end") from None
    except OSError:
        pass  # a file system without locks
    if path.stat().st_size > nbytes:
        os.truncate(descriptor, nbytes)
    return file


def _unnamed(folder: Path) -> io.FileIO:
    """Open a new file that is in no folder, or in none from now on."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        descriptor, path = tempfile.mkstemp(prefix="mggcn-pages-", dir=folder)
        Path(path).unlink()
    return os.fdopen(descriptor, "r+b", buffering=0)


def _set_direct(descriptor: int) -> bool:
    """Have a file, not empty, bypass the page cache; return whether it does."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [allocate(PAGE_BYTES).numpy().data], 0)  # some refuse the first read instead
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True
