"""What rows of other ranks that come from a cache add to a plan: their messages, lines and lists. Needs no torch.

K vertices of a rank's halo, P ranks.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mggcn.aggregate.history import HistoryPlan
from mggcn.aggregate.history_cache import Cache
from mggcn.aggregate.local import LocalPlan
from mggcn.aggregate.steps import bytes_sent
from mggcn.blocks.block import Stack
from mggcn.config import Config
from mggcn.memory.arena import BufferSpec
from mggcn.memory.units import human
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.elementwise import Elementwise
from mggcn.model.lower import Plans, aggregations
from mggcn.model.program import Program
from mggcn.model.values import Graph, Value
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import row_stats
from mggcn.planning.shape import GraphShape

LIST_BYTES: Final = 64
"""Bytes a row of a batch while a thread finds those of other ranks: owners, places, keys and their search."""


def history_plan(
    config: Config, stats: PartitionStats, rank: int, local: LocalPlan, kind: Aggregate, operand: Value, steps: int
) -> HistoryPlan:
    """Return the plan of a block over which an aggregation runs. operand: what it sums; steps: of an epoch."""
    sample = config.sample
    received, sent = exchanged(stats, rank)
    cache = Cache(
        received=received,
        sent=sent,
        most_lines=sample.history_lines,
        life=-1 if _is_constant(operand) else sample.history_life,
        pushed=sample.history_rows,
        delay=sample.history_delay,
        ends=sample.history_ends == "paper",
        rest=sample.history_missing == "rest",
        steps=steps,
    )
    return HistoryPlan(local, kind.site, cache)


def exchanged(stats: PartitionStats, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many vertices of each rank one reads, and how many of its own each reads."""
    needed = row_stats(stats).tiles.rows_needed
    others = np.arange(needed.shape[0]) != rank
    return tuple((needed[rank] * others).tolist()), tuple((needed[:, rank] * others).tolist())


def _is_constant(value: Value) -> bool:
    """Whether rows are the same in every step: nothing below them is learnt, drawn or dropped."""
    return not any(
        one.kind.has_parameters
        or isinstance(one.kind, Aggregate)
        or (isinstance(one.kind, Elementwise) and one.kind.spec.dropout)
        for one in Graph((value,)).values()
    )


def history_feed_bytes(config: Config, stats: PartitionStats, stack: Stack, rank: int) -> int:
    """Return the bytes of what batches on their way know of other ranks' rows, and of the lists by which they know it."""
    if not config.reads_history:
        return 0
    received, sent = exchanged(stats, rank)
    pushed = 8 * len(stack.blocks) * sum(min(config.sample.history_rows, count) for count in sent)
    one = (16 + LIST_BYTES) * stack.capacities[0].sources + pushed
    return (config.sample.ahead + 1) * one + 8 * (sum(received) + sum(sent))


def unread_cache(config: Config, shape: GraphShape, steps: int) -> str:
    """Say that no step of an epoch sends rows or reads a cache, and what to do; "" if some do, or training vertices are not
    known.
    """
    sample = config.sample
    if not (config.reads_history and sample.history_ends == "paper" and shape.num_training):
        return ""
    if sample.history_delay < steps:
        return ""
    missing = "all LEFT OUT" if sample.history_missing == "rest" else "all ZERO"
    return (
        f"rows of other ranks' vertices are {missing}, and none are sent: under sample.history_ends paper of an epoch's "
        f"steps the first {sample.history_delay} read no cache, and an epoch has {steps}; set "
        "sample.history_ends=keep, or a smaller sample.history_delay or sample.batch"
    )


def history_lines(
    config: Config, shape: GraphShape, steps: int, program: Program, plans: Plans, operand: str
) -> list[str]:
    """Say what a step approximates, sends and keeps; nothing if it computes all rows. steps: of an epoch; operand: type of
    the rows.
    """
    if not config.reads_history:
        return []
    if unread := unread_cache(config, shape, steps):
        return [f"  training gradients are APPROXIMATE, evaluation is exact: {unread}"]
    sample, lines = config.sample, list[str]()
    for op, kind in aggregations(program.ops):
        plan = plans[kind.block]
        if kind.backward or not isinstance(plan, HistoryPlan):
            continue
        nbytes = sum(spec.nbytes for spec in plan.state(kind.name, op.cols, operand)) + plan.index_bytes
        sent = bytes_sent(plan.steps(op.cols, operand, False))
        most, _ = plan.cache.messages(BufferSpec("", 1, op.cols, operand).nbytes)
        age = "of any age, because they never change" if plan.cache.life < 0 else f"of at most {plan.cache.life} steps"
        lines.append(
            f"  {kind.block.name}: {plan.cache.lines:,} lines of {op.cols} columns, {age}; up to {sum(most.most):,} rows, "
            f"{human(sent)}, are sent in a step; {human(nbytes)} with messages on their way"
        )
    late = f"{sample.history_delay} step{'s' * (sample.history_delay != 1)} late" if sample.history_delay else "at once"
    left = "what is left of a row counts as all of it" if sample.history_missing == "rest" else "they count as zeros"
    return [
        "  training gradients are APPROXIMATE (rows of other ranks' vertices come from a cache), evaluation is exact: "
        f"rows arrive {late}; of those that are not there {left}",
        *reversed(lines),
    ]
