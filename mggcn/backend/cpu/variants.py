"""Choice of the CPU's kernels: pure functions of sizes, types and measured figures. bench/notes/0023 has the model.

V rows and N columns of the matrix, D columns of the operand.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mggcn.backend.cpu.figures import ITEMS, LINE, DenseShape, Figures
from mggcn.backend.gather_rates import mean_row_s
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey

PANELS = (64, 128, 256)
"""Bytes of a packed row: whole cache lines; beyond four, few loads are in flight per line."""
BLOCKS = tuple(2**k for k in range(1, 9))
"""Ranges of the operand's rows."""
GAIN = 1.1
"""A variant other than whole rows must promise to be faster by this factor."""
LINE_AHEAD, NARROW_AHEAD, WIDE_AHEAD = 64, 32, 16
"""Entries ahead whose rows are fetched early, for rows of one cache line, of two and of more."""
WHOLE_LINES = 4
"""Cache lines of a row that are summed in registers at a time; each time the indices are read again."""
INDEX_BYTES = 4

SEGMENT = 4096
"""Fewest entries of a part of a hub row."""
MAX_PARTS = 512
"""Parts that a matrix of hubs alone is cut into: as many as there are chunks of rows."""


@dataclass(frozen=True, slots=True)
class MatrixTraits:
    """The traits of a sparse matrix on which the choice depends.

    reuse: of growing numbers of consecutive entries, the distinct columns; empty: rows without entries.
    planned: `distances` where a plan knows them otherwise.
    """

    rows: int
    columns: int
    nnz: int
    ascending: bool = True
    reuse: tuple[tuple[int, int], ...] = ()
    empty: int = 0
    planned: tuple[tuple[int, float], ...] = ()

    @property
    def distances(self) -> tuple[tuple[int, float], ...]:
        """How far apart the uses of a column lie: (most other columns used since, share of the entries), rising.

        The working set of consecutive entries grows with their number; where it reaches a size, its slope is the part of
        the entries that a cache of this size misses (Denning, "The working set model for program behavior", 1968). Each
        column's first use counts as one of the farthest.
        """
        if self.planned:
            return self.planned
        found, entries, distinct, missing = [], 0, 0, 1.0
        once = min(self.columns, self.nnz) / max(self.nnz, 1)
        for next_entries, next_distinct in self.reuse:
            slope = (next_distinct - distinct) / (next_entries - entries)
            slope = max(min(missing, slope), once)
            # A slope is that of the working sets between two sizes: of the one halfway.
            found.append(((distinct + next_distinct) // 2, missing - slope))
            entries, distinct, missing = next_entries, next_distinct, slope
        return (*found, (max(self.columns, distinct), missing))


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


def choose_spmm(matrix: MatrixTraits, width: int, item: int, figures: Figures, *, summed: bool = True) -> SpmmChoice:
    """Return the variant that multiplies a matrix by an operand of `width` columns of `item` bytes.

    summed: the result is of the type of sums, so that it can hold those of some of the blocks.
    Cost: as `costs_of`. Every variant gives the same bits.
    """
    costs = costs_of(matrix, width, item, figures, summed=summed)
    whole = min((choice for choice in costs if choice.way == "rows"), key=costs.__getitem__)
    best = min(costs, key=costs.__getitem__)
    gain = costs[whole] / costs[best] if costs[best] else 1.0  # of a matrix without rows
    if best.way == "rows" or gain < GAIN:
        reason = f"no other variant promises to be faster than in {1e3 * costs[whole]:.2f} ms by a factor of {GAIN:g}"
        return SpmmChoice(ahead=whole.ahead, reason=reason)
    what = {
        "panels": f"panels of {best.panel * item} bytes, {matrix.columns * best.panel * item} in all, promise",
        "blocks": f"{best.blocks} blocks of the operand's rows promise",
    }
    return SpmmChoice(best.way, best.panel, best.blocks, best.ahead, f"{what[best.way]} a factor of {gain:.2f}")


@functools.lru_cache(maxsize=512)
def costs_of(
    matrix: MatrixTraits, width: int, item: int, figures: Figures, *, summed: bool = True
) -> Mapping[SpmmChoice, float]:
    """Return the seconds that the figures predict for every variant that a product allows. Arguments: as `choose_spmm`.

    Cost: some thousand operations, remembered.
    """
    known = candidates(matrix, width, item, figures, summed=summed).values()
    return MappingProxyType({choice: expected_s(matrix, width, item, figures, choice) for choice in known})


def candidates(
    matrix: MatrixTraits, width: int, item: int, figures: Figures, *, summed: bool = True
) -> dict[str, SpmmChoice]:
    """Return the variants that a product allows, by name. Arguments as for `choose_spmm`."""
    row_bytes = width * item
    found = {"rows": SpmmChoice(), "rows ahead": SpmmChoice(ahead=ahead_of(row_bytes))}
    for size in PANELS:
        if size < row_bytes and matrix.columns * size <= figures.near_bytes:
            found[f"panels {size} B"] = SpmmChoice("panels", size // item)
            found[f"panels {size} B ahead"] = SpmmChoice("panels", size // item, 1, ahead_of(size))
    if summed and matrix.ascending:
        found |= {f"{count} blocks": SpmmChoice("blocks", 0, count) for count in BLOCKS if count <= matrix.columns}
    return found


def expected_s(matrix: MatrixTraits, width: int, item: int, figures: Figures, choice: SpmmChoice) -> float:
    """Return the seconds that the figures predict for one variant. Arguments as for `choose_spmm`."""
    row_bytes, filled = width * item, matrix.rows - matrix.empty
    size = choice.panel * item or row_bytes
    passes = -(-row_bytes // size)
    begun = passes * -(-_lines(size) // WHOLE_LINES) * filled * figures.row_s
    streamed: float = passes * matrix.nnz * INDEX_BYTES + matrix.rows * row_bytes
    seconds = passes * matrix.nnz * _entry_s(matrix, size, item, figures, choice)
    if choice.way == "panels":
        seconds += matrix.columns * _lines(row_bytes) * figures.pack_s[size > LINE]
    if choice.way == "blocks":
        # Every row of the operand is fetched from afar once; one of the result is started again, read and written in
        # each further block in which it has entries: if these are anywhere, in so many of them.
        far, near = (figures.entry_s(row_bytes, matrix.columns * row_bytes / n, item) for n in (1, choice.blocks))
        seconds += min(matrix.columns, matrix.nnz) * max(far - near, 0.0)
        seconds += matrix.nnz * _lines(row_bytes) * figures.block_s
        met = choice.blocks * (1.0 - (1.0 - 1.0 / choice.blocks) ** (matrix.nnz / max(filled, 1)))
        begun *= max(met, 1.0)
        streamed += 2 * max(met - 1.0, 0.0) * filled * row_bytes
    return seconds + begun + streamed / figures.copy_rate


def _entry_s(matrix: MatrixTraits, size: int, item: int, figures: Figures, choice: SpmmChoice) -> float:
    """Seconds of an entry, the average over the distances of its column's uses, which blocks shorten."""
    scale, ahead = size / choice.blocks, choice.ahead > 0
    distances = tuple((columns * scale, share) for columns, share in matrix.distances)
    return mean_row_s(
        lambda footprint: figures.entry_s(size, footprint, item, ahead=ahead), matrix.columns * scale, distances
    )


def ahead_of(line_bytes: int) -> int:
    """Return how many entries ahead rows of `line_bytes` are prefetched; 0 for none."""
    return {1: LINE_AHEAD, 2: NARROW_AHEAD}.get(_lines(line_bytes), WIDE_AHEAD)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE)


GemmVariant = Literal["own", "torch"]
"""Dense products by our kernels, or by torch in the type of the sums."""


def gemm_variant(isa: str) -> GemmVariant:
    """Return what multiplies dense matrices: "own" or torch. isa: the best instruction set of mggcn's dense products.

    No product of bfloat16 is left to torch: with AMX, torch 2.13 reads past the end of a left operand's rows, multiplies
    what it finds by zero, which makes NaN of NaN, and allocates memory in every call.
    """
    return "torch" if isa == "baseline" else "own"


def gemm_kernel(figures: Figures, item: int, shape: DenseShape, kernels: Sequence[str]) -> str:
    """Return which of `kernels`, given slowest by design first, multiplies numbers of `item` bytes, as measured.

    First comes the widest that adds products one by one; another one, which may round otherwise, must be measured to be
    faster by OTHER_GAIN than the one that it replaces, so that noise of measurements changes no bits.
    """
    single = [name for name in kernels if name not in PAIRED]
    measured = {r.kernel: r.flop_s for r in figures.dense if (r.dtype, r.shape) == (ITEMS[item], shape)}
    taken = single[-1]
    for name in (*reversed(single), *(name for name in kernels if name in PAIRED)):
        if measured.get(name, 0.0) > OTHER_GAIN * measured.get(taken, math.inf):
            taken = name
    return taken


PAIRED = ("avx512_bf16", "amx")
"""Instruction sets whose dense products differ from those before them in bfloat16 alone."""
OTHER_GAIN = 1.2
