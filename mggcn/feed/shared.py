"""One batch for all ranks: the part of one of them, with the rows that it exchanges with the others.

Every rank draws the whole batch, so each knows what all the others read and compute, and nothing is sent to agree on it.
T targets, S sources, E edges of a block of all ranks, P ranks. A row's place is that among the rows of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Block, Capacity, RowSet, Stack
from mggcn.blocks.sampler import BatchTooLargeError
from mggcn.feed.batch import Batch, BlockEdges, RemoteEdges, Scales

Vector = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reads:
    """The rows that each rank reads to compute its own: of a block's sources for sums, or of its targets backwards.

    edges: a row for each row that is computed. of_row, of_column: the rank of each. read bool (P, columns): which columns
    a rank reads.
    """

    edges: BlockEdges
    of_row: Vector
    of_column: Vector
    read: npt.NDArray[np.bool_]

    @staticmethod
    def of(edges: BlockEdges, of_row: Vector, of_column: Vector, ranks: int) -> Reads:
        """Find what the ranks read. Cost: a pass over the edges."""
        read = np.zeros((ranks, of_column.size), bool)
        read[np.repeat(of_row, np.diff(edges.indptr)), edges.indices] = True
        return Reads(edges, of_row, of_column, read)

    @property
    def exchanged(self) -> npt.NDArray[np.int64]:
        """How many rows of rank j rank i reads, int64 (P, P), 0 for i = j."""
        ranks = self.read.shape[0]
        columns = (self.read[:, self.of_column == owner].sum(1) for owner in range(ranks))
        counts = np.stack(list(columns), 1).astype(np.int64)
        np.fill_diagonal(counts, 0)
        return counts

    @property
    def num_edges(self) -> npt.NDArray[np.int64]:
        """The edges of each rank's rows, int64 (P,)."""
        lengths = np.diff(self.edges.indptr)
        return np.bincount(self.of_row, lengths, minlength=self.read.shape[0]).astype(np.int64)

    def of_rank(self, rank: int) -> BlockEdges:
        """Return the edges of a rank's rows: from its own columns, numbered in their order, and from those it receives."""
        mine, counts = self.of_column == rank, self.exchanged
        far = np.flatnonzero(self.read[rank] & ~mine)
        far = far[np.argsort(self.of_column[far], kind="stable")]
        number = np.empty(self.of_column.size, np.int32)
        number[mine] = np.arange(np.count_nonzero(mine), dtype=np.int32)
        number[far] = np.arange(far.size, dtype=np.int32)
        starts, entries = self._entries(rank)
        columns = self.edges.indices[entries]
        own = mine[columns]
        before = np.concatenate([[0], np.cumsum(own)])[starts]
        near = self._part(before, entries[own], number[columns[own]])
        remote = self._part(starts - before, entries[~own], number[columns[~own]])
        sent = self.read[:, mine]
        sent[rank] = False
        rows = np.nonzero(sent)[1].astype(np.int32)
        received, sent_to = (tuple(int(n) for n in of) for of in (counts[rank], counts[:, rank]))
        return dataclasses.replace(near, remote=RemoteEdges(remote, received, rows, sent_to))

    def gathered(self, rank: int) -> tuple[BlockEdges, Vector]:
        """Return the edges of a rank's rows and the places of its sources: its own, and behind them the others it reads."""
        mine = self.of_column == rank
        places = np.concatenate([np.flatnonzero(mine), np.flatnonzero(self.read[rank] & ~mine)])
        number = np.empty(self.of_column.size, np.int32)
        number[places] = np.arange(places.size, dtype=np.int32)
        starts, entries = self._entries(rank)
        return self._part(starts, entries, number[self.edges.indices[entries]]), places

    def _entries(self, rank: int) -> tuple[Vector, Vector]:
        """Return where a rank's rows begin among its edges, and the places of these among all."""
        rows, lengths = self.of_row == rank, np.diff(self.edges.indptr)
        return np.concatenate([[0], np.cumsum(lengths[rows])]), np.flatnonzero(np.repeat(rows, lengths))

    def _part(self, indptr: Vector, entries: Vector, indices: Vector) -> BlockEdges:
        values, types = (None if of is None else of[entries] for of in (self.edges.values, self.edges.types))
        return BlockEdges(indptr, indices, values, types=types)


