"""Choice of the CPU's kernels: pure functions of sizes, types and caches. docs/notes/0012-spmm-cpu.md has the model.

V rows and N columns of the matrix, D columns of the operand.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal

from mggcn.backend.cpu.machine import Caches
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey

LINE = 64
PANELS = (64, 128, 256)
"""Bytes of a packed row: whole cache lines; beyond four, few loads are in flight per line."""
BLOCKS = (2, 4, 8, 16)
"""Ranges of the operand's rows that are timed."""
SHARE = 1 / 3
"""Share of the shared cache that an operand gets; indices, results and other programs take the rest."""
GAIN = 1.1
"""A variant other than whole rows must promise to be faster by this factor."""
LINE_AHEAD, NARROW_AHEAD, WIDE_AHEAD = 64, 32, 16
"""Entries ahead whose rows are fetched early, for rows of one cache line, of two and of more."""
WHOLE_LINES = 4
"""Cache lines of a row that are summed in registers at a time; each time the indices are read again."""

# Nanoseconds of two threads, fitted on an AMD Zen 3 (bench/cpu/ways.py); only their ratios count.
VISIT_NS = 0.3
"""An entry: its index, the address, the loop."""
CACHED_NS = 1.0
"""A line from the shared cache."""
MISSED_NS = 2.7
"""Extra cost of a line from memory; half as much after the first of a long row, which the hardware fetches ahead."""
LONG_LINES = 16
PACKED_NS = 8.0
"""A line that is read from a row of the operand and written to the packed panel."""
ROW_NS = 9.5
"""The begin and end of a row: mispredicted branches, the first loads, the store."""

SEGMENT = 4096
"""Fewest entries of a part of a hub row."""
MAX_PARTS = 512
"""Parts that a matrix of hubs alone is cut into: as many as there are chunks of rows."""


@dataclass(frozen=True, slots=True)
class MatrixTraits:
    """The traits of a sparse matrix on which the choice depends.

    reuse: of growing numbers of consecutive entries, the distinct columns; empty: rows without entries.
    """

    rows: int
    columns: int
    nnz: int
    ascending: bool = True
    reuse: tuple[tuple[int, int], ...] = ()
    empty: int = 0

    def misses(self, capacity: float) -> float:
        """Return how many entries miss a cache of `capacity` rows.

        The working set of consecutive entries grows with their number; where it reaches the capacity, its slope is the
        part of the entries that miss (Denning, "The working set model for program behavior", 1968). Each row misses
        once at least.
        """
        once = min(self.columns, self.nnz)
        if capacity >= self.columns:
            return once
        entries = distinct = 0
        slope = 1.0
        for next_entries, next_distinct in self.reuse:
            slope = (next_distinct - distinct) / (next_entries - entries)
            entries, distinct = next_entries, next_distinct
            if distinct >= capacity:
                break
        return max(once, slope * self.nnz)


def key_of(matrix: MatrixTraits, width: int, item: int, *, summed: bool) -> SpmmKey:
    """Return the key of a product. Arguments as for `choose_spmm`."""
    traits = (matrix.rows, matrix.columns, matrix.nnz, matrix.ascending, matrix.reuse, matrix.empty)
    digest = hashlib.sha256(repr(traits).encode()).hexdigest()[:16]
    return SpmmKey(matrix.rows, matrix.columns, matrix.nnz, width, item, summed, digest)


