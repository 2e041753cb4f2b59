"""Predicted seconds of a program on a described machine. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mggcn.cost.machine import Machine
from mggcn.cost.simulation import Program, Simulation
from mggcn.cost.work import KINDS, Item, Kind


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a program: until the last rank has ended, and where the time of each rank went."""

    seconds: float
    ranks: tuple[Mapping[Kind, float], ...]
    link_s: float
    """Seconds in which the link was busy."""

    @property
    def critical(self) -> int:
        """The rank whose own work takes longest, for which the others wait."""
        own = [sum(seconds for kind, seconds in parts.items() if kind != "messages") for parts in self.ranks]
        return own.index(max(own))

    @property
    def parts(self) -> Mapping[Kind, float]:
        """Where the time of the critical rank went."""
        return self.ranks[self.critical]


def predict(machine: Machine, transport: str, lists: Sequence[Sequence[Item]]) -> Cost:
    """Return the cost of one program from the items of every rank, in rank order.

    Cost: O(log P) for each item, also of the P^2 that the stages of a broadcast stand for.
    Raises: PlanError if the ranks do not list the same messages; ConfigError if the machine has too few devices.
    """
    program = Program(machine, transport, lists)
    found = Simulation(program)
    awaited = {segment.awaits for segment in program.segments}
    # A message that no rank waits for in this epoch still costs its device time: an older one of its kind arrives
    # instead.
    flying = sum(
        message.end - message.start for number, message in enumerate(found.deliveries) if number not in awaited
    )
    found.parts["messages"] += flying * program.link.busy
    # A link that is busy for longer than the ranks compute sets the pace of epochs that wait for older messages.
    link_s = sum(message.transfer_s for message in program.messages)
    columns = [found.parts[kind].tolist() for kind in KINDS]
    ranks = tuple(dict(zip(KINDS, parts, strict=True)) for parts in zip(*columns, strict=True))
    return Cost(max(*(sum(parts.values()) for parts in ranks), link_s), ranks, link_s)


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Return the average cost of epochs that send different messages."""
    count = len(costs)
    ranks = tuple(
        {kind: sum(parts[kind] for parts in same) / count for kind in KINDS}
        for same in zip(*(cost.ranks for cost in costs), strict=True)
    )
    return Cost(sum(c.seconds for c in costs) / count, ranks, sum(c.link_s for c in costs) / count)
