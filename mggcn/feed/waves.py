"""When letters of batches are sent: those of many steps to come in one message a step, however many follow each other.

A letter is announced, which tells its words, is sent with the next message, and answered by a thread while the one after it
is under way: three steps. So a step costs one message, and waits for one at most. Without threads beside the step each
letter of a batch is waited for, two messages a letter: rounds. P ranks.
Source: DistDGL (Zheng et al., IA3 2020), section 5.5, whose samplers run ahead of the trainers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.blocks.drawn_rows import ReadyEdges
from mggcn.blocks.letters import Words, lead
from mggcn.blocks.macrobatch import Macrobatches
from mggcn.comm.base import Communicator, Event
from mggcn.feed.fetched import OwnerRows, Read, taken_counts
from mggcn.feed.owner_draws import Letters, OwnerDraws

Counts = npt.NDArray[np.int64]
Made: TypeAlias = tuple[list[Words] | None, Counts | None]
"""The next letters of a macrobatch, or, at its end, the counts of all ranks."""
COUNTED: Final = (
    "rows_own",
    "rows_cached",
    "rows_remote",
    "rows_fetched",
    "drawn_own",
    "drawn_remote",
    "edges_fetched",
)
"""Names of the counts in the history."""


@dataclass(slots=True)
class _Macrobatch:
    """A macrobatch on its way: its next letters are being made, or have been and wait for a message, or are under way."""

    number: int
    letters: Letters
    made: Future[Made] | None = None
    ready: list[Words] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    """Words that each rank has announced."""


_Arrived: TypeAlias = tuple[_Macrobatch, list[Words] | None]
"""A macrobatch and the letters that have come for it, None where it begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """A message under way: which letters it announces, and which it brings; rows: words from each rank."""

    event: Event
    sent: Tensor
    out: Tensor
    rows: list[int]
    announces: list[_Macrobatch]
    brings: list[_Macrobatch]


