"""Measures what the choices of kernels need to know of this machine, by the kernels themselves. Needs no torch.

The least of a few short calls counts: what the machine does when nothing else runs on it. All threads of a rank work at
once on one operand, so that what they share, with other programs too, is what they get.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.backend.cpu.figures import ASSUMED, DenseRate, DenseShape, Figures
from mggcn.backend.cpu.sizes import gemm_sizes
from mggcn.backend.cpu.structs import GemmArgs, ProductArgs
from mggcn.backend.cpu.variants import PAIRED, ahead_of

FOOTPRINTS: Final = tuple(2**k for k in (18, 20, 22, 23, 24, 25, 26, 28))
"""Bytes of the operands, as far as the free memory allows."""
WIDTHS: Final = (64, 256, 1024)
"""Bytes of the gathered rows."""
CACHED: Final = 2**26
"""Operands up to here are read in order before: the caches then hold of them what they can."""
BF16_WIDTH: Final = 256
DEGREE: Final = 32
"""Entries of a row of the matrix."""
CHUNK_ROWS: Final = 64
"""Most rows of a chunk, which one thread takes whole."""
CHUNKS: Final = 8
"""Chunks per thread, if there are enough rows, so that tail imbalance is negligible."""
GATHERED: Final = 2**23
"""Bytes that a call of two threads gathers at most; one of more threads as many times as much."""
ENTRIES: Final = 2**15
"""Entries of a call of two threads, at most; with more threads in proportion."""
MOST: Final = 16
"""Times of which calls of many threads are larger at most: 32 threads and more share what 32 have."""
CALLS: Final = 3
ALIKE: Final = 0.02
"""Two calls that differ by no more than this share need no third."""
ENOUGH_S: Final = 0.2
"""Seconds after which every figure is measured by one call: something else runs here."""
ENOUGH_SHARE: Final = 0.5
NEEDED: Final = 6
"""Footprints that are measured however long it takes: a system may need a second to find larger memory."""
COPIED: Final = tuple(2**k for k in (20, 24, 27))
PACKED: Final = 2**24
DENSE: Final = (4096, 128, 128)
"""Rows and widths of the dense products."""
SEED: Final = 271828
_KINDS: Final = {2: "bf16", 4: "f32", 8: "f64"}
_TYPES: Final = {2: "bf16", 4: "fp32", 8: "fp64"}


def measure(threads: int, isa: str, dense: tuple[str, ...], free_bytes: int) -> Figures:
    """Measure this machine with this many threads. Cost: at most 0.3 s on two cores, an eighth of `free_bytes`.

    isa: instruction set of the sparse products; dense: those of the dense ones that may be chosen from. Where others leave
    the threads less than ENOUGH_SHARE of the time, what calls take is not the kernels': assumed figures are returned, once
    ENOUGH_S are spent.
    """
    footprints = [size for size in FOOTPRINTS if size <= free_bytes // 8] or list(FOOTPRINTS[:2])
    measuring = _Measuring(threads, isa, footprints)
    try:
        figures = measuring.figures(dense)
    except _TooBusyError:
        return ASSUMED
    return figures if measuring.share >= ENOUGH_SHARE else ASSUMED


class _TooBusyError(Exception):
    """Others have the cores: what is left to measure would say nothing."""


class _Measuring:
    """The operand, as large as the largest footprint, and the columns of which calls take others in turn."""

    def __init__(self, threads: int, isa: str, footprints: list[int]) -> None:
        self._threads, self._isa, self._footprints = threads, isa, footprints
        self._larger = min(max(threads // 2, 1), MOST)
        self._memory = _mapped(max(footprints[-1], 2 * 8 * DENSE[0] * max(DENSE[1:])))
        self._columns = np.random.default_rng(SEED).integers(0, 2**31, 2**20, dtype=np.uint32)
        self._out = _allocate(self._larger * ENTRIES // 2 * WIDTHS[0] * 2)
        self._at = 0
        self._began = time.perf_counter()
        self._called_s = self._worked_s = 0.0

    def figures(self, dense: tuple[str, ...]) -> Figures:
        plain: dict[int, list[float]] = {width: [] for width in WIDTHS}
        ahead: dict[int, list[float]] = {width: [] for width in WIDTHS}
        bf16 = []
        touched = 0
        for number, footprint in enumerate(self._footprints):
            if number >= NEEDED and self._late:
                del self._footprints[number:]
                break
            _touch(self._memory[touched:footprint])
            touched = footprint
            if footprint <= CACHED:
                self._pass_over(footprint)
            for width in WIDTHS:
                plain[width].append(self._entry_s(footprint, width))
                ahead[width].append(self._entry_s(footprint, width, ahead=ahead_of(width)))
            narrow = self._entry_s(footprint, BF16_WIDTH, item=2)
            bf16.append(narrow / plain[BF16_WIDTH][-1])
        few, many = (self._gather(WIDTHS[0], self._footprints[0], degree) for degree in (2, DEGREE))
        row_s = max((few - many) / (1 / 2 - 1 / DEGREE), 0.1 * few)
        return Figures(
            footprints=tuple(self._footprints),
            widths=WIDTHS,
            plain_s=_rising(plain, row_s),
            ahead_s=_rising(ahead, row_s),
            bf16=tuple(min(max(ratio, 0.5), 4.0) for ratio in bf16),
            row_s=row_s,
            block_s=self._block_s(row_s),
            pack_s=(self._pack_s(WIDTHS[0]), self._pack_s(2 * WIDTHS[0])),
            copy=tuple((size, self._copy_rate(size)) for size in COPIED if size <= touched),
            dense=tuple(self._dense(dense)),
        )

    @property
    def _late(self) -> bool:
        return time.perf_counter() - self._began > ENOUGH_S

    @property
    def share(self) -> float:
        """The part of the time of all calls for which the threads worked; the others had the cores for the rest."""
        return self._worked_s / (self._threads * max(self._called_s, 1e-9))

    def _pass_over(self, footprint: int) -> None:
        """Read an operand in order."""
        width = WIDTHS[-1]
        rows = footprint // width
        self._multiply(np.arange(rows, dtype=np.int32), width, 4, DEGREE, 0)

    def _entry_s(self, footprint: int, width: int, item: int = 4, ahead: int = 0) -> float:
        return self._gather(width, footprint, DEGREE, item, ahead)

    def _gather(self, width: int, footprint: int, degree: int, item: int = 4, ahead: int = 0) -> float:
        """Seconds of an entry, rows at random, other ones in each call; of a call that is long enough to be seen."""
        entries = self._larger * min(ENTRIES, GATHERED // width) // degree * degree
        mask = np.uint32(footprint // width - 1)

        def call() -> float:
            if self._at + entries > self._columns.size:
                self._at = 0
            columns = (self._columns[self._at : self._at + entries] & mask).astype(np.int32)
            self._at += entries
            return self._multiply(columns, width, item, degree, ahead)

        return self._least(call) / entries

    def _seconds(self, function: Callable[[], None]) -> float:
        """Seconds of a call of all threads."""
        began, worked = time.perf_counter(), time.process_time()
        function()
        seconds = time.perf_counter() - began
        self._called_s += seconds
        self._worked_s += time.process_time() - worked
        return seconds

    def _least(self, call: Callable[[], float]) -> float:
        """The least seconds of some calls: what the machine does when nothing else runs on it."""
        found, tries = call(), 1
        while tries < CALLS and not self._late:
            again, tries = call(), tries + 1
            if abs(again - found) <= ALIKE * found:
                tries = CALLS
            found = min(found, again)
        if self._late and self.share < ENOUGH_SHARE:
            raise _TooBusyError
        return found

    def _multiply(self, columns: npt.NDArray[np.int32], width: int, item: int, degree: int, ahead: int) -> float:
        """Seconds of a sparse product with rows of `degree` entries each."""
        indptr = np.arange(0, columns.size + 1, degree, dtype=np.int64)
        return self._product(indptr, columns, width, item, ahead=ahead)

    def _product(
        self,
        indptr: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int32],
        width: int,
        item: int,
        *,
        inner: int = 0,
        panel: int = 0,
        ahead: int = 0,
        blocks: int = 1,
    ) -> float:
        rows = indptr.size - 1
        step = min(max(rows // (CHUNKS * self._threads), 1), CHUNK_ROWS)
        chunks = np.append(np.arange(0, rows, step), rows).astype(np.int64)
        packed = _allocate(inner * panel * item) if panel else None
        following = np.zeros(rows, np.int64)
        args = ProductArgs(
            num_chunks=chunks.size - 1,
            chunks=chunks.ctypes.data,
            indptr=indptr.ctypes.data,
            indices=columns.ctypes.data,
            dense=self._memory.ctypes.data,
            out=self._out.ctypes.data,
            packed=None if packed is None else packed.ctypes.data,
            next=following.ctypes.data if blocks > 1 else None,
            ld_dense=width // item,
            ld_out=width // item,
            inner=inner,
            cols=width // item,
            hub=2**40,
            panel=panel or width // item,
            blocks=blocks,
            ahead=ahead,
            threads=self._threads,
        )
        kernel = native.kernel("mggcn_spmm_", _KINDS[item], self._isa)
        return self._seconds(lambda: kernel(ctypes.byref(args)))

    def _block_s(self, row_s: float) -> float:
        """Seconds that a line of an entry takes longer in blocks, of rows so long that their beginnings hardly count."""
        width, blocks, degree = BF16_WIDTH, 4, 256
        inner, entries = self._footprints[1] // width, self._larger * ENTRIES
        rows = entries // degree
        columns = np.sort((self._columns[:entries] % np.uint32(inner)).astype(np.int32).reshape(rows, degree)).ravel()
        indptr = np.arange(0, entries + 1, degree, dtype=np.int64)
        whole, cut = (
            self._least(partial(self._product, indptr, columns, width, 4, inner=inner, blocks=count))
            for count in (1, blocks)
        )
        longer = cut - whole - (blocks - 1) * rows * row_s
        return max(longer, 0.01 * whole) / (entries * width // 64)

    def _pack_s(self, size: int) -> float:
        """Seconds of a line that goes from the operand's rows to panels of `size` bytes: a product of nearly no entries."""
        inner, width = min(PACKED, self._footprints[-1]) // WIDTHS[-1], WIDTHS[-1]
        indptr, columns = np.array([0, 1], np.int64), np.zeros(1, np.int32)

        def packing() -> float:
            return self._product(indptr, columns, width, 4, inner=inner, panel=size // 4)

        return self._least(packing) / (inner * width // 64)

    def _copy_rate(self, size: int) -> float:
        """Bytes per second, read plus written, of a pass between two matrices of together `size` bytes."""
        width = 512
        rows = size // 2 // width
        source, target = self._memory.ctypes.data, self._memory.ctypes.data + size // 2
        nothing = native.EpilogueArgs()
        kernel = native.kernel("mggcn_finish_", "f32", self._isa)

        def copy() -> None:
            kernel(
                source,
                width // 4,
                target,
                width // 4,
                rows,
                width // 4,
                0,
                ctypes.addressof(nothing),
                self._threads,
            )

        return 2 * width * rows / self._least(lambda: self._seconds(copy))

    def _dense(self, kernels: tuple[str, ...]) -> list[DenseRate]:
        """The rates of our kernels by type, instruction set and shape."""
        found = []
        for item, kernel in ((item, kernel) for item in (4, 2, 8) for kernel in kernels if kernel != "baseline"):
            if kernel in PAIRED and item != 2:
                continue
            shapes: tuple[DenseShape, ...] = ("rows", "sums")
            found += [DenseRate(_TYPES[item], kernel, shape, self._dense_rate(item, kernel, shape)) for shape in shapes]
        return found

    def _dense_rate(self, item: int, kernel: str, shape: DenseShape) -> float:
        rows, d, e = DENSE
        real, summed = max(item, 4), shape == "sums"
        m, k = (d, rows) if summed else (rows, d)
        sizes = gemm_sizes(m, k, e, item, real, transposed=summed, tiles=kernel == "amx")
        space = _allocate(sizes.total(self._threads))
        a, b = self._memory.ctypes.data, self._memory.ctypes.data + rows * d * item
        out = _allocate(m * e * real)
        args = GemmArgs(
            a=a,
            b=b,
            out=out.ctypes.data,
            packed=space.ctypes.data,
            own=space.ctypes.data + sizes.packed,
            rows=m,
            inner=k,
            cols=e,
            ld_a=d,
            step_k=e,
            step_n=1,
            ld_out=e,
            ld_own=sizes.own // real,
            segments=sizes.segments,
            total=rows,
            a_t=int(summed),
            threads=self._threads,
        )
        kind = "bf16_f32" if summed and item == 2 else _KINDS[item]
        run = native.kernel("mggcn_gemm_", kind, kernel)
        return 2.0 * rows * d * e / self._least(lambda: self._seconds(lambda: run(ctypes.byref(args))))


def _rising(seconds: dict[int, list[float]], row_s: float) -> tuple[tuple[float, ...], ...]:
    """Entries by width and footprint, without the share of the rows of the result.

    What is larger or wider takes as long at least: one that is above those behind it was disturbed.
    """
    table = np.array(list(seconds.values()))
    visits = np.array([-(-width // 256) for width in seconds])[:, None]
    table = np.maximum(table - row_s * visits / DEGREE, 0.2 * table)
    for axis in (0, 1):
        table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return tuple(tuple(float(f"{x:.4g}") for x in row) for row in table)


def _allocate(nbytes: int) -> npt.NDArray[Any]:
    """Return zeroed bytes of pages that are there."""
    return _touch(_mapped(nbytes))


def _touch(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array[:: mmap.PAGESIZE] = 0
    return array


def _mapped(nbytes: int) -> npt.NDArray[Any]:
    """Return zeroed bytes, in huge pages as buffers of a run."""
    memory = mmap.mmap(-1, max(nbytes, 64), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2**22:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
