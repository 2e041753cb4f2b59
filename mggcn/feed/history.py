"""Which rows of a batch other ranks own, and which own ones are pushed to them (aggregate/history.py).

R rows of other ranks in a batch, K vertices of the halo. Every rank finds its own part; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Block, HaloRows
from mggcn.feed.seeds import Step
from mggcn.graph.philox import philox
from mggcn.partition.rows.halo import HaloIds

STREAM: Final = 0xD0000000
"""First counter of the draws of pushed rows, of the first block (graph/philox.py has the streams)."""
Vector = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryMemory:
    """The memory of what a batch has of other ranks' rows, which the next one in it overwrites."""

    read: Vector
    places: Vector
    numbers: Vector
    pushed: tuple[tuple[tuple[Vector, Vector], ...], ...]
    """Of each block, for each rank, places and numbers."""


class RemoteRows:
    """Finds a rank's rows of other ranks, and those that it pushes: of its own rows of a block at most so many to a rank.

    owner uint16 (N,): the rank of each vertex. blocks: of a step, the input's first. Where a rank reads more than `pushed`
    of a block's rows, these are drawn without replacement, in proportion to the in-edges of their vertices in the graph,
    whose row pointers are `indptr`: those with the largest keys u^(1 / degree), u named by seed, step, block and vertex.
    Source of the keys: Efraimidis and Spirakis, Inf. Process. Lett. 97, 2006.
    """

    def __init__(
        self,
        ids: HaloIds,
        owner: npt.NDArray[np.uint16],
        rank: int,
        indptr: npt.NDArray[np.int64],
        blocks: Sequence[Block],
        pushed: int,
    ) -> None:
        self._owner, self._rank, self._indptr, self._blocks = owner, rank, indptr, blocks
        self._sent, self._pushed = ids.sent, pushed
        # By owner, then id, so that the place of a key is the number of a vertex in the halo.
        self._keys = np.concatenate([self._key(rank, of) for rank, of in enumerate(ids.received)])

    def _key(self, owners: Any, ids: Vector) -> Vector:
        key: Vector = owners * np.int64(self._owner.size) + ids
        return key

    def memory(self, rows: int) -> HistoryMemory:
        """Return memory for batches of at most so many rows."""
        most = [min(self._pushed, of.size) for of in self._sent]
        pushed = tuple(
            tuple((np.empty(count, np.int32), np.empty(count, np.int32)) for count in most) for _ in self._blocks
        )
        places, numbers = (np.empty(rows, np.int32) for _ in range(2))
        return HistoryMemory(read=np.empty(rows, np.int64), places=places, numbers=numbers, pushed=pushed)

    def of(
        self, ids: Vector, num_seeds: int, step: Step, sources: Sequence[int], memory: HistoryMemory
    ) -> Mapping[Block, HaloRows]:
        """Return what each block has of other ranks' rows; ids: of the input's rows, the seeds first; sources: rows of each
        block, with which these begin. Seeds count as this rank's, whoever owns them.
        """
        owner = self._owner[ids]
        remote = np.flatnonzero(owner[num_seeds:] != self._rank) + num_seeds
        places, numbers = memory.places[: remote.size], memory.numbers[: remote.size]
        places[:] = remote
        numbers[:] = _found(self._keys, self._key(owner[remote].astype(np.int64), ids[remote]))
        own = np.flatnonzero(owner == self._rank).astype(np.int32)
        read = [self._read(of, own, ids) for of in self._sent]
        found = dict[Block, HaloRows]()
        for number, (block, rows) in enumerate(zip(self._blocks, sources, strict=True)):
            pushed = tuple(
                self._drawn(some, ids, rows, step, number, room)
                for some, room in zip(read, memory.pushed[number], strict=True)
            )
            count = int(np.searchsorted(places, rows))
            found[block] = HaloRows(places[:count], numbers[:count], pushed)
        return found

    def gathered(self, ids: Vector, remote: HaloRows, memory: HistoryMemory) -> Vector:
        """Return the vertices whose features a batch gathers: of other ranks' rows, which come from the cache, none are."""
        read: Vector = memory.read[: ids.size]
        read[:] = ids
        if remote.places.size:
            read[remote.places] = ids[0]  # one that is gathered anyway, so that the rows hold numbers
        return read

    @staticmethod
    def _read(of: Vector, own: Vector, ids: Vector) -> tuple[Vector, Vector]:
        """Return the places of own rows that a rank reads, and their numbers among those that it reads."""
        numbers = _found(of, ids[own])
        read = numbers >= 0
        return own[read], numbers[read]

    def _drawn(
        self,
        read: tuple[Vector, Vector],
        ids: Vector,
        rows: int,
        step: Step,
        block: int,
        room: tuple[Vector, Vector],
    ) -> tuple[Vector, Vector]:
        """Return the places and numbers, among those that a rank reads, of the rows of a block that are pushed to it."""
        places, numbers = read
        count = int(np.searchsorted(places, rows))
        places, numbers, most = places[:count], numbers[:count], room[0].size
        if count > most:
            chosen = self._chosen(ids[places], step, block, most)
            places, numbers, count = places[chosen], numbers[chosen], most
        for values, out in zip((places, numbers), room, strict=True):
            out[:count] = values
        return room[0][:count], room[1][:count]

    def _chosen(self, ids: Vector, step: Step, block: int, most: int) -> Vector:
        """Return the places of so many vertices, ascending, that are drawn in proportion to their in-edges."""
        counter = np.zeros((4, ids.size), np.uint64)
        counter[0] = STREAM + block
        counter[1], counter[2] = ids.astype(np.uint64) & np.uint64(0xFFFFFFFF), ids.astype(np.uint64) >> np.uint64(32)
        high, low, *_ = philox((step.seed, step.number % 2**32), counter)
        uniform = (high.astype(np.float64) * 2.0**32 + low + 0.5) / 2.0**64
        degrees = np.maximum(self._indptr[ids + 1] - self._indptr[ids], 1)
        chosen: Vector = np.sort(np.lexsort((ids, -np.log(uniform) / degrees))[:most])
        return chosen


def _found(ascending: Vector, wanted: Vector) -> Vector:
    """Return the place of each wanted number among ascending ones, -1 where it is none of them."""
    at = np.searchsorted(ascending, wanted)
    if not ascending.size:
        return np.full(wanted.shape, -1)
    return np.where(ascending[np.minimum(at, ascending.size - 1)] == wanted, at, -1)
