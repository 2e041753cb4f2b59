"""What a step on batches exchanges beside its sums: features of other ranks' vertices, from their owners, letters
(blocks/letters.py) if owners draw edges, too, and learned rows.

Sizes are those of drawn batches, where some were drawn to be counted; else every vertex has any of the P ranks as its owner
with the same chance. Needs no torch. Source of the bytes: BatchGNN, eq. 2 and 3; the seconds of a message are the link's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.steps import Send
from mggcn.blocks.letters import WORD
from mggcn.blocks.macrobatch import COUNT_BYTES, ID_BYTES, Macrobatches
from mggcn.cost.batches import GATHER_RATE, ROW_S, RelayCost
from mggcn.cost.machine import Link, Machine
from mggcn.cost.work import ring_bytes
from mggcn.planning.batch_rows import ReadRows, fetch_plan, row_bytes_of
from mggcn.planning.batches import answer_plan, mean_stack
from mggcn.planning.run import SIGNALS, RankPlan, RunPlan

KIND: Final[Literal["all_to_all"]] = "all_to_all"
TOLD_BYTES: Final = 8
"""Of a count of learned rows."""


def transport_of(plan: RunPlan) -> str:
    """Return the transport by which a run's ranks exchange messages."""
    run = plan.config.run
    return run.process_transport if run.transport == "auto" else run.transport


def relays(plan: RunPlan) -> list[list[tuple[Send, ...]]]:
    """Return the exchanges of every relay that is counted, or of one as it is expected: counts, ids and rows, of each rank.

    For a plan whose ranks fetch rows (`sample.rows = owners`).
    """
    config, ranks, read = plan.config, len(plan.ranks), plan.read
    row = row_bytes_of(config, plan.shape.num_features)
    if read is None:
        most = [fetch_plan(config, plan.shape, rank.sizes.owned).rows for rank in plan.ranks]
        many = _batches(plan) * _remote(plan)
        sizes = [[(min(many, room),) * 2 for room in most]]
    else:
        size = _batches(plan)
        counted = zip(read.fetched[size].tolist(), read.fetched_from[size].sum(1).tolist(), strict=True)
        sizes = [list(zip(fetched, asked, strict=True)) for fetched, asked in counted]
    return [_exchanges(relay, ranks, row) for relay in sizes]


def _exchanges(relay: Iterable[tuple[int, int]], ranks: int, row: int) -> list[tuple[Send, ...]]:
    """Return the three exchanges of a relay, of which each rank fetches and is asked for so many rows."""
    told, both = COUNT_BYTES * (ranks - 1), list(relay)
    return [
        tuple(Send(KIND, told, told) for _ in both),
        tuple(Send(KIND, ID_BYTES * fetched, ID_BYTES * asked) for fetched, asked in both),
        tuple(Send(KIND, row * asked, row * fetched) for fetched, asked in both),
    ]


def relay_cost(plan: RunPlan, machine: Machine) -> RelayCost | None:
    """Return what fetching rows of other ranks takes beside a step, and their edges where owners draw these; None where
    every rank reads all by itself.
    """
    if not plan.config.fetches_rows:
        return None
    if plan.config.draws_at_owners:
        return _wave_cost(plan, machine)
    link, found = machine.link(len(plan.ranks), transport_of(plan)), relays(plan)
    seconds = [[link.transfer_s(KIND, *_bytes(exchange)) for exchange in relay] for relay in found]
    row, steps = row_bytes_of(plan.config, plan.shape.num_features), _batches(plan)
    served = [max(send.received for send in ids) / ID_BYTES for _, ids, _ in found]
    return RelayCost(
        exchanges=tuple(sum(of) / len(found) for of in zip(*seconds, strict=True)),
        latency_s=link.latency_s[KIND],
        served_s=sum(served) / len(found) * (ROW_S + row / GATHER_RATE),
        batches=steps,
        a_step=len(found) / (plan.read.drawn if plan.read is not None else steps),
        early=plan.config.sample.ahead > 0,
        busy=link.busy,
        sums_s=_sums_s(plan, link),
        counted=plan.read is not None,
    )


def _sums_s(plan: RunPlan, link: Link) -> float:
    """Return the seconds of a step's own sums over ranks."""
    summed = (plan.ranks[0].gradient_bytes, 8 * SIGNALS)
    sums = [[ring_bytes(nbytes, rank.ranks) for rank in plan.ranks] for nbytes in summed]
    return sum(link.message_s("all_reduce", moved, moved) for moved in sums)


