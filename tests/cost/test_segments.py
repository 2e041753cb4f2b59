"""Items of all ranks side by side: what they cost, however they are written, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from mggcn.aggregate.broadcast import BroadcastPlan
from mggcn.aggregate.steps import Await, Multiply, Send, Stages
from mggcn.cost.epoch import Cost, predict
from mggcn.cost.machine import find_machine
from mggcn.cost.work import Item, Staged, Sum, Work
from mggcn.errors import PlanError

ROW, EDGE = 64, 8
REUSE = ((64 * 256, 0.25), (64 * 1024, 0.5), (64 * 10**9, 0.25))


def items_of(plan: BroadcastPlan, reuse: tuple[tuple[int, float], ...]) -> list[Item]:
    """One aggregation with some work before it and behind it."""
    items: list[Item] = [Work(kind="dense", flop=10**8)]
    for step in plan.steps(16, "fp32", False):
        match step:
            case Multiply():
                touched = min(step.columns, step.nnz) * ROW
                streamed = step.nnz * EDGE + step.rows * (8 + 2 * ROW)
                items.append(
                    Work(kind="sparse", rows=step.nnz, row_bytes=ROW, footprint=touched, streamed=streamed, reuse=reuse)
                )
            case Stages():
                items.append(Staged(step, 0, EDGE, reuse))
            case Send():
                items.append(step)
    return [*items, Work(kind="elementwise", streamed=10**7, calls=3), Sum(10**5)]


def plain(items: Sequence[Item]) -> list[Item]:
    return [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]


@pytest.mark.parametrize("machine", ["xeon-cluster", "assumed-cpu", "dgx-a100"])
@pytest.mark.parametrize("reuse", [(), REUSE], ids=["random", "reuse"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_stages_cost_what_their_items_cost(machine: str, reuse: tuple[tuple[int, float], ...], ranks: int) -> None:
    """Fails if the stages of a broadcast have other seconds than its products and messages one by one, by a bit even."""
    rng = np.random.default_rng(ranks)
    counts = tuple(int(n) for n in rng.integers(1, 200_000, ranks))
    nnz = rng.integers(0, 3_000_000, (ranks, ranks)) * rng.integers(0, 2, (ranks, ranks))
    plans = [BroadcastPlan(rank, counts, tuple(nnz[rank].tolist()), (), False) for rank in range(ranks)]
    lists = [items_of(plan, reuse) for plan in plans]

    def cost(lists: Sequence[Sequence[Item]]) -> Cost:
        return predict(find_machine(machine), "gloo", lists)

    assert sum(isinstance(item, Staged) for items in lists for item in items) == ranks
    assert cost(lists) == cost([plain(items) for items in lists])


def test_stages_of_different_broadcasts_are_refused() -> None:
    """Fails if ranks that disagree about the blocks are given the seconds of one of them."""
    stages = [Stages(rank, (3, 3, 3), (1, 1, 1), 16, ROW) for rank in range(3)]
    alike = [Staged(stage, 0, EDGE, REUSE) for stage in stages]
    others = [
        dataclasses.replace(alike[2], stages=dataclasses.replace(stages[2], counts=(3, 3, 4))),
        dataclasses.replace(alike[2], stages=dataclasses.replace(stages[2], row_bytes=2 * ROW)),
        dataclasses.replace(alike[2], edge=2 * EDGE),
        dataclasses.replace(alike[2], reuse=()),
        alike[1],
    ]

    def cost(staged: Sequence[Staged]) -> Cost:
        lists: list[list[Item]] = [[one.stages.send(0), one.stages.send(1), one] for one in staged]
        return predict(find_machine("xeon-cluster"), "gloo", lists)

    assert cost(alike).seconds > 0
    for other in others:
        with pytest.raises(PlanError, match=r"same messages|disagree about message"):
            cost([*alike[:2], other])


def test_ranks_wait_at_the_same_points() -> None:
    """Fails if a rank that waits where the others do not is given a time: its messages would not be theirs for long."""
    early: list[Item] = [Send("all_to_all", 8, 8), Await(0), Send("all_to_all", 8, 8), Await(1)]
    late: list[Item] = [Send("all_to_all", 8, 8), Send("all_to_all", 8, 8), Await(0), Await(1)]
    with pytest.raises(PlanError, match="in the same order"):
        predict(find_machine("xeon-cluster"), "gloo", [early, late])
