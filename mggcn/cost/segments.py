"""The items of all ranks, cut into segments where a message starts or is awaited.

All ranks list the same messages in the same order, and wait for them at the same points of their lists: so what each
computes between two such points can lie side by side in arrays. P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.steps import AHEAD, Await, Send
from mggcn.cost.machine import Machine, MessageKind
from mggcn.cost.work import Item, Kind, Staged, Sum, Work, call_seconds, ring_bytes, staged_seconds, work_seconds
from mggcn.errors import PlanError

Seconds = npt.NDArray[np.float64]
Job = Mapping[Kind, float]
Action = Send | Await | Sum | Staged | None
"""What ends a rank's work: None at the end of its list."""
DIFFERENT = "the ranks of a program do not list the same messages in the same order: some rank waits for ever"


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
    """A message: its kind, and the seconds for which it holds the link."""

    kind: MessageKind
    transfer_s: float


class Program:
    """Segments and messages of a program, from the items of every rank.

    Raises: PlanError if the ranks do not list the same messages, or one waits for a message that it has not started;
    ConfigError as Machine.sharing.
    """

    def __init__(self, machine: Machine, transport: str, lists: Sequence[Sequence[Item]]) -> None:
        self.size = len(lists)
        self.link = machine.link(self.size, transport)
        self.device = machine.device
        self.sharing = machine.sharing(self.size)
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        # Ranks of equal sizes do the same: the seconds of equal work are worked out once.
        known: dict[Work, tuple[float, float]] = {}
        for pieces in zip(*(self._pieces(items, known) for items in lists), strict=True):
            self._add_work([job for job, _ in pieces])
            self._add_action([action for _, action in pieces])

    def _pieces(self, items: Sequence[Item], known: dict[Work, tuple[float, float]]) -> Iterator[tuple[Job, Action]]:
        """Yield what a rank computes up to an action, and the action: None at the end."""
        job: dict[Kind, float] = {}
        for item in items:
            if not isinstance(item, Work):
                yield job, item
                job = {}
                continue
            if item not in known:
                known[item] = work_seconds(item, self.device, self.sharing)
            seconds, calls = known[item]
            job[item.kind] = job.get(item.kind, 0.0) + seconds
            job["overhead"] = job.get("overhead", 0.0) + calls
        yield job, None

    def _add_work(self, jobs: Sequence[Job]) -> None:
        totals = [sum(job.values()) for job in jobs]
        if not any(totals):
            return
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
        """Return the segment that goes on: a new one if the last ended with a wait."""
        if not self.segments or self.segments[-1].awaits is not None:
            self.segments.append(Segment({}, np.zeros(self.size)))
        return self.segments[-1]

    def _start(self, message: Message) -> None:
        self._last().starts.append(len(self.messages))
        self.messages.append(message)

    def _await(self, number: int) -> None:
        if number >= len(self.messages):
            raise PlanError(f"a rank waits for message {number}, of which it has started {len(self.messages)}")
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
        calls = np.full_like(products, call_seconds(1, self.device, self.sharing))
        np.fill_diagonal(calls, 0.0)
        totals = products + calls
        for stage in range(stages.size - 1):
            self.segments.append(Segment({"sparse": products[stage], "overhead": calls[stage]}, totals[stage]))
            if (root := stage + AHEAD) < stages.size:
                self._start(self._block(stages.counts[root] * stages.row_bytes, root))
            self._await(ranks[0].first + stage + 1)

    def _block(self, nbytes: int, root: int) -> Message:
        """Return the broadcast of a block."""
        sent, received = [0] * self.size, [nbytes] * self.size
        sent[root], received[root] = nbytes * (self.size - 1), 0
        return Message("broadcast", self.link.transfer_s("broadcast", sent, received))
