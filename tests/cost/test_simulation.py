"""Items of all ranks side by side: when each rank ends, what they cost, however they are written, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from mggcn.aggregate.broadcast import BroadcastPlan
from mggcn.aggregate.edge_op import Arithmetic
from mggcn.aggregate.steps import Await, Multiply, Send, Stages
from mggcn.cost.epoch import Cost, predict
from mggcn.cost.machine import Machine, find_machine
from mggcn.cost.simulation import Program, Simulation
from mggcn.cost.work import Item, Staged, Sum, Work, work_seconds
from mggcn.errors import PlanError

ROW, EDGE = 64, 8
REUSE = ((64 * 256, 0.25), (64 * 1024, 0.5), (64 * 10**9, 0.25))


def items_of(plan: BroadcastPlan, reuse: tuple[tuple[int, float], ...], along: Arithmetic | None = None) -> list[Item]:
    """One aggregation with some work before it and behind it."""
    items: list[Item] = [Work(kind="dense", flop=10**8)]
    for step in plan.steps(16, "fp32", False):
        match step:
            case Multiply():
                touched = min(step.columns, step.nnz) * ROW
                streamed = step.nnz * EDGE + step.rows * (8 + 2 * ROW)
                work = Work(
                    kind="sparse", rows=step.nnz, row_bytes=ROW, footprint=touched, streamed=streamed, reuse=reuse
                )
                items.append(dataclasses.replace(work, along=along))
            case Stages():
                items.append(Staged(stages=step, first=0, edge=EDGE, reuse=reuse, along=along))
            case Send():
                items.append(step)
    return [*items, Work(kind="elementwise", streamed=10**7, calls=3), Sum(10**5)]


def plain(items: Sequence[Item]) -> list[Item]:
    return [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]


@pytest.mark.parametrize("machine", ["xeon-cluster", "assumed-cpu", "dgx-a100", "hgx-h200"])
@pytest.mark.parametrize("reuse", [(), REUSE], ids=["random", "reuse"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("along", [None, Arithmetic("gat", 2, 16)], ids=["sums", "attention"])
def test_stages_cost_what_their_items_cost(
    machine: str, reuse: tuple[tuple[int, float], ...], ranks: int, along: Arithmetic | None
) -> None:
    """Fails if the stages of a broadcast have other seconds than its products and messages one by one, by a bit even."""
    rng = np.random.default_rng(ranks)
    counts = tuple(int(n) for n in rng.integers(1, 200_000, ranks))
    nnz = rng.integers(0, 3_000_000, (ranks, ranks)) * rng.integers(0, 2, (ranks, ranks))
    plans = [BroadcastPlan(rank, counts, tuple(nnz[rank].tolist()), (), False) for rank in range(ranks)]
    lists = [items_of(plan, reuse, along) for plan in plans]
    found = find_machine(machine)
    device = dataclasses.replace(found.device, edge_s={"gat": (1e-8, 1e-9, 1e-10)}, op_s=3e-4, pace=1.25)

    def cost(lists: Sequence[Sequence[Item]]) -> Cost:
        return predict(dataclasses.replace(found, device=device), "gloo", lists)

    assert sum(isinstance(item, Staged) for items in lists for item in items) == ranks
    assert cost(lists) == cost([plain(items) for items in lists])


def test_stages_of_different_broadcasts_are_refused() -> None:
    """Fails if ranks that disagree about the blocks are given the seconds of one of them."""
    stages = [Stages(rank, (3, 3, 3), (1, 1, 1), 16, ROW) for rank in range(3)]
    alike = [Staged(stages=stage, first=0, edge=EDGE, reuse=REUSE) for stage in stages]
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


def sample(seed: int, ranks: int) -> tuple[Machine, list[list[Item]]]:
    """Broadcasts, two under way at a time, with work between them: nearly equal, very different or none; then a sum."""
    draw = random.Random(seed)
    machine = find_machine(draw.choice(["xeon-cluster", "assumed-cpu"]))
    busy, spread, nbytes = (
        draw.choice([0.0, 0.3, 1.0]),
        draw.choice([0.0, 0.1, 5.0]),
        draw.choice([10**4, 10**7, 10**9]),
    )
    links = tuple(dataclasses.replace(link, busy=busy) for link in machine.links)
    roots, lists = range(12), []
    for me in range(ranks):
        sends = [Send("broadcast", nbytes * (root == me), nbytes * (root != me), root) for root in roots]
        items: list[Item] = [*sends[:2]]
        for number in roots:
            items.append(Await(number))
            if draw.random() > 0.1:
                items.append(Work(kind="dense", flop=int(1e8 * (1 + spread * draw.random()))))
            items += sends[number + 2 : number + 3]
        lists.append([*items, Sum(nbytes), Work(kind="dense", flop=10**6)])
    return dataclasses.replace(machine, links=links), lists


def ends_of(machine: Machine, lists: Sequence[Sequence[Item]]) -> list[float]:
    """Return when each rank ends its list. A twin that looks at all ranks whenever anything ends."""
    size, sharing, link = len(lists), machine.sharing(len(lists)), machine.link(len(lists), "gloo")
    queues = [deque(items) for items in lists]
    left, ends, now, free = [0.0] * size, [0.0] * size, 0.0, 0.0
    posted: list[list[Send | Sum]] = [[] for _ in lists]
    waits: dict[int, tuple[int, float]] = {}
    arrivals: list[tuple[float, float]] = []
    while True:
        for rank, queue in enumerate(queues):
            while queue and not left[rank] and rank not in waits:
                item = queue.popleft()
                if isinstance(item, Work):
                    left[rank] = sum(work_seconds(item, machine.device, sharing))
                elif isinstance(item, Send | Sum):
                    posted[rank].append(item)
                if isinstance(item, Await | Sum):
                    waits[rank] = (item.message if isinstance(item, Await) else len(posted[rank]) - 1, now)
            ends[rank] = ends[rank] if left[rank] or rank in waits or ends[rank] else now
        for message in zip(*(items[len(arrivals) :] for items in posted), strict=False):
            start = max(free, now)
            sends = [item for item in message if isinstance(item, Send)]
            ring = [2 * item.nbytes * (size - 1) // size for item in message if isinstance(item, Sum)]
            moved = ([item.sent for item in sends] or ring, [item.received for item in sends] or ring)
            kind = sends[0].kind if sends else "all_reduce"
            free = start + link.transfer_s(kind, *moved)
            arrives = free + link.latency_s[kind]
            arrivals.append((arrives, link.busy * (arrives - start)))
        known = {rank: arrivals[m] + (since,) for rank, (m, since) in waits.items() if m < len(arrivals)}
        wakes = {rank: max(arrives, since + takes) for rank, (arrives, takes, since) in known.items()}
        computing = [rank for rank in range(size) if left[rank]]
        if not wakes and not computing:
            return ends
        # A rank has its part of a shared device, and of what others leave as much as one core.
        most = max(1.0, sharing / machine.device.cores) if machine.device.shared else 1.0
        speed = min(most, size / max(len(computing), 1))
        step = min([left[rank] / speed for rank in computing] + [wake - now for wake in wakes.values()])
        now += step
        for rank in computing:
            left[rank] = rest if (rest := left[rank] - step * speed) > 1e-13 else 0.0
        waits = {rank: wait for rank, wait in waits.items() if wakes.get(rank, now + 1) > now + 1e-13}


SAMPLES = {
    (7181, 2): (2.500163926343182, 2.399570333224545),
    (20407, 3): (0.33307333250000004, 0.27740000000000004),
    (3391, 5): (0.5289784561, 0.4213033059933334),
    (55813, 17): (2.59013370776091, 2.4006000000000003),
    (902, 40): (4.833060199583073, 3.902400000000001),
    (61297, 64): (735.03846, 629.5752791666665),
    (18233, 2): (0.2076851643866667, 0.14031555584000002),
    (4409, 5): (2.5611948887225022, 2.4006000000000007),
    (77261, 17): (186.72175487308323, 160.00240000000008),
    (30539, 64): (2.5971507793693185, 2.398849229593409),
}
"""By seed and ranks: seconds, and those in which the critical rank waits, as two implementations gave them."""


@pytest.mark.parametrize(("seed", "ranks"), SAMPLES)
def test_ranks_end_when_a_simpler_simulation_says(seed: int, ranks: int) -> None:
    """Fails if a rank without work, one that overtakes others or a message that takes from computing is handled wrongly."""
    machine, lists = sample(seed, ranks)
    parts = Simulation(Program(machine, "gloo", lists)).parts
    assert sum(parts.values()) == pytest.approx(ends_of(machine, lists), rel=1e-9)


@pytest.mark.parametrize(("seed", "ranks"), SAMPLES)
def test_predicted_seconds_are_kept_to_the_bit(seed: int, ranks: int) -> None:
    """Fails if the order of the sums, or who ends first among equals, changes: `auto` compares these numbers."""
    machine, lists = sample(seed, ranks)
    cost = predict(machine, "gloo", lists)
    assert (cost.seconds, cost.parts["messages"]) == SAMPLES[seed, ranks]
