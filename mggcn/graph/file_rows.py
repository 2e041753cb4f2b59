"""One `.npy` file read by row ranges with ordinary reads: pages of a memmap would count as resident memory."""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from mggcn.errors import StoreError
from mggcn.files import NamedFile, open_file
from mggcn.graph.csr import Array, ArrayRows
from mggcn.graph.digests import CheckedFile, FileState, file_state, open_again, read_exactly
from mggcn.host import machine_memory


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of an `.npy` file: the header is parsed once, data are read on demand. Nothing is ever unpickled."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    """Byte at which the data start."""
    checked: CheckedFile | None = field(default=None, compare=False, repr=False, kw_only=True)
    """Compares every block with its digest when it is first read; None: there are none, or they were compared."""
    opened: FileState | None = field(default=None, compare=False, repr=False, kw_only=True)
    """What every later look at the file must find; None: anything, as while it is still being written."""

    @classmethod
    def open(cls, path: Path, *, one_row: bool = False, digests: tuple[int, bytes] | None = None) -> FileRows:
        """Parse the header and compare it with the size of the file; `one_row` presents a vector [n] as [1, n].

        digests: bytes of a block and the digests of all blocks, as `stored_digests` gives them.
        Cost: one read of some hundred bytes.
        Raises: StoreError if the file is missing, no plain C-ordered `.npy`, pickled, cut short or too long.
        """
        try:
            with open_file(path) as file:
                shape, dtype = _read_header(file, path)
                offset = file.tell()
                opened = file_state(file)
        except OSError as error:
            raise StoreError(
                f"expected a readable .npy file {path}: {error.strerror}; prepare the graph again"
            ) from error
        size = opened[2]
        expected = offset + math.prod(shape) * dtype.itemsize
        if size != expected:
            raise StoreError(
                f"{path} has {size} bytes, its header announces {expected} ({dtype} {shape}); "
                "the file is damaged or was not written to the end: copy or prepare it again"
            )
        checked = None if digests is None else CheckedFile(path, size, *digests)
        return cls(
            path, (1, *shape) if one_row and len(shape) == 1 else shape, dtype, offset, checked=checked, opened=opened
        )

    def _open(self) -> FileIO:
        """Open the file unbuffered: large reads go straight into the array. Raises: StoreError if it is another one now."""
        return NamedFile(self.path) if self.opened is None else open_again(self.path, self.opened)

    def read(self, start: int, stop: int) -> Array:
        first, last, _ = slice(start, stop).indices(self.shape[0])
        out = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        if out.nbytes == 0:
            return out
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        view, begin = out.reshape(-1).view(np.uint8).data, self.offset + first * row_bytes
        with self._open() as file:
            if self.checked is None:
                read_exactly(file, begin, view, self.path)
            else:
                self.checked.read_into(file, begin, view)
        return out

    def array(self) -> Array:
        return np.asarray(self._mapped())  # NumPy's class for maps runs Python in every operation, also on rows of it

    def _mapped(self) -> np.memmap[Any, Any]:
        with self._open() as file:
            if self.checked is not None:
                self.checked.check(file)
            return np.memmap(file, self.dtype, "r", self.offset, self.shape)

    copied = False

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        return self.in_place().take(ids)

    def in_place(self) -> ArrayRows:
        """Return the rows for reading them by number. Of a file that memory cannot hold, a page is read for each, not the
        128 KiB around it, which would push out what is read again.
        """
        mapped, memory = self._mapped(), machine_memory()
        if memory is not None and mapped.nbytes > memory.available and hasattr(mmap, "MADV_RANDOM"):
            cast("mmap.mmap", mapped.base).madvise(mmap.MADV_RANDOM)
        return ArrayRows(np.asarray(mapped))

    def check_start(self) -> None:
        """Compare the block that has the header, where it was not compared yet. Raises: StoreError."""
        if self.checked is not None:
            with self._open() as file:
                self.checked.check_start(file)


def read_ahead(array: Array, first: int, last: int) -> None:
    """Have the system read rows [first, last) of an array in a mapped file together; of one in memory nothing."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or last <= first or not hasattr(mmap, "MADV_WILLNEED"):
        return
    begin = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data + first * array.strides[0]
    start = begin - begin % mmap.PAGESIZE
    base.madvise(mmap.MADV_WILLNEED, start, begin + (last - first) * array.strides[0] - start)


def _read_header(file: BinaryIO, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header of Python 2, and of what is in a hostile one
            if version == (1, 0):
                shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            elif version == (2, 0):
                shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(file)
            else:
                raise ValueError(f"format version {version}")
    except OSError:
        raise
    except Exception as error:  # NumPy tokenizes and evaluates the text of a header: a hostile one raises anything
        raise StoreError(
            f"expected a plain .npy file, {path} is not one ({str(error)[:200]}); write it with numpy.save"
        ) from error
    if dtype.hasobject or dtype.fields is not None:
        raise StoreError(
            f"{path} holds pickled or structured data ({dtype}), which mggcn never loads because it can execute code; "
            "save a plain numeric array"
        )
    if min(shape, default=0) < 0 or not shape:
        raise StoreError(f"{path}: expected an array of one or two dimensions, got shape {shape}; save it again")
    if fortran_order and sum(extent > 1 for extent in shape) > 1:
        raise StoreError(f"{path} is stored by columns; save numpy.ascontiguousarray(array) instead")
    return shape, dtype
