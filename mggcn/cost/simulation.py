"""Simulates all ranks' lists of work and messages side by side on a described machine: what waits for what, and how long.

All ranks share one link, which carries the bytes of their messages one after the other, in the order in which every rank
lists them; a message has arrived its latency after its bytes. How much of it is hidden by computing is what a strategy's
list of steps says: what is between a Send and its Await.

Ranks that share a device share its rates equally while they compute. A rank that waits leaves its part to the others, as
far as they have threads for it: with more ranks than cores. P ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.steps import AHEAD, Await, Send
from mggcn.cost.machine import DeviceRates, Link, Machine, MessageKind
from mggcn.cost.work import KINDS, Item, Kind, Staged, Sum, Work, call_seconds, ring_bytes, staged_seconds, work_seconds
from mggcn.errors import PlanError

Seconds = npt.NDArray[np.float64]
Action = Send | Await | Sum | Staged | None
"""The action that ends a rank's work; None at the end of its list."""
DIFFERENT = "the ranks of a program do not list the same messages in the same order: some rank waits forever"


@dataclass(slots=True)
class Segment:
    """Work of every rank, then messages that start, and at most one that is awaited, by number.

    seconds (P,): of each kind of work, had each rank no more than its part of the device; total (P,): their sums.
    """

    seconds: Mapping[Kind, Seconds]
    total: Seconds
    starts: list[int] = field(default_factory=list)
    awaits: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its kind, and the seconds for which it occupies the link."""

    kind: MessageKind
    transfer_s: float


class Program:
    """Segments and messages of a program, from the items of every rank.

    All ranks list the same messages in the same order, and wait for them at the same points of their lists: so what each
    computes between two such points is kept in arrays.
    Raises: PlanError if the ranks do not list the same messages, or one waits for a message that it has not started;
    ConfigError as Machine.sharing.
    """

    def __init__(self, machine: Machine, transport: str, lists: Sequence[Sequence[Item]]) -> None:
        self.size: int = len(lists)
        self.link: Link = machine.link(self.size, transport)
        self.device: DeviceRates = machine.device
        self.sharing: int = machine.sharing(self.size)
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        # Ranks of equal sizes do the same: the seconds of equal work are worked out once.
        self._known: dict[Work, tuple[float, float]] = {}
        for pieces in zip(*map(self._pieces, lists), strict=True):
            self._add_work([job for job, _ in pieces])
            self._add_action([action for _, action in pieces])

    def _pieces(self, items: Sequence[Item]) -> Iterator[tuple[dict[Kind, float], Action]]:
        """Yield the seconds that a rank computes up to an action, by kind, and the action: None at the end."""
        job: dict[Kind, float] = {}
        for item in items:
            if not isinstance(item, Work):
                yield job, item
                job = {}
                continue
            if item not in self._known:
                self._known[item] = work_seconds(item, self.device, self.sharing)
            seconds, calls = self._known[item]
            job[item.kind] = job.get(item.kind, 0.0) + seconds
            job["overhead"] = job.get("overhead", 0.0) + calls
        yield job, None

    def _add_work(self, jobs: Sequence[Mapping[Kind, float]]) -> None:
        totals = [sum(job.values()) for job in jobs]
        if any(totals):
            kinds = dict.fromkeys(kind for job in jobs for kind in job)
            seconds = {kind: np.array([job.get(kind, 0.0) for job in jobs]) for kind in kinds}
            self.segments.append(Segment(seconds, np.array(totals)))

    def _add_action(self, actions: Sequence[Action]) -> None:
        first = actions[0]
        if all(action is None for action in actions):
            return
        if isinstance(first, Await) and all(action == first for action in actions):
            self._await(first.message)
        elif all(isinstance(action, Send | Sum) for action in actions):
            self._start(self._message([action for action in actions if isinstance(action, Send | Sum)]))
            if isinstance(first, Sum):
                self._await(len(self.messages) - 1)
        elif all(isinstance(action, Staged) for action in actions):
            self._add_stages([action for action in actions if isinstance(action, Staged)])
        else:
            raise PlanError(DIFFERENT)

    def _last(self) -> Segment:
        """Return the current segment: a new one if the last ended with a wait."""
        if not self.segments or self.segments[-1].awaits is not None:
            self.segments.append(Segment({}, np.zeros(self.size)))
        return self.segments[-1]

    def _start(self, message: Message) -> None:
        self._last().starts.append(len(self.messages))
        self.messages.append(message)

    def _await(self, number: int) -> None:
        if number >= len(self.messages):
            raise PlanError(f"a rank waits for message {number}, but has started only {len(self.messages)}")
        self._last().awaits = number

    def _message(self, items: Sequence[Send | Sum]) -> Message:
        """Return what all ranks start together."""
        sums = [item.nbytes for item in items if isinstance(item, Sum)]
        sends = [item for item in items if isinstance(item, Send)]
        if len(sums) == len(items) and len(set(sums)) == 1:
            moved = [ring_bytes(nbytes, len(items)) for nbytes in sums]
            return Message("all_reduce", self.link.transfer_s("all_reduce", moved, moved))
        if len(sends) != len(items) or len({(send.kind, send.root) for send in sends}) != 1:
            raise PlanError(f"the ranks disagree about message {len(self.messages)} of a program: {list(items)}")
        sent, received = [send.sent for send in sends], [send.received for send in sends]
        return Message(sends[0].kind, self.link.transfer_s(sends[0].kind, sent, received))

    def _add_stages(self, ranks: Sequence[Staged]) -> None:
        """Add what `Staged.plain` lists, without a list: P^2 items are many."""
        alike = {(rank.first, rank.edge, rank.reuse, rank.stages.counts, rank.stages.row_bytes) for rank in ranks}
        if len(alike) != 1 or any(rank.stages.rank != place for place, rank in enumerate(ranks)):
            raise PlanError(DIFFERENT)
        stages = ranks[0].stages
        self._await(ranks[0].first)
        products = staged_seconds(ranks, self.device, self.sharing)
        calls = np.full_like(products, call_seconds(1, self.device, self.sharing, begins=1))
        np.fill_diagonal(calls, 0.0)
        totals = products + calls
        for stage in range(stages.size - 1):
            self.segments.append(Segment({"sparse": products[stage], "overhead": calls[stage]}, totals[stage]))
            if (root := stage + AHEAD) < stages.size:
                nbytes = stages.counts[root] * stages.row_bytes
                sent, received = [0] * self.size, [nbytes] * self.size
                sent[root], received[root] = nbytes * (self.size - 1), 0
                self._start(Message("broadcast", self.link.transfer_s("broadcast", sent, received)))
            self._await(ranks[0].first + stage + 1)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that the link has carried."""

    start: float
    end: float
    """When it has arrived: its latency after its last byte."""
    takes: float
    """Seconds for which it keeps each rank from computing."""


