"""All ranks' lists of work and messages, run side by side on a described machine: what waits for what, and for how long.

All ranks share one link, which carries the bytes of their messages one after the other, in the order in which every rank
lists them; a message has arrived its latency after its bytes. How much of it hides behind computing is what a strategy's
list of steps says: what lies between a Send and its Await.

Ranks that share a device share its rates equally while they compute. A rank that waits leaves its part to the others, as
far as they have threads for it: with more ranks than cores.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mggcn.errors import PlanError
from mggcn.plan.description import Link, Machine, MessageKind
from mggcn.plan.steps import Await, Send
from mggcn.plan.work import KINDS, Item, Kind, Sum, Work, ring_bytes, work_seconds


@dataclass(frozen=True, slots=True)
class Carried:
    """A message that the link has carried."""

    start: float
    transfer_s: float
    end: float
    """When it has arrived: its latency after its last byte."""


@dataclass(slots=True)
class Rank:
    """One rank on its way through its items."""

    number: int
    items: Sequence[Item]
    position: int = 0
    since: float = 0.0
    """When it began what it does now."""
    job: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds of the work that it does now, had it no more than its part of the device."""
    parts: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    posted: list[tuple[float, Send | Sum]] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.position == len(self.items)

    def spend(self, kind: Kind, seconds: float) -> None:
        self.parts[kind] += seconds


class Run:
    """The ranks of one program. `finish` runs them to their end; then `parts` of the ranks and `carried` can be read."""

    def __init__(self, machine: Machine, link: Link, lists: Sequence[Sequence[Item]]) -> None:
        self.link = link
        self.ranks = [Rank(number, items) for number, items in enumerate(lists)]
        self.carried: list[Carried] = []
        self._device = machine.device
        self._sharing = machine.sharing(len(lists))
        self._now = 0.0
        self._free = 0.0
        # Computing ranks by the work that the device will have given each of them when they end; waiting ones by time.
        self._given = 0.0
        self._computing: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._stuck: dict[int, list[Rank]] = {}
        self._posts: list[int] = []
        """Of every message, how many ranks have posted it."""

    def finish(self) -> None:
        """Run all ranks to their end. Raises: PlanError if they do not list the same messages."""
        ready = list(self.ranks)
        while ready or self._computing or self._waiting:
            for rank in ready:
                self._advance(rank)
            self._carry()
            ready = self._next()
        if any(not rank.done or len(rank.posted) != len(self.carried) for rank in self.ranks):
            raise PlanError("the ranks of a program do not list the same messages: some rank waits for ever")

    @property
    def _speed(self) -> float:
        """Work that a computing rank gets done in a second, over that with its equal part of the device."""
        least = min(self._sharing, self._device.cores) if self._device.shared else self._sharing
        return self._sharing / max(least, self._sharing * len(self._computing) / len(self.ranks))

    def _next(self) -> list[Rank]:
        """Move on to when a rank ends what it does; return it, or none if all are done or stuck."""
        ends = self._now + max(0.0, self._computing[0][0] - self._given) / self._speed if self._computing else None
        if self._waiting and (ends is None or self._waiting[0][0] <= ends):
            when, number = heapq.heappop(self._waiting)
            self._given += (when - self._now) * self._speed if self._computing else 0.0
            self._now = when
            return [self.ranks[number]]
        if ends is None:
            return []
        self._given, number = heapq.heappop(self._computing)
        self._now = ends
        rank = self.ranks[number]
        elapsed, planned = self._now - rank.since, sum(rank.job.values())
        for kind, seconds in rank.job.items():
            rank.spend(kind, seconds * elapsed / planned)
        return [rank]

    def _advance(self, rank: Rank) -> None:
        """Go through a rank's items up to the next that takes time."""
        while not rank.done:
            item = rank.items[rank.position]
            if isinstance(item, Work):
                if self._compute(rank):
                    return
                continue
            rank.position += 1
            if isinstance(item, Await):
                self._await(rank, item.message)
                return
            self._post(rank, item)
            if isinstance(item, Sum):
                self._await(rank, len(rank.posted) - 1)
                return

    def _compute(self, rank: Rank) -> bool:
        """Begin all work up to the next message; return whether it takes any time."""
        job: dict[Kind, float] = {}
        while not rank.done and isinstance(item := rank.items[rank.position], Work):
            seconds, calls = work_seconds(item, self._device, self._sharing)
            job[item.kind] = job.get(item.kind, 0.0) + seconds
            job["overhead"] = job.get("overhead", 0.0) + calls
            rank.position += 1
        total = sum(job.values())
        if total:
            rank.job, rank.since = job, self._now
            heapq.heappush(self._computing, (self._given + total, rank.number))
        return total > 0

    def _post(self, rank: Rank, message: Send | Sum) -> None:
        number = len(rank.posted)
        rank.posted.append((self._now, message))
        if number == len(self._posts):
            self._posts.append(0)
        self._posts[number] += 1

    def _await(self, rank: Rank, message: int) -> None:
        if message >= len(rank.posted):
            raise PlanError(f"a rank waits for message {message}, of which it has started {len(rank.posted)}")
        rank.since = self._now
        rank.awaited.add(message)
        if message < len(self.carried):
            self._wait(rank, message)
        else:
            self._stuck.setdefault(message, []).append(rank)

    def _wait(self, rank: Rank, number: int) -> None:
        """Wait until a message has arrived, but at least for what it takes from this rank's computing."""
        message = self.carried[number]
        until = max(message.end, rank.since + (message.end - message.start) * self.link.busy)
        waited = until - rank.since
        if isinstance(rank.posted[number][1], Sum):
            # Until the last rank has come, it is waiting; the rest is the sum itself.
            idle = max(0.0, message.start - rank.since)
            rank.spend("messages", idle)
            rank.spend("sums", waited - idle)
        else:
            rank.spend("messages", waited)
        heapq.heappush(self._waiting, (until, rank.number))

    def _carry(self) -> None:
        """Let the link carry, in order, every message that all ranks have posted."""
        while len(self.carried) < len(self._posts) and self._posts[len(self.carried)] == len(self.ranks):
            number = len(self.carried)
            posts = [rank.posted[number] for rank in self.ranks]
            start = max(self._free, *(when for when, _ in posts))
            kind, transfer_s = self._message(number, [message for _, message in posts])
            self._free = start + transfer_s
            self.carried.append(Carried(start, transfer_s, self._free + self.link.latency_s[kind]))
            for rank in self._stuck.pop(number, ()):
                self._wait(rank, number)

    def _message(self, number: int, messages: Sequence[Send | Sum]) -> tuple[MessageKind, float]:
        """Return the kind of a message and the seconds for which it holds the link, from what each rank posted."""
        sums = [m.nbytes for m in messages if isinstance(m, Sum)]
        sends = [m for m in messages if isinstance(m, Send)]
        if len(sums) == len(messages) and len(set(sums)) == 1:
            moved = [ring_bytes(nbytes, len(messages)) for nbytes in sums]
            return "all_reduce", self.link.transfer_s("all_reduce", moved, moved)
        kinds = {(send.kind, send.root) for send in sends}
        if len(sends) != len(messages) or len(kinds) != 1:
            raise PlanError(f"the ranks disagree about message {number} of a program: {list(messages)}")
        kind = sends[0].kind
        return kind, self.link.transfer_s(kind, [s.sent for s in sends], [s.received for s in sends])
