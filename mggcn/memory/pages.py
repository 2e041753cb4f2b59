"""The page file of a rank as a plan sees it: where values lie on disk that memory does not hold, and the bytes that
reading and writing them moves, exactly. Needs no torch.

Values are stored as panels of columns. A panel is row-major, its width padded to 64 bytes and its rows to 64, so whatever
starts at a multiple of 64 rows starts at a multiple of 4096 bytes, as reads and writes without the page cache must.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES, BufferSpec, Placement, pack
from mggcn.memory.units import MIB

PAGE_BYTES: Final = 4096
WINDOW_ROWS: Final = PAGE_BYTES // ALIGNMENT
"""Windows of rows start at multiples of it, and end at one or at the last row."""
PIECE_BYTES: Final = 4 * MIB
"""Bytes that one call of the system moves, about. A virtual disk (two cores, ext4, 6 GiB at a time, O_DIRECT) gave 970 MB/s
to reads of 1 MiB, 1100 of 4 MiB, 1070 of 8 MiB, and 560, 600 and 510 to writes of 1, 4 and 16 MiB."""
THREADS: Final = 2
"""Threads that read, and as many that write: one moves bytes while the other copies. Two reads of 4 MiB at once came to
570 MB/s on that disk, one at a time to 1100, four to 500; writes were the same at any number. A read beside a write came to
460 MB/s together, whoever waited for whom."""


@dataclass(frozen=True, slots=True)
class PageSpec:
    """A matrix (rows, cols) on disk, in panels of `panel_cols` columns each; None: in one of all. The last may be narrower.

    dtype: as BufferSpec has it.
    """

    name: str
    rows: int
    cols: int
    dtype: str
    panel_cols: int | None = None

    @property
    def stored_rows(self) -> int:
        return _window_rows(self.rows)

    @property
    def panels(self) -> int:
        return -(-self.cols // (self.panel_cols or max(self.cols, 1)))

    def columns(self, panel: int) -> range:
        """Return the columns of a panel."""
        width = self.panel_cols or self.cols
        return range(self.cols)[panel * width : (panel + 1) * width]

    def stride(self, panel: int) -> int:
        """Return the bytes from row to row of a panel."""
        return -(-len(self.columns(panel)) * ITEM_BYTES[self.dtype] // ALIGNMENT) * ALIGNMENT

    def start(self, panel: int) -> int:
        """Return the byte at which a panel starts, from the first of the matrix."""
        return panel * self.stride(0) * self.stored_rows

    @property
    def nbytes(self) -> int:
        return window_bytes(self, 0, self.rows)

    def piece_rows(self, panel: int) -> int:
        """Return the rows of a panel that are moved at a time."""
        fitting = PIECE_BYTES // self.stride(panel) // WINDOW_ROWS * WINDOW_ROWS
        return max(WINDOW_ROWS, min(fitting, self.stored_rows))


def _window_rows(count: int) -> int:
    return -(-count // WINDOW_ROWS) * WINDOW_ROWS


def panel_bytes(spec: PageSpec, panel: int) -> int:
    """Return the bytes that reading or writing a panel moves."""
    return spec.stored_rows * spec.stride(panel)


def window_bytes(spec: PageSpec, first: int, count: int) -> int:
    """Return the bytes that reading or writing rows first .. first + count - 1 moves, of all panels."""
    return (_window_rows(first + count) - first) * sum(map(spec.stride, range(spec.panels)))


@dataclass(frozen=True, slots=True)
class PageRegion:
    """A matrix's place: live from stage `first` to stage `last`, both included; byte offset in the page file."""

    spec: PageSpec
    first: int
    last: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class PagePlan:
    """All regions of a rank's page file and the bytes that it needs."""

    regions: tuple[PageRegion, ...]
    nbytes: int

    def __getitem__(self, name: str) -> PageRegion:
        return next(region for region in self.regions if region.spec.name == name)

    @property
    def staging_bytes(self) -> int:
        """Bytes of memory through which the threads move what does not lie in memory as it does on disk: a piece each."""
        specs = [region.spec for region in self.regions]
        pieces = (s.piece_rows(k) * s.stride(k) for s in specs for k in range(s.panels))
        return 2 * THREADS * max(pieces, default=0)


def plan_pages(lives: Iterable[tuple[PageSpec, int, int]]) -> PagePlan:
    """Give every matrix a region: those whose lives do not overlap may share disk. Names differ.

    lives: each matrix with the stages that write it first and read it last. Cost: as `place`.
    """
    found = {spec.name: PageRegion(spec, first, last, 0) for spec, first, last in lives}
    # To `pack`, a matrix is rows of one page each: all ends, and so all offsets, are multiples of a page.
    pages = [
        Placement(BufferSpec(name, r.spec.nbytes // PAGE_BYTES, PAGE_BYTES // 8, "int64"), r.first, r.last, 0)
        for name, r in found.items()
    ]
    packed = pack(pages)
    offsets = {placed.spec.name: placed.offset for placed in packed.placements}
    return PagePlan(
        tuple(PageRegion(r.spec, r.first, r.last, offsets[name]) for name, r in found.items()), packed.nbytes
    )


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second that a disk reads and writes, alone, and of both together while it does both."""

    read: float
    write: float
    both: float

    def seconds(self, bytes_read: int, bytes_written: int) -> float:
        """Return the seconds of moving so many bytes: side by side while there are both, the rest alone."""
        rest = bytes_read - bytes_written
        alone = rest / self.read if rest > 0 else -rest / self.write
        return 2 * min(bytes_read, bytes_written) / self.both + alone