@dataclass(slots=True)
class ActiveSegment:
    """A segment that some ranks have not finished: each rank's work, when the others finished, and how many have not.

    Lists, not arrays: an event looks up one rank.
    """

    work: list[float]
    ended: list[float]
    left: int


class Simulation:
    """Simulates a program to its end; then `parts` and `deliveries` can be read.

    One event after the other: a rank's work ends, or what it waits for has arrived.
    Cost: O(log P) for each work and each wait of a rank.
    """

    def __init__(self, program: Program) -> None:
        self.deliveries: list[Delivery] = []
        self.parts: dict[Kind, Seconds] = {kind: np.zeros(program.size) for kind in KINDS}
        """Where the seconds of every rank (P,) went."""
        self._program = program
        self._now = 0.0
        self._link_free = 0.0
        # When each rank began the first segment that not all of them are done with.
        self._began = np.zeros(program.size)
        # Ranks that wait, by the time at which they continue; at first all of them.
        self._waiting = [(0.0, rank) for rank in range(program.size)]
        # By message that has not started: who waits for it, and since when.
        self._blocked: dict[int, list[tuple[float, int]]] = {}
        self._run()

    def _speeds(self) -> list[float]:
        """Return, by the number of computing ranks, their speed, over that with an equal part of the device for each."""
        program = self._program
        cores = min(program.sharing, program.device.cores) if program.device.shared else program.sharing
        return [program.sharing / max(cores, program.sharing * n / program.size) for n in range(program.size + 1)]

    def _run(self) -> None:
        """Take one event after the other, the earliest first, until no rank computes or waits.

        This is one function for speed: P ranks that each take part in P messages have P^2 events.
        """
        segments, size, speeds = self._program.segments, self._program.size, self._speeds()
        waiting, deliveries = self._waiting, self.deliveries
        # All computing ranks run at one speed, which changes as ranks come and go. So each is queued by what the device
        # will have given to any rank that computes all along when its work ends: that stays when the speed changes.
        given, computing = 0.0, list[tuple[float, int]]()
        # How many segments each rank is done with.
        position = [0] * size
        active: dict[int, ActiveSegment] = {}
        while computing or waiting:
            ends = math.inf
            if computing:
                speed, target = speeds[len(computing)], computing[0][0]
                ends = self._now + (target - given) / speed if target > given else self._now
            if worked := not waiting or ends < waiting[0][0]:
                self._now = ends
                given, rank = heapq.heappop(computing)
            else:
                given += (waiting[0][0] - self._now) * speed if computing else 0.0
                self._now, rank = heapq.heappop(waiting)
            while (number := position[rank]) < len(segments):
                if number not in active:
                    active[number] = ActiveSegment(segments[number].total.tolist(), [0.0] * size, size)
                segment = active[number]
                if not worked and (work := segment.work[rank]) > 0:
                    heapq.heappush(computing, (given + work, rank))
                    break
                worked = False
                position[rank] = number + 1
                segment.ended[rank] = self._now
                segment.left -= 1
                if not segment.left:
                    self._close(segments[number], np.array(active.pop(number).ended))
                awaits = segments[number].awaits
                if awaits is None:
                    continue
                if awaits < len(deliveries):
                    heapq.heappush(waiting, (max(deliveries[awaits].end, self._now + deliveries[awaits].takes), rank))
                else:
                    self._blocked.setdefault(awaits, []).append((self._now, rank))
                break

    def _close(self, segment: Segment, ended: Seconds) -> None:
        """All ranks are done with a segment, the last of them now: its messages are carried, its seconds accounted for."""
        for number in segment.starts:
            self._deliver(number)
        elapsed, some = ended - self._began, segment.total > 0
        for kind, seconds in segment.seconds.items():
            self.parts[kind] += np.divide(seconds * elapsed, segment.total, out=np.zeros_like(ended), where=some)
        self._began = ended
        if segment.awaits is None:
            return
        message = self.deliveries[segment.awaits]
        self._began = np.maximum(message.end, ended + message.takes)
        waited = self._began - ended
        if self._program.messages[segment.awaits].kind == "all_reduce":
            # Until the last rank arrives, a rank is waiting; the rest is the sum itself.
            idle = np.maximum(0.0, message.start - ended)
            self.parts["sums"] += waited - idle
            waited = idle
        self.parts["messages"] += waited

    def _deliver(self, number: int) -> None:
        """Let the link carry a message, which the last rank has started now."""
        message, link = self._program.messages[number], self._program.link
        start = max(self._link_free, self._now)
        self._link_free = start + message.transfer_s
        end = self._link_free + link.latency_s[message.kind]
        takes = (end - start) * link.busy
        self.deliveries.append(Delivery(start, end, takes))
        for since, rank in self._blocked.pop(number, ()):
            heapq.heappush(self._waiting, (max(end, since + takes), rank))
