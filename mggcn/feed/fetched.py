"""Features of any vertices on a rank that reads its own alone: those of others are asked of their owners, and kept.

Ids go to the owners (comm/requests.py), and rows come back: three uneven exchanges of all ranks. N vertices, P ranks,
K rows that are fetched, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mggcn.backend.cpu.memory import allocate
from mggcn.blocks.macrobatch import COUNTS, FetchPlan
from mggcn.comm.base import Communicator, Event
from mggcn.comm.requests import finished, request_rows
from mggcn.feed.gather import GatheredRows
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.feed.features import VertexFeatures

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Relay: TypeAlias = Generator[Event, None, Counts]
Read: TypeAlias = dict[tuple[int, int], Counts]
"""What batches of all ranks have read, by seed and macrobatch: one that is fetched again counts once."""
OWN, CACHED, REMOTE = range(3)
PIECE_BYTES: Final = 1 << 20
"""Bytes of rows that are gathered at a time: what lies between memory takes no more."""


def taken_counts(read: Read, seed: int, numbers: range, names: Sequence[str]) -> dict[str, int]:
    """Take the counts of some macrobatches out of those that are kept, and return their sums by name, {} for nothing."""
    found = [read.pop((seed, number)) for number in numbers if (seed, number) in read]
    return dict(zip(names, np.sum(found, axis=0).tolist(), strict=True)) if found else {}


class OwnerRows:
    """Rows of this rank, of its cache, and of other ranks as they are fetched. Making one is collective.

    owner uint16 (N,): the rank of each vertex; cached: vertices of other ranks whose rows are kept throughout; storage: the
    type of activations, in which rows travel. Memory: `FetchPlan.nbytes`.
    """

    def __init__(
        self,
        plan: FetchPlan,
        owner: npt.NDArray[np.uint16],
        reader: VertexFeatures,
        storage: torch.dtype,
        comm: Communicator,
        cached: Ids,
    ) -> None:
        self.plan: FetchPlan = plan
        self._owner, self._comm = owner, comm
        self._own = GatheredRows(reader, None, storage)
        held = plan.held * reader.num_features
        self._rows = allocate(held * storage.itemsize).view(storage).view(plan.held, reader.num_features)
        self._place = np.zeros(plan.num_vertices, np.int32)
        self.whose: npt.NDArray[np.uint8] = np.full(plan.num_vertices, REMOTE, np.uint8)
        """Of each vertex: OWN, CACHED or REMOTE."""
        self.whose[owner == comm.rank] = OWN
        finished(self._exchange(cached, 0, np.zeros(COUNTS, np.int64)))
        self.whose[cached] = CACHED

    def relay(self, slot: int, ids: Ids, counts: Counts) -> Relay:
        """Fetch the rows of other ranks' vertices, ascending, into one of `at_once` places; return counts of all ranks.

        counts: of this rank, COUNTS of them. What was there before is lost. Yields the event of each of EXCHANGES, which is
        to be waited for before going on. Collective. Raises: CommError.
        """
        return self._exchange(ids, self.plan.cached + slot * self.plan.rows, counts)

    def _exchange(self, ids: Ids, first: int, counts: Counts) -> Relay:
        """Ask the owners for the rows of vertices, which come to `first` and behind it."""
        asked = yield from request_rows(self._comm, self._owner[ids], ids.astype(np.int32), tuple(counts.tolist()))
        ids = ids[asked.order]
        rows = self._own.gather(asked.rows.numpy().astype(np.int64))
        yield self._comm.all_to_all(self._rows[first : first + ids.size], rows, asked.wanted, asked.given)
        # Behind the rows: a thread that gathers meanwhile finds a vertex at its old place or its new one.
        self._place[ids] = np.arange(first, first + ids.size, dtype=np.int32)
        found: Counts = asked.told.sum(0).numpy()
        return found

    def by_owner(self, ids: Ids) -> list[Ids]:
        """Return vertices by the rank that owns them, in their order."""
        owners = self._owner[ids]
        ends = np.bincount(owners, minlength=self._comm.size).cumsum()
        return np.split(ids[np.argsort(owners, kind="stable")], ends[:-1])

    def give(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Return own rows, byte by byte."""
        found: npt.NDArray[np.uint8] = self._own.gather(ids).reshape(-1).view(torch.uint8).numpy()
        return found

    def keep(self, slot: int, ids: Sequence[Ids], rows: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Keep the rows of vertices, as their owners gave them, in one of `at_once` places. Else as `relay`."""
        at = self.plan.cached + slot * self.plan.rows
        for some, given in zip(ids, rows, strict=True):
            self._rows[at : at + some.size].view(-1).view(torch.uint8).copy_(torch.from_numpy(given))
            self._place[some] = np.arange(at, at + some.size, dtype=np.int32)
            at += some.size

    def gather(self, ids: Ids, out: Tensor) -> Tensor:
        """Write the rows of vertices to `out`, (len(ids), D); others' must have been fetched. Threads may share it.

        Cost: a random access for each.
        """
        step = max(1, PIECE_BYTES // max(out.shape[1] * out.element_size(), 1))
        for start in range(0, ids.size, step):
            some, piece = ids[start : start + step], out[start : start + step]
            own = self.whose[some] == OWN
            piece[torch.from_numpy(own)] = self._own.gather(some[own])
            far = some[~own]
            piece[torch.from_numpy(~own)] = self._rows[torch.from_numpy(self._place[far].astype(np.int64))]
        return out


class FetchedRows:
    """Memory of a batch's features, padded as rows of the arena, which an OwnerRows fills. As GatheredRows."""

    def __init__(
        self,
        rows: OwnerRows,
        spec: BufferSpec,
        storage: torch.dtype,
        memory: Callable[[int], Tensor] = allocate,
    ) -> None:
        self._from = rows
        self._rows: Tensor = memory(spec.nbytes).view(storage).as_strided((spec.rows, spec.cols), (spec.ld, 1))

    def gather(self, ids: Ids) -> Tensor:
        """Return the features of vertices, (len(ids), D), valid until the next call."""
        return self._from.gather(ids, self._rows[: ids.size])