def letters(plan: RunPlan) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Return the words of the letters of every macrobatch that is counted, or of one as it is expected, stage by stage,
    from rank to rank (.., P, P), and of how many steps they are.

    For a plan whose owners draw edges (`sample.rows = parts`).
    """
    config, answers, size = plan.config, answer_plan(plan.config, plan.shape), _batches(plan)
    row = row_bytes_of(config, plan.shape.num_features)
    if plan.read is not None:
        return plan.read.letters(size, row, answers), plan.read.drawn
    return _expected(plan, size).letters(1, row, answers), size


def _expected(plan: RunPlan, batches: int) -> ReadRows:
    """Return what so many batches are expected to read together, as if they were one."""
    assert plan.stack is not None
    ranks, hops = len(plan.ranks), tuple(reversed(mean_stack(plan.stack).capacities))
    asked, told = (
        np.broadcast_to(np.array([batches * n // ranks for n in of])[None, None, :, None], (1, ranks, len(hops), ranks))
        for of in ([size.targets for size in hops], [size.edges for size in hops])
    )
    room = min(fetch_plan(plan.config, plan.shape, rank.sizes.owned).rows for rank in plan.ranks)
    fetched = np.full((1, ranks, ranks), min(batches * _remote(plan), room) // max(ranks - 1, 1))
    none = np.zeros((1, ranks), np.int64)
    counts = dict.fromkeys(("inner", "read", "remote", "served", "entries", "last"), none)
    return ReadRows(
        num_vertices=plan.shape.num_vertices,
        steps=plan.steps,
        fetched={},
        fetched_from={1: fetched},
        asked=asked,
        told=told,
        **counts,
    )


def _wave_cost(plan: RunPlan, machine: Machine) -> RelayCost:
    """Return what letters take. What owners draw and gather for others is a batch's: a thread does it beside the step."""
    link, ranks, size = machine.link(len(plan.ranks), transport_of(plan)), len(plan.ranks), _batches(plan)
    found, steps = letters(plan)
    many, early = len(found[0]), plan.config.sample.ahead > 0
    told = [WORD * (ranks - 1)] * ranks
    announced = link.transfer_s(KIND, told, told)
    slots = list[float | None]()
    for stage in found:
        moved = [[(WORD * words.sum(axis)).tolist() for axis in (1, 0)] for words in stage]
        # A letter is announced, sent, and answered while the next message is under way.
        slots += [announced, sum(link.transfer_s(KIND, *of) for of in moved) / many, None]
    return RelayCost(
        exchanges=_together(slots, size) if early else tuple(s for s in slots if s is not None),
        latency_s=link.latency_s[KIND],
        served_s=0.0,
        batches=size,
        a_step=many / steps,
        early=early,
        busy=link.busy,
        sums_s=_sums_s(plan, link),
        counted=plan.read is not None,
        edges=True,
    )


def _together(slots: Sequence[float | None], batches: int) -> tuple[float, ...]:
    """Return the seconds of each message of the steps from a macrobatch to the next, which has all that is due then."""
    due = [[s for s in slots[first::batches] if s is not None] for first in range(min(batches, len(slots)))]
    return tuple(sum(of) for of in due if of)


def rows_given(plan: RunPlan) -> int:
    """Return the rows that a rank gathers for others beside a step, on average: where owners draw edges."""
    if not plan.config.draws_at_owners:
        return 0
    if plan.read is None:
        return _remote(plan)
    return plan.read.num_fetched(_batches(plan)) // (plan.read.drawn * len(plan.ranks))


def learned_exchanges(plan: RunPlan, rank: RankPlan) -> tuple[Send, ...]:
    """Return what a rank sends and receives of the learned rows of a step: counts, numbers of rows, rows, gradients."""
    row = row_bytes_of(plan.config, plan.shape.num_features)
    remote = asked = _remote(plan)
    if plan.read is not None and not plan.config.shares_batches:
        remote, asked = (
            -(-int(of[:, rank.rank].sum()) // plan.read.drawn) for of in (plan.read.remote, plan.read.served)
        )
    told = TOLD_BYTES * (rank.ranks - 1)
    return (
        Send(KIND, told, told),
        Send(KIND, ID_BYTES * remote, ID_BYTES * asked),
        Send(KIND, row * asked, row * remote),
        Send(KIND, row * remote, row * asked),
    )


def _batches(plan: RunPlan) -> int:
    """Return the batches of a macrobatch: of those that were drawn, if some were."""
    size = plan.config.sample.macro
    if plan.read is None:
        return Macrobatches(plan.steps, size).batches
    return min(size or plan.read.drawn, plan.read.drawn)


def _remote(plan: RunPlan) -> int:
    """Return how many rows of other ranks a rank's batch reads, where owners are drawn."""
    assert plan.stack is not None
    ranks = len(plan.ranks)
    return mean_stack(plan.stack).capacities[0].sources * (ranks - 1) // ranks


def _bytes(exchange: Iterable[Send]) -> tuple[list[int], list[int]]:
    sends = list(exchange)
    return [send.sent for send in sends], [send.received for send in sends]
