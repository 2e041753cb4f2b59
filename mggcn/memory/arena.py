"""Buffers with live ranges, packed into one arena: the memory of an epoch, known to the byte before it runs."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mggcn.blocks.block import RowSet
from mggcn.errors import PlanError

ALIGNMENT = 64
"""Bytes: rows and buffers start on cache lines."""
OPERAND_ALIGNMENT = 16
"""Rows of converted weights are padded to multiples of this many bytes: without padding, odd widths get a GPU's slowest
dense products."""
ITEM_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8, "int64": 8}


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A matrix of the arena. lifetime: kept (from forward to backward), scratch (within neighbours) or state (always).

    row_set: whose rows it has, as many as a step has of them, at most `rows`; None: always `rows`.
    """

    name: str
    rows: int
    cols: int
    dtype: str
    lifetime: str = "scratch"
    row_set: RowSet | None = field(default=None, kw_only=True)

    @property
    def ld(self) -> int:
        """Leading dimension in elements: rows are padded to 64 bytes."""
        step = ALIGNMENT // ITEM_BYTES[self.dtype]
        return -(-self.cols // step) * step

    @property
    def nbytes(self) -> int:
        return self.rows * self.ld * ITEM_BYTES[self.dtype]


def operand_stride(cols: int, item: int) -> int:
    """Return the elements from row to row of a matrix of weights that products read, padded to 16-byte loads."""
    step = OPERAND_ALIGNMENT // item
    return -(-cols // step) * step


def operand_nbytes(rows: int, cols: int, item: int) -> int:
    """Return the bytes of a matrix of weights that products read, up to the place where the next may start."""
    return -(-rows * operand_stride(cols, item) * item // ALIGNMENT) * ALIGNMENT


class Use(Protocol):
    """An op as memory planning sees it: the buffers that it reads and writes."""

    @property
    def label(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A buffer's place: live from op `first` to op `last`, both included; byte offset in the arena."""

    spec: BufferSpec
    first: int
    last: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """All placements of one program and the bytes that its arena needs."""

    placements: tuple[Placement, ...]
    nbytes: int

    @property
    def busiest(self) -> int:
        """Bytes of the buffers that live at once, at most: no arena is smaller."""
        starts = {placed.first for placed in self.placements}
        return max((sum(p.spec.nbytes for p in self.placements if p.first <= at <= p.last) for at in starts), default=0)

    def __getitem__(self, name: str) -> Placement:
        return next(p for p in self.placements if p.spec.name == name)


def live_ranges(buffers: Iterable[BufferSpec], uses: Sequence[Use], outside: Container[str] = ()) -> list[Placement]:
    """Return every buffer with its first and last op, at offset 0. outside: names of buffers in other memory.

    Raises: PlanError if an op names an unknown buffer, a buffer is never used, or one is read before it is written.
    """
    specs = {b.name: b for b in buffers}
    ranges: dict[str, tuple[int, int]] = {}
    for index, use in enumerate(uses):
        for name in (*use.reads, *use.writes):
            if name in outside:
                continue
            if name not in specs:
                raise PlanError(f"op {use.label!r} uses the buffer {name!r}, which nothing declares")
            if name not in ranges and name in use.reads:
                raise PlanError(f"op {use.label!r} reads the buffer {name!r} before anything writes it")
            ranges[name] = (ranges.get(name, (index, index))[0], index)
    for name in specs:
        if name not in ranges:
            raise PlanError(f"the buffer {name!r} is declared but no op uses it")
    whole = (0, max(len(uses) - 1, 0))
    return [Placement(s, *(whole if s.lifetime == "state" else ranges[n]), 0) for n, s in specs.items()]


def place(buffers: Iterable[BufferSpec], uses: Sequence[Use], outside: Container[str] = ()) -> ArenaPlan:
    """Give every buffer an offset such that buffers that live at the same time never overlap. outside: as `live_ranges`.

    Cost: as `pack`. Raises: PlanError as live_ranges.
    """
    return pack(live_ranges(buffers, uses, outside))


def pack(ranges: Sequence[Placement]) -> ArenaPlan:
    """Give every buffer of known live range an offset, whatever it had.

    Greedy first fit in three orders (size, length of life, start), the smallest arena wins; deterministic.
    Cost: O(B^2) for B buffers.
    """
    orders: tuple[Callable[[Placement], tuple[int, ...]], ...] = (
        lambda p: (-p.spec.nbytes, p.first),
        lambda p: (p.first - p.last, -p.spec.nbytes, p.first),
        lambda p: (p.first, -p.spec.nbytes),
    )
    plans = [_first_fit(sorted(ranges, key=order)) for order in orders]
    return min(plans, key=lambda plan: plan.nbytes)


def _first_fit(ranges: Sequence[Placement]) -> ArenaPlan:
    """Place each buffer at the lowest offset where it meets no placed one."""
    placed: list[Placement] = []
    # Their offsets, ends and live ranges, the lowest first.
    taken: list[tuple[int, int, int, int]] = []
    for item in ranges:
        offset, nbytes = 0, item.spec.nbytes
        for start, end, first, last in taken:
            if first <= item.last and item.first <= last:
                if offset + nbytes <= start:
                    break
                offset = max(offset, end)
        placed.append(Placement(item.spec, item.first, item.last, offset))
        bisect.insort(taken, (offset, offset + nbytes, item.first, item.last), key=lambda place: place[0])
    return ArenaPlan(tuple(placed), max((end for _, end, _, _ in taken), default=0))