def hub_length(nnz: int) -> int:
    """Return the most entries of a row that one thread sums; more are cut into parts of at most half as many.

    A function of the matrix alone, since this limit changes the order in which a row is summed.
    """
    return 2 * max(SEGMENT, -(-nnz // MAX_PARTS))


def ahead_of(line_bytes: int, operand_bytes: int, caches: Caches) -> int:
    """Return how many entries ahead rows of `line_bytes` are fetched: none if a core's own cache holds the operand."""
    if operand_bytes <= caches.own_bytes:
        return 0
    return _distance(line_bytes)


@functools.lru_cache(maxsize=512)
def choose_spmm(matrix: MatrixTraits, width: int, item: int, caches: Caches, *, summed: bool = True) -> SpmmChoice:
    """Return the variant that multiplies a matrix by an operand of `width` columns of `item` bytes.

    summed: the result is of the type of sums, so that it can hold those of some of the blocks.
    Cost: a few hundred operations, remembered. Every variant gives the same bits.
    """
    row_bytes = width * item
    operand = matrix.columns * row_bytes
    ahead = ahead_of(row_bytes, operand, caches)
    whole = _whole(matrix, row_bytes, caches)
    if operand <= SHARE * caches.shared_bytes:
        return SpmmChoice(ahead=ahead, reason=f"the operand's {operand} bytes fit the cache")
    best, cost = SpmmChoice(ahead=ahead, reason="neither panels nor blocks promise to be faster"), whole / GAIN
    for size in PANELS:
        packed = matrix.columns * size
        promised = _panels(matrix, row_bytes, size, caches)
        if size < row_bytes and packed <= caches.shared_bytes and promised < cost:
            reason = f"panels of {size} bytes, {packed} in all, promise a factor of {whole / promised:.2f}"
            best, cost = SpmmChoice("panels", size // item, 1, _distance(size), reason), promised
    blocks = -(-operand // int(SHARE * caches.shared_bytes))
    promised = _blocks(matrix, row_bytes, blocks)
    if summed and matrix.ascending and promised < cost:
        reason = f"{blocks} blocks of the operand's rows promise a factor of {whole / promised:.2f}"
        best = SpmmChoice("blocks", 0, blocks, 0, reason)
    return best


def candidates(
    matrix: MatrixTraits, width: int, item: int, caches: Caches, *, summed: bool = True
) -> dict[str, SpmmChoice]:
    """Return the variants that a product allows, by name. Arguments as for `choose_spmm`."""
    row_bytes = width * item
    found = {"rows": SpmmChoice(), "rows ahead": SpmmChoice(ahead=_distance(row_bytes))}
    for size in PANELS:
        if size < row_bytes and matrix.columns * size <= caches.shared_bytes:
            found[f"panels {size} B"] = SpmmChoice("panels", size // item)
            found[f"panels {size} B ahead"] = SpmmChoice("panels", size // item, 1, _distance(size))
    if summed and matrix.ascending:
        found |= {f"{count} blocks": SpmmChoice("blocks", 0, count) for count in BLOCKS if count <= matrix.columns}
    return found


def expected_ns(matrix: MatrixTraits, width: int, item: int, caches: Caches, choice: SpmmChoice) -> float:
    """Return what the model expects of one variant, in nanoseconds; only ratios count. Arguments as for `choose_spmm`.

    Rows cost the same with and without prefetching: the model does not predict which is faster.
    """
    row_bytes = width * item
    if choice.way == "panels":
        return _panels(matrix, row_bytes, choice.panel * item, caches)
    if choice.way == "blocks":
        return _blocks(matrix, row_bytes, choice.blocks)
    return _whole(matrix, row_bytes, caches)


def _distance(line_bytes: int) -> int:
    return {1: LINE_AHEAD, 2: NARROW_AHEAD}.get(_lines(line_bytes), WIDE_AHEAD)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE)


def _misses(matrix: MatrixTraits, row_bytes: int, caches: Caches) -> float:
    return matrix.misses(SHARE * caches.shared_bytes / row_bytes)


def _cached(matrix: MatrixTraits, row_bytes: int) -> float:
    """Nanoseconds if every row of the operand comes from the shared cache."""
    lines = _lines(row_bytes)
    visits = -(-lines // WHOLE_LINES)
    return visits * (matrix.nnz * VISIT_NS + (matrix.rows - matrix.empty) * ROW_NS) + matrix.nnz * lines * CACHED_NS


def _whole(matrix: MatrixTraits, row_bytes: int, caches: Caches) -> float:
    lines = _lines(row_bytes)
    dear = lines - max(0, lines - LONG_LINES) / 2
    return _cached(matrix, row_bytes) + _misses(matrix, row_bytes, caches) * dear * MISSED_NS


def _panels(matrix: MatrixTraits, row_bytes: int, size: int, caches: Caches) -> float:
    """The same as `_whole` for every panel, which packing has already brought into the cache as far as it fits."""
    # Hardware fetches lines in pairs: single ones are read twice.
    packing = matrix.columns * _lines(row_bytes) * PACKED_NS * (2 if size == LINE else 1)
    missed = max(0.0, _misses(matrix, size, caches) - min(matrix.columns, matrix.nnz))
    return packing + -(-row_bytes // size) * (_cached(matrix, size) + missed * _lines(size) * MISSED_NS)


def _blocks(matrix: MatrixTraits, row_bytes: int, blocks: int) -> float:
    """Every row of the operand is fetched once; a row of the result is read and written again in every further block."""
    lines = _lines(row_bytes)
    fetched = matrix.columns * lines * MISSED_NS
    again = (blocks - 1) * (matrix.rows - matrix.empty) * (ROW_NS + 2 * lines * (CACHED_NS + MISSED_NS))
    # Rows are not fetched ahead across the end of a block, which costs a visit of each line more.
    return _cached(matrix, row_bytes) + matrix.nnz * lines * VISIT_NS + fetched + again


GemmVariant = Literal["own", "torch"]
"""Dense products by cpu/gemm.cpp, or by torch in the type of the sums."""


def gemm_variant(isa: str) -> GemmVariant:
    """Return who multiplies; isa: the best instruction set of our dense products that the processor has.

    No product of bfloat16 is left to torch: with AMX, torch 2.13 reads past the end of a left operand's rows, multiplies
    what it finds by zero, which makes NaN of NaN, and allocates memory in every call.
    """
    return "torch" if isa == "baseline" else "own"


def gemm_set(item: int, isa: str, *, slow_pairs: bool) -> str:
    """Return the instruction set that multiplies numbers of `item` bytes, of those up to `isa`.

    slow_pairs: the processor multiplies pairs of bfloat16 at a lower rate than float32, to which it is then widened.
    """
    return "avx512" if slow_pairs and item == 2 and isa == "avx512_bf16" else isa