def sizes_of(forward: Reads, backward: Reads | None) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield the size of a block on each rank, as a Capacity has it after its targets."""
    ranks = forward.read.shape[0]
    sources = np.bincount(forward.of_column, minlength=ranks)
    nothing = np.zeros((ranks, ranks), np.int64)
    there, back = forward.exchanged, nothing if backward is None else backward.exchanged
    for rank, (own, edges) in enumerate(zip(sources, forward.num_edges, strict=True)):
        counts = (there[rank], there[:, rank], back[rank], back[:, rank])
        received, sent, received_back, sent_back = (int(of.sum()) for of in counts)
        yield int(own), int(edges), received, sent, received_back, sent_back


def reads_of(
    stack: Stack, rows: Mapping[RowSet, Vector], edges: Mapping[Block, BlockEdges], of_row: Vector, ranks: int
) -> Iterator[tuple[Block, Reads, Reads | None]]:
    """Yield what the ranks read in each block. of_row: the rank of each row of the input."""
    for block in stack.blocks:
        targets, sources = (of_row[: rows[name].size] for name in (block.targets, block.sources))
        whole = edges[block]
        back = None if whole.transposed is None else Reads.of(whole.transposed, sources, targets, ranks)
        yield block, Reads.of(whole, targets, sources, ranks), back


def part_of(batch: Batch, of_row: Vector, stack: Stack, rank: int, ranks: int) -> Batch:
    """Return a rank's part of the batch of all ranks, which has no features yet. of_row: the rank of each row of the input.

    Raises: BatchTooLargeError, on every rank, if the part of any is larger than was planned.
    """
    edges, places = dict[Block, BlockEdges](), dict[RowSet, Vector]()
    mine = np.flatnonzero(of_row == rank)
    for name, ids in batch.rows.items():
        places[name] = mine[: np.searchsorted(mine, ids.size)]
    for hop, (block, forward, back) in enumerate(reads_of(stack, batch.rows, batch.edges, of_row, ranks)):
        size, is_exchanged = stack.capacities[hop], block in stack.exchanged
        for found in sizes_of(forward, back):
            _check(found, size, len(stack.blocks) - 1 - hop, is_exchanged)
        if is_exchanged:
            of_rank = forward.of_rank(rank)
            edges[block] = dataclasses.replace(of_rank, transposed=None if back is None else back.of_rank(rank))
        else:
            edges[block], places[block.sources] = forward.gathered(rank)
    scales = {name: _taken(of, places[name]) for name, of in (batch.scales or {}).items()}
    rows = {name: ids[places[name]] for name, ids in batch.rows.items()}
    return dataclasses.replace(batch, rows=rows, edges=edges, scales=None if batch.scales is None else scales)


def _taken(scales: Scales, places: Vector) -> Scales:
    row, col = (None if scale is None else scale[places] for scale in scales)
    return row, col


def _check(found: Sequence[int], size: Capacity, hop: int, is_exchanged: bool) -> None:
    """Raise BatchTooLargeError unless a rank's part of a block is as small as was planned."""
    sources, edges, *exchanged = found
    limits = [size.received, size.sent, size.received_back, size.sent_back]
    if not is_exchanged:
        sources, exchanged, limits = sources + exchanged[0], [], []
    names = ("sources", "edges", *["rows from and to other ranks"] * len(limits))
    for what, count, most in zip(names, (sources, edges, *exchanged), (size.sources, size.edges, *limits), strict=True):
        if count > most:
            raise BatchTooLargeError(hop, what, most)
