"""Rewrite that keeps rows in the host's memory between the forward pass, which makes them, and the backward pass, which
reads them.

Kernels and operands stay, and with them the bits. What is freed on the device follows from live ranges, as everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

from mggcn.blocks.block import OWNED
from mggcn.errors import ConfigError
from mggcn.model.kinds.aggregate import Aggregate, Part
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.ends import Input, Loss, StageInput
from mggcn.model.kinds.hosted import Fetched, FromHost, OnHost, ToHost
from mggcn.model.values import Graph, Value


class Kept(NamedTuple):
    """A value that the backward pass reads, by places in the order of its graph.

    made: where it is computed; last: its last reader forwards; first: its first one backwards. sent, begun: the last place
    during which it is copied to the host, and that before which it begins to come back, with a sum over neighbours beside
    either copy where there is one.
    """

    value: Value
    made: int
    last: int
    first: int
    sent: int
    begun: int


def kept_rows(graph: Graph) -> list[Kept]:
    """Return the values that could be on the host, those first which nothing reads for longest.

    Raises: ConfigError for a program over other rows than a rank's own.
    """
    order = graph.values()
    if any(value.rows is not OWNED for value in order):
        raise ConfigError(
            "run.capacity host is for programs over the vertices of a rank, not for batches or links; set "
            "run.capacity=memory"
        )
    place = {value: index for index, value in enumerate(order)}
    loss = next(index for index, value in enumerate(order) if isinstance(value.kind, Loss))
    sums = [index for index, value in enumerate(order) if isinstance(value.kind, Aggregate)]
    # A part is memory of its node, or for "" that of the node's operand: no other place may stand for it.
    parts = [value for value in order if isinstance(value.kind, Part)]
    aliased = {part.operands[0].operands[0] for part in parts if isinstance(part.kind, Part) and not part.kind.purpose}
    aliased |= {value.operands[0] for value in order if isinstance(value.kind, Own)}
    found = list[Kept]()
    for value, users in graph.users().items():
        readers = [place[user] for user in users if not isinstance(user.kind, Part)]
        made = place[value]
        if made >= loss or max(readers, default=0) <= loss or value in aliased or not _movable(value):
            continue
        last = max((index for index in readers if index <= loss), default=made)
        first = min(index for index in readers if index > loss)
        beside = any(made < index <= last for index in sums)
        sent = last if beside else next((index for index in sums if last < index < loss), last)
        begun = max((index for index in sums if loss < index < first), default=first)
        found.append(Kept(value, made, last, first, sent, begun))
    return sorted(found, key=lambda kept: (kept.last - kept.first, kept.made))


def _movable(value: Value) -> bool:
    return value.kind.stored and not isinstance(value.kind, Input | Part | Own | StageInput)


def most_steps(graph: Graph) -> int:
    """Return how many steps `keep_on_host` can take. Raises: as `kept_rows`."""
    return 2 * len(kept_rows(graph))


def keep_on_host(graph: Graph, steps: int) -> Graph:
    """Keep rows on the host, with less memory of the device in each step: first value by value, copied beside sums over
    neighbours; then, from the value that comes first, with no op beside but those that read it: its memory is free sooner,
    and taken later.

    Every value of the result is a root, so that copies begin and end where they are put. Raises: as `kept_rows`.
    """
    found = kept_rows(graph)
    at_once = max(0, steps - len(found))
    chosen = [
        kept._replace(sent=kept.last, begun=kept.first) if number < at_once else kept
        for number, kept in enumerate(found[:steps])
    ]
    slots = dict(enumerate(sorted(chosen, key=lambda kept: kept.made), 1))
    # What is needed first comes back first.
    back = sorted(slots.items(), key=lambda item: item[1].first)
    done, coming, came, roots = dict[Value, Value](), dict[int, Value](), dict[Value, Value](), list[Value]()
    for index, old in enumerate(graph.values()):
        begun = {slot: _fetching(FromHost(slot), kept.value) for slot, kept in back if kept.begun == index}
        coming |= begun
        here = {kept.value: _fetching(Fetched(n), kept.value, coming[n]) for n, kept in back if kept.first == index}
        came |= here
        read = done if isinstance(old.kind, Part) else done | came
        new = old.on(*(read[operand] for operand in old.operands))
        done[old] = new
        roots += [*begun.values(), *here.values(), new]
        roots += [Value(ToHost(slot), (new,)) for slot, kept in slots.items() if kept.made == index]
        roots += [Value(OnHost(n), (done[kept.value],)) for n, kept in slots.items() if kept.sent == index]
    return Graph(tuple(roots))


def _fetching(kind: FromHost | Fetched, like: Value, *operands: Value) -> Value:
    return Value(kind, operands, like.cols, operand=like.operand)
