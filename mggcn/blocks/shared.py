"""A rank's part of a block that ranks share: which rows each rank reads, and the edges of the rank's own rows, in planned
memory.

Every rank draws the blocks of all ranks, so each knows what all the others read and compute, and nothing is sent to agree
on it. Hops count from the seeds outwards. P ranks, E edges of all ranks. Columns are the rows that edges begin at: sources,
on the way back targets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.block import Capacity
from mggcn.blocks.sampler import BatchTooLargeError

Vector = npt.NDArray[Any]


class ShareArgs(ctypes.Structure):
    """`Share` of cpu/shared.cpp."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("columns_of", ctypes.c_void_p),
        ("of_row", ctypes.c_void_p),
        ("of_column", ctypes.c_void_p),
        ("readers", ctypes.c_void_p),
        ("exchanged", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("number", ctypes.c_void_p),
        ("near", ctypes.c_void_p),
        ("far", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("ranks", ctypes.c_int32),
        ("gathered", ctypes.c_int32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePlan:
    """What the memory of a rank's part depends on."""

    capacities: tuple[Capacity, ...]
    """Of each hop on a rank, the one at the seeds first."""
    together: tuple[Capacity, ...]
    """The same of all ranks' rows."""
    exchanged: tuple[bool, ...]
    """Of each hop, whether rows of other ranks are received; else the rank gathers them itself."""
    ranks: int
    transposed: int
    """Number of hops, from the seeds on, whose way back is cut as well."""
    value_bytes: int
    """Bytes of what an edge counts, 0 if all count alike."""

    def directions(self, hop: int) -> tuple[str, ...]:
        """Return the ways on which a hop's edges are cut: forth, and if its rows are exchanged back."""
        return ("", "_t") if self.exchanged[hop] and hop < self.transposed else ("",)

    def edges_by_relation(self) -> Iterator[tuple[int, str, int, int]]:
        """Yield hop, way, the most edges of it, and whether these begin at own rows alone, 1, or at received ones too, 2.

        Both ways of every hop whose way back is read, also where no rows are exchanged.
        """
        for hop, size in enumerate(self.capacities):
            exchanged = self.exchanged[hop]
            for way in ("", "_t") if hop < self.transposed else ("",):
                yield hop, way, size.edges_back if way and exchanged else size.edges, 1 + exchanged

    def arrays(self) -> Iterator[tuple[str, npt.DTypeLike, int]]:
        """Yield the name, type and length of every array; those of a hop end with its number."""
        rows = self.together[-1].sources
        yield "of_row", np.uint16, rows
        # A bit for each rank: of up to 8 a byte, else words of 64.
        yield "readers", np.uint8, rows * (1 if self.ranks <= 8 else 8 * -(-self.ranks // 64))
        yield "number", np.int32, rows
        yield "counts", np.int64, self.ranks * (self.ranks + 4)
        yield "places", np.int64, self.capacities[-1].sources
        yield "ids", np.int64, self.capacities[-1].sources
        yield "entries", np.int32, max(max(size.edges, size.edges_back) for size in self.capacities)
        for hop, size in enumerate(self.capacities):
            for way in self.directions(hop):
                count = size.sources if way else size.targets
                yield f"near{way}{hop}", np.int64, count + 1
                yield f"far{way}{hop}", np.int64, count + 1
                edges = size.edges_back if way else size.edges
                yield f"indices{way}{hop}", np.int32, edges
                yield f"values{way}{hop}", np.uint8, edges * self.value_bytes
                yield f"sent{way}{hop}", np.int32, size.sent_back if way else size.sent

    @property
    def nbytes(self) -> int:
        """The bytes of a part. Cost: none of memory."""
        return sum(np.dtype(dtype).itemsize * count for _, dtype, count in self.arrays())


class Counts(NamedTuple):
    """What each rank has of a block in one direction.

    exchanged int64 (P, P): columns of rank j that rank i reads, 0 for i = j. columns, edges int64 (P,).
    """

    exchanged: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]


class Part(NamedTuple):
    """The edges of a rank's rows, first those from its own columns, then those from columns that it receives.

    near, far int64 (rows + 1,): row pointers of each; indices int32: numbers among the own columns, and among those that
    are received, by rank; entries int32: the place of each among all ranks' edges. sent int32: own columns that
    others receive, in order of these. sent_to, received_from: how many, by rank. num_columns: those that are numbered, but
    for the received ones.
    """

    near: npt.NDArray[np.int64]
    far: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    entries: npt.NDArray[np.int32]
    sent: npt.NDArray[np.int32]
    sent_to: tuple[int, ...]
    received_from: tuple[int, ...]
    num_columns: int


class Share:
    """The memory of a rank's part of one batch, which the next one in it overwrites."""

    def __init__(self, plan: SharePlan, rank: int) -> None:
        self.plan: SharePlan = plan
        self.rank: int = rank
        self.arrays: dict[str, Vector] = {name: np.empty(count, dtype) for name, dtype, count in plan.arrays()}
        counts, ranks = self.arrays["counts"], plan.ranks
        exchanged, rest = counts[: ranks * ranks], counts[ranks * ranks :]
        self._counts = Counts(exchanged.reshape(ranks, ranks), rest[:ranks], rest[ranks : 2 * ranks])

    def _args(self, indptr: Vector, indices: Vector, of_row: Vector, of_column: Vector) -> ShareArgs:
        exchanged, columns, edges = (counts.ctypes.data for counts in self._counts)
        args = ShareArgs(
            indptr=indptr.ctypes.data,
            columns_of=indices.ctypes.data,
            of_row=of_row.ctypes.data,
            of_column=of_column.ctypes.data,
            exchanged=exchanged,
            columns=columns,
            edges=edges,
            next=self.arrays["counts"][-2 * self.plan.ranks :].ctypes.data,
            num_rows=of_row.size,
            num_columns=of_column.size,
            rank=self.rank,
            ranks=self.plan.ranks,
        )
        args.readers, args.number = (self.arrays[name].ctypes.data for name in ("readers", "number"))
        return args

    def count(self, indptr: Vector, indices: Vector, of_row: Vector, of_column: Vector) -> Counts:
        """Count what each rank reads of a block of all ranks; valid until the next call.

        of_row, of_column uint16: the rank of each. Cost: a line of memory an edge, no allocation.
        """
        args = self._args(indptr, indices, of_row, of_column)
        native.kernel("mggcn_share_count")(ctypes.byref(args))
        return self._counts

    def cut(self, hop: int, way: str, indptr: Vector, indices: Vector, of_row: Vector, of_column: Vector) -> Part:
        """Return the edges of the rank's rows of a hop, `way` as in `directions`. Cost: as `count`.

        places of the rows of the hop's columns among those of all ranks are left in arrays["places"], on the way forth: the
        own ones, and if they are not exchanged behind them the others that the rank reads, which then count as own.
        Raises: BatchTooLargeError, on every rank, if the part of any is larger than was planned.
        """
        counts, arrays = self.count(indptr, indices, of_row, of_column), self.arrays
        self._check(hop, way, counts)
        args = self._args(indptr, indices, of_row, of_column)
        for name in ("near", "far", "indices", "sent"):
            setattr(args, name, arrays[f"{name}{way}{hop}"].ctypes.data)
        args.entries, args.places = arrays["entries"].ctypes.data, None if way else arrays["places"].ctypes.data
        args.gathered = int(not self.plan.exchanged[hop])
        native.kernel("mggcn_share_cut")(ctypes.byref(args))
        rows, edges = np.count_nonzero(of_row == self.rank) + 1, int(counts.edges[self.rank])
        near, far = (arrays[f"{name}{way}{hop}"][:rows] for name in ("near", "far"))
        received, sent = (tuple(map(int, of)) for of in (counts.exchanged[self.rank], counts.exchanged[:, self.rank]))
        columns = int(counts.columns[self.rank])
        return Part(
            near,
            far,
            arrays[f"indices{way}{hop}"][:edges],
            arrays["entries"][:edges],
            arrays[f"sent{way}{hop}"][: 0 if args.gathered else sum(sent)],
            sent,
            received,
            columns + sum(received) * args.gathered,
        )

    def _check(self, hop: int, way: str, counts: Counts) -> None:
        size, received, sent = self.plan.capacities[hop], counts.exchanged.sum(1), counts.exchanged.sum(0)
        most_edges = size.edges_back if way else size.edges
        if way:
            found = {"rows from other ranks": (received, size.received_back), "rows for them": (sent, size.sent_back)}
        elif self.plan.exchanged[hop]:
            found = {"sources": (counts.columns, size.sources)}
            found |= {"rows from other ranks": (received, size.received), "rows for them": (sent, size.sent)}
        else:
            found = {"sources": (counts.columns + received, size.sources)}
        for what, (most, planned) in (found | {"edges": (counts.edges, most_edges)}).items():
            if most.max() > planned:
                raise BatchTooLargeError(hop, what, planned)
