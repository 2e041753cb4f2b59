"""When rows of other ranks are fetched, and which: those that a macrobatch's batches read, each once.

As every draw is named, a thread draws the batches of the next macrobatch beside the steps, of which it keeps the input's
vertices alone; the batches themselves are drawn again when it is their turn, so that no more of them are held. A relay
begins as many steps early as it has messages, so that each is under way during a step. N vertices.
Source: BatchGNN, section 3.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.blocks.macrobatch import COUNTS, EXCHANGES, Macrobatches
from mggcn.blocks.sampler import BatchTooLargeError, Sampler
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.comm.base import Event
from mggcn.feed.fetched import REMOTE, OwnerRows, Read, Relay, taken_counts
from mggcn.feed.seeds import RankSeeds, Step

Ids = npt.NDArray[np.int64]
Key = tuple[int, int]
"""Seed of the run, and number of the macrobatch."""
Needs = tuple[Ids, npt.NDArray[np.int64]]
"""Vertices to be fetched, ascending, and the counts of a macrobatch: COUNTS of blocks/macrobatch.py."""


@dataclass(slots=True)
class _Macrobatch:
    """A macrobatch whose rows are here, or on their way: then with the exchange under way."""

    key: Key
    relay: Relay | None
    event: Event


class Relays:
    """Fetches what the batches of coming steps read. ahead: steps behind the next one whose batches are made beside it.

    seeds: of this object alone, as it is ahead of the feed. slots: what is drawn, without transposes. end: steps of a run,
    None if that is not known. Memory: a slot, and the order of two epochs.
    """

    def __init__(
        self,
        macros: Macrobatches,
        rows: OwnerRows,
        sampler: Sampler,
        seeds: RankSeeds,
        slots: SlotPlan,
        ahead: int,
        end: int | None = None,
    ) -> None:
        self.rows: OwnerRows = rows
        self._macros, self._end = macros, end
        self._sampler, self._seeds, self._slot = sampler, seeds, Slot(slots)
        self._seen = np.zeros(slots.num_vertices, np.bool_)
        self._thread = ThreadPoolExecutor(1, "mggcn-relays") if ahead else None
        self._next: tuple[Key, Future[Needs]] | None = None
        self._halted = threading.Event()
        """Whether the thread is to leave what it has begun."""
        self._here = deque[_Macrobatch]()
        """One behind the other."""
        self._read: Read = {}

    def fetch(self, seed: int, first: int, last: int) -> None:
        """Have the rows of steps first .. last - 1 here, and those of later ones one exchange further on their way.

        Collective, the same steps on every rank. No thread may gather for an earlier step. Raises: CommError, PlanError.
        """
        behind = last + (EXCHANGES if self._thread is not None else 0)
        behind = behind if self._end is None else max(min(behind, self._end), last)
        keys = [(seed, number) for number in range(self._macros.of(first), self._macros.of(behind - 1) + 1)]
        while self._here and self._here[0].key != keys[0]:
            self._finish(self._here.popleft())
        for macro in self._here:
            self._advance(macro)
        for key in keys[len(self._here) :]:
            relay = self.rows.relay(key[1] % self.rows.plan.at_once, *self._needs(key))
            self._here.append(_Macrobatch(key, relay, next(relay)))
        for macro in self._here:
            if macro.key[1] <= self._macros.of(last - 1):
                self._finish(macro)

    def _finish(self, macro: _Macrobatch) -> None:
        """Wait until the rows of a macrobatch are here."""
        while macro.relay is not None:
            self._advance(macro)

    def _advance(self, macro: _Macrobatch) -> None:
        """Wait for the exchange under way, and start the next one."""
        if macro.relay is None:
            return
        macro.event.wait()
        try:
            macro.event = next(macro.relay)
        except StopIteration as done:
            macro.relay, self._read[macro.key] = None, done.value

    def counts(self, seed: int, epoch: int) -> dict[str, int]:
        """Return what all ranks' batches of an epoch have read since this was asked last, {} for nothing."""
        names = ("rows_own", "rows_cached", "rows_remote", "rows_fetched")
        return taken_counts(self._read, seed, self._macros.of_epoch(epoch), names)

    def halt(self) -> None:
        """Have the thread leave what it draws ahead, which may be an epoch; what is fetched after that begins anew.

        Cost: the batch that is being drawn.
        """
        if self._next is None:
            return
        self._halted.set()
        wait([self._next[1]])
        self._next = None
        self._halted.clear()

    def _needs(self, key: Key) -> Needs:
        """Return what a macrobatch needs, and have a thread find that of the next one."""
        if self._thread is None:
            return self._found(key)
        began = self._next
        found = began[1].result() if began is not None else None  # also of another key: it has the slot
        if began is None or found is None or began[0] != key:
            found = self._found(key)
        after = key[0], key[1] + 1
        more = self._end is None or self._macros.span(after[1]).start < self._end
        self._next = (after, self._thread.submit(self._found, after)) if more else None
        return found

    def _found(self, key: Key) -> Needs:
        """Draw the batches of a macrobatch. Raises: PlanError for a seed that is too large alone."""
        seed, number = key
        whose, seen, counts = self.rows.whose, self._seen, np.zeros(COUNTS, np.int64)
        seen[:] = False  # also what an error left
        for at in self._macros.span(number):
            if self._halted.is_set():
                break  # `halt` does not read what was found
            step = self._seeds.step(seed, at)
            for ids in self._inputs(step, self._seeds.own(step)):
                of = whose[ids]
                counts[: REMOTE + 1] += np.bincount(of, minlength=REMOTE + 1)
                seen[ids[of == REMOTE]] = True
        ids = np.flatnonzero(seen)
        counts[-1] = ids.size
        return ids, counts

    def _inputs(self, step: Step, seeds: Ids) -> Iterator[Ids]:
        """Yield the input's vertices of a step's batch, or of its halves where it is larger than planned, each valid until
        the next one.
        """
        vertices, _, left_out = self._seeds.around(step, seeds)
        try:
            drawn = self._sampler.draw(self._slot, vertices, step.seed, step.number % 2**32, left_out)
        except BatchTooLargeError:
            for half in self._seeds.halves(seeds):
                yield from self._inputs(step, half)
        else:
            yield drawn.ids