class Waves:
    """Has batches drawn by the owners of their vertices, and their features fetched.

    ahead: steps behind the next one whose batches are made beside it; 0: nothing is. end: steps of the run.
    """

    def __init__(self, macros: Macrobatches, draws: OwnerDraws, comm: Communicator, ahead: int, end: int) -> None:
        self._macros, self._draws, self._comm, self._end = macros, draws, comm, end
        self.rows: OwnerRows = draws.rows
        self.ready: ReadyEdges = draws.ready
        self._thread = ThreadPoolExecutor(1, "mggcn-waves") if ahead else None
        self._lead = lead(draws.stages, ahead)
        self._on_way: list[_Macrobatch] = []
        self._announced: list[_Macrobatch] = []
        self._message: _Message | None = None
        self._seed: int | None = None
        self._first = self._clock = 0
        """The first step whose edges are kept, and the one before which all is here, once waves have begun in time."""
        self._complete = self._next = 0
        """Numbers of the first macrobatch that is not here, and of the next one to begin."""
        self._read: Read = {}

    def fetch(self, seed: int, first: int, last: int) -> None:
        """Have the edges and rows of steps first .. last - 1 here, and those of later ones a message further on their way.

        Collective, the same steps on every rank. No thread may draw or gather for an earlier step. Raises: CommError,
        PlanError, and what drawing raises.
        """
        if seed != self._seed or first < self._first or self._macros.of(first) > self._complete:
            self._begin(seed, first)
        self._first = first
        self.ready.forget(seed, first % 2**32)
        needed = self._macros.of(last - 1)
        # A comparison of gradients may ask for a step behind the last one, which has not begun.
        while self._complete <= needed or (self._thread is not None and self._clock < last):
            self._move(last)

    def counts(self, seed: int, epoch: int) -> dict[str, int]:
        """Return what all ranks' batches of an epoch have read since this was asked last, {} for nothing."""
        return taken_counts(self._read, seed, self._macros.of_epoch(epoch), COUNTED)

    def halt(self) -> None:
        """Wait for what the thread makes, a letter at most; what is fetched after that goes on from there."""
        wait([macro.made for macro in self._on_way if macro.made is not None])

    def _begin(self, seed: int, first: int) -> None:
        """Drop what is on its way, on every rank, and begin with another step."""
        if self._message is not None:
            self._message.event.wait()
            self._message = None
        wait([macro.made for macro in self._on_way if macro.made is not None])
        for macro in self._on_way:
            macro.letters.close()
        self._on_way, self._announced = [], []
        self._seed, self._clock = seed, first - self._lead
        self._complete = self._next = self._macros.of(first)

    def _move(self, last: int) -> None:
        """Move every macrobatch on by a message: wait for the one under way, and send what is ready."""
        arrived = [*self._received(), *self._starting(last)]
        if self._thread is None:
            self._make(arrived)
        ready = [macro for macro in self._on_way if macro.made is not None and self._is_ready(macro, macro.made)]
        self._on_way = [macro for macro in self._on_way if macro.number >= self._complete]
        self._post(ready)
        if self._thread is not None:
            self._make(arrived)
        self._clock += 1

    def _starting(self, last: int) -> list[_Arrived]:
        """Return the macrobatches that begin now, so that they are here in time."""
        until = last if self._thread is None else min(self._clock + self._lead + 1, max(self._end, last))
        found = list[_Arrived]()
        while (span := self._macros.span(self._next)).start < until:
            assert self._seed is not None
            found.append((_Macrobatch(self._next, self._draws.letters(self._seed, self._next, span)), None))
            self._next += 1
        self._on_way += [macro for macro, _ in found]
        return found

    def _make(self, arrived: Sequence[_Arrived]) -> None:
        """Have the next letters made, beside the step if there is a thread."""
        for macro, came in arrived:
            make = functools.partial(_made, macro.letters, came)
            if self._thread is not None:
                macro.made = self._thread.submit(make)
            else:
                macro.made = Future()
                macro.made.set_result(make())

    def _is_ready(self, macro: _Macrobatch, made: Future[Made]) -> bool:
        """Whether a macrobatch, whose letters have been made, has some; else it is here, and its counts are added up."""
        letters, counts = made.result()
        macro.made = None
        if letters is not None:
            macro.ready = letters
            return True
        assert counts is not None
        assert self._seed is not None
        self._read[self._seed, macro.number] = counts
        self._complete += 1
        return False

    def _post(self, ready: list[_Macrobatch]) -> None:
        """Announce letters, and send those that were announced before."""
        brings, self._announced = self._announced, ready
        if not ready and not brings:
            return
        parts, sent, rows = list[Words](), list[int](), list[int]()
        for rank in range(self._comm.size):
            mine = [np.array([macro.ready[rank].size for macro in ready], np.int64)]
            mine += [macro.ready[rank] for macro in brings]
            parts += mine
            sent.append(sum(part.size for part in mine))
            rows.append(len(ready) + sum(macro.expected[rank] for macro in brings))
        buf, out = torch.from_numpy(np.concatenate(parts)), torch.empty(sum(rows), dtype=torch.int64)
        event = self._comm.all_to_all(out, buf, rows, sent)
        self._message = _Message(event=event, sent=buf, out=out, rows=rows, announces=ready, brings=brings)

    def _received(self) -> list[_Arrived]:
        """Wait for the message under way, and return what it brings."""
        message, self._message = self._message, None
        if message is None:
            return []
        message.event.wait()
        for macro in message.announces:
            macro.expected = []
        letters = [list[Words]() for _ in message.brings]
        for rank, part in enumerate(np.split(message.out.numpy(), np.cumsum(message.rows)[:-1])):
            at = len(message.announces)
            for macro, words in zip(message.announces, part[:at].tolist(), strict=True):
                macro.expected.append(words)
            for macro, found in zip(message.brings, letters, strict=True):
                found.append(part[at : at + macro.expected[rank]])
                at += macro.expected[rank]
        return list(zip(message.brings, letters, strict=True))


def _made(letters: Letters, came: list[Words] | None) -> Made:
    """Return what follows the letters that have come."""
    try:
        return (next(letters) if came is None else letters.send(came)), None
    except StopIteration as done:
        return None, done.value
