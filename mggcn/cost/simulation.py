"""All ranks' lists of work and messages, run side by side on a described machine: what waits for what, and for how long.

All ranks share one link, which carries the bytes of their messages one after the other, in the order in which every rank
lists them; a message has arrived its latency after its bytes. How much of it hides behind computing is what a strategy's
list of steps says: what lies between a Send and its Await.

Ranks that share a device share its rates equally while they compute. A rank that waits leaves its part to the others, as
far as they have threads for it: with more ranks than cores. P ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from mggcn.cost.rounds import Device, Seconds, run_round
from mggcn.cost.segments import Program, Segment
from mggcn.cost.work import KINDS, Kind


@dataclass(frozen=True, slots=True)
class Carried:
    """A message that the link has carried."""

    start: float
    transfer_s: float
    end: float
    """When it has arrived: its latency after its last byte."""
    takes: float
    """Seconds for which it keeps each rank from computing."""


@dataclass(slots=True)
class Open:
    """A segment that some ranks are in: the work of each, when those that are done with it were, and how many are."""

    work: list[float]
    ended: list[float]
    awaits: int | None
    done: int = 0


class Run:
    """A program on its way. `finish` runs all ranks to their end; then `parts` and `carried` can be read."""

    def __init__(self, program: Program) -> None:
        size, device = program.size, program.device
        self.carried: list[Carried] = []
        self.parts: dict[Kind, Seconds] = {kind: np.zeros(size) for kind in KINDS}
        """Where the seconds of every rank (P,) went."""
        self._program = program
        # Work that a computing rank gets done in a second, over that with its equal part of the device.
        least = min(program.sharing, device.cores) if device.shared else program.sharing
        self._speeds = [program.sharing / max(least, program.sharing * count / size) for count in range(size + 1)]
        self._now = 0.0
        self._free = 0.0
        # Computing ranks by the work that the device will have given each of them when they end; waiting ones by time;
        # by message, those that wait for one that has not started, with when they came.
        self._given = 0.0
        self._computing: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._stuck: dict[int, list[tuple[float, int]]] = {}
        # How many segments each rank is done with; when each began the first that not all of them are done with.
        self._position = [0] * size
        self._began = np.zeros(size)
        self._open: dict[int, Open] = {}

    def finish(self) -> None:
        """Run all ranks to their end."""
        for rank in range(self._program.size):
            self._go_on(rank, worked=False)
        computing, waiting = self._computing, self._waiting
        while computing or waiting:
            if computing:
                speed, target = self._speeds[len(computing)], computing[0][0]
                ends = self._now + (target - self._given) / speed if target > self._given else self._now
                if not waiting or ends < waiting[0][0]:
                    self._given, rank = heapq.heappop(computing)
                    self._now = ends
                    self._go_on(rank, worked=True)
                    continue
                self._given += (waiting[0][0] - self._now) * speed
            elif not self._open:
                self._rounds()
            self._now, rank = heapq.heappop(waiting)
            self._go_on(rank, worked=False)

    def _go_on(self, rank: int, *, worked: bool) -> None:
        """Take a rank up to where it takes time: to where it works, or waits; worked: the work of its segment is done."""
        while (number := self._position[rank]) < len(self._program.segments):
            segment = self._open.get(number) or self._opened(number)
            if not worked and (work := segment.work[rank]) > 0:
                heapq.heappush(self._computing, (self._given + work, rank))
                return
            worked = False
            self._position[rank] = number + 1
            segment.ended[rank] = self._now
            segment.done += 1
            if segment.done == self._program.size:
                del self._open[number]
                self._close(self._program.segments[number], np.array(segment.ended))
            if segment.awaits is not None:
                if segment.awaits < len(self.carried):
                    self._wait(self._now, rank, self.carried[segment.awaits])
                else:
                    self._stuck.setdefault(segment.awaits, []).append((self._now, rank))
                return

    def _opened(self, number: int) -> Open:
        """Return a segment that its first rank enters."""
        segment, size = self._program.segments[number], self._program.size
        self._open[number] = Open(segment.total.tolist(), [0.0] * size, segment.awaits)
        return self._open[number]

    def _wait(self, since: float, rank: int, message: Carried) -> None:
        """Wait until a message has arrived, but at least for what it takes from this rank's computing."""
        until = since + message.takes
        heapq.heappush(self._waiting, (until if until > message.end else message.end, rank))

    def _close(self, segment: Segment, ended: Seconds) -> None:
        """All ranks are done with a segment, the last of them now: its messages are carried, its seconds accounted for."""
        for number in segment.starts:
            self._carry(number)
        elapsed, some = ended - self._began, segment.total > 0
        for kind, seconds in segment.seconds.items():
            self.parts[kind] += np.divide(seconds * elapsed, segment.total, out=np.zeros_like(ended), where=some)
        self._began = ended
        if segment.awaits is None:
            return
        message = self.carried[segment.awaits]
        self._began = np.maximum(message.end, ended + message.takes)
        waited = self._began - ended
        if self._program.messages[segment.awaits].kind == "all_reduce":
            # Until the last rank has come, it is waiting; the rest is the sum itself.
            idle = np.maximum(0.0, message.start - ended)
            self.parts["sums"] += waited - idle
            waited = idle
        self.parts["messages"] += waited

    def _carry(self, number: int) -> None:
        """Let the link carry a message, which the last rank has started now."""
        message, link = self._program.messages[number], self._program.link
        start = max(self._free, self._now)
        self._free = start + message.transfer_s
        end = self._free + link.latency_s[message.kind]
        self.carried.append(Carried(start, message.transfer_s, end, (end - start) * link.busy))
        for since, rank in self._stuck.pop(number, ()):
            self._wait(since, rank, self.carried[number])

    def _rounds(self) -> None:
        """Run all ranks, which wait, through as many rounds as there are."""
        segments, speeds = self._program.segments, np.array(self._speeds)
        first = number = self._position[0]
        while number < len(segments) and (awaits := segments[number].awaits) is not None and awaits < len(self.carried):
            message, device = self.carried[awaits], Device(self._now, self._given)
            found = run_round(segments[number].total, self._began, device, speeds, (message.end, message.takes))
            if found is None:
                break
            self._now, self._given = found.device.now, found.device.given
            self._close(segments[number], found.ended)
            number += 1
        if number > first:
            self._position = [number] * self._program.size
            self._waiting[:] = sorted(zip(self._began.tolist(), range(self._program.size), strict=True))
