"""Prices of the two ways in which ranks take a batch: each computes all rows that its own training vertices need, or every
row is computed once, by its owner, and sent to those that read it. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mggcn.aggregate.shared import SharedPlan
from mggcn.aggregate.steps import bytes_sent
from mggcn.blocks.block import Block, Capacity, Stack
from mggcn.blocks.capacities import hops_of
from mggcn.config import Config
from mggcn.cost.batches import EAGER_S
from mggcn.cost.epoch import Cost
from mggcn.cost.machine import Machine
from mggcn.memory.device import DEVICES, not_captured
from mggcn.memory.units import human
from mggcn.model.lower import aggregations
from mggcn.planning.batches import bound_stack, pads_batches
from mggcn.planning.cost_text import seconds_text
from mggcn.planning.op_cost import batch_cost, training_cost
from mggcn.planning.run import RunPlan, plan_run
from mggcn.planning.shape import GraphShape


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """What batches have on average, in one of the two ways.

    stack: the blocks of a step, each as large as on the rank that has most of it. rows: of all ranks and row sets, those of
    the input too; distinct: the different ones among them. exchanged: rows that all ranks send for a block in `steps`
    steps, forth and back.
    """

    stack: Stack
    rows: float
    distinct: float
    exchanged: Mapping[Block, tuple[int, int]] = field(default_factory=dict)
    steps: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPrice:
    """What one of the two ways costs on a machine. rows: of a batch on all ranks; overlap: over the distinct ones;
    bytes_sent: by all ranks in an epoch; step: computing and messages of a step alone; step_s: seconds from a step to the
    next; epoch_s: of an epoch.
    """

    rows: float
    overlap: float
    bytes_sent: int
    step: Cost
    step_s: float
    epoch_s: float

    def line(self) -> str:
        """Return the price in words."""
        return (
            f"{self.rows:,.0f} rows of a batch on all ranks, {self.overlap:.2f} times the distinct ones; "
            f"{human(self.bytes_sent)} sent in an epoch by all; a step every {seconds_text(self.step_s)}, an epoch "
            f"{seconds_text(self.epoch_s)}"
        )

    def to_dict(self) -> dict[str, float]:
        """Return the price as plain values, for JSON."""
        numbers = {"rows_per_batch": self.rows, "rows_over_distinct": self.overlap}
        sent = {"bytes_sent_by_all_ranks_per_epoch": self.bytes_sent}
        return numbers | sent | {"step_seconds": self.step_s, "epoch_seconds": self.epoch_s}


def mean_stack_of(seeds: int, sizes: Sequence[Sequence[int]]) -> Stack:
    """Return the blocks of a step of so many seeds. sizes: of each hop, hop 0 first, as the fields of a Capacity after
    targets.
    """
    capacities, targets = list[Capacity](), seeds
    for sources, *others in sizes:
        capacities.append(Capacity.of((targets, max(sources, targets), *others)))
        targets = capacities[-1].sources
    return hops_of(capacities)


def expected_sizes(config: Config, shape: GraphShape) -> dict[str, BatchSizes]:
    """Return the sizes in both ways, by the value of run.batches, of a graph of which only the shape is known.

    Within the bounds of fan-outs; every vertex has any of the ranks as its owner with the same chance.
    """
    ranks = config.run.ranks
    own, shared = (bound_stack(with_batches(config, way), shape) for way in ("independent", "cooperative"))
    hops, sizes, exchanged = tuple(reversed(shared.together)), list[Sequence[int]](), dict[Block, tuple[int, int]]()
    for block, hop in zip(reversed(shared.blocks), hops, strict=True):
        edges = -(-hop.edges // ranks)
        # Edges of a rank's rows, of which one in P begins at a row of its own; no row is received twice.
        forth, back = (min(edges, rows) * (ranks - 1) // ranks for rows in (hop.sources, hop.targets))
        sizes.append((-(-hop.sources // ranks), edges, forth, forth, back, back, edges))
        exchanged[block] = ranks * forth, ranks * back
    stack = mean_stack_of(-(-hops[0].targets // ranks), sizes)
    stack = dataclasses.replace(stack, together=shared.together, exchanged=shared.exchanged)
    distinct, each = (float(sum(found.rows.values())) for found in (hops_of(hops), own))
    return {
        "independent": BatchSizes(stack=own, rows=ranks * each, distinct=distinct),
        "cooperative": BatchSizes(stack=stack, rows=distinct, distinct=distinct, exchanged=exchanged),
    }


def with_batches(config: Config, way: str) -> Config:
    """Return the configuration with run.batches = way."""
    run: dict[str, Any] = {"batches": way}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **run))


def batch_price(plan: RunPlan, sizes: BatchSizes, machine: Machine) -> BatchPrice:
    """Price a plan's epoch with batches of these sizes, without evaluation. Cost: a plan of every rank.

    Batches that are filled up are priced as large as they are planned. Raises: PlanError, ConfigError as `training_cost`.
    """
    config = plan.config
    priced = plan
    if not pads_batches(config):
        known: dict[str, Any] = {"figures": plan.figures, "stack": sizes.stack}
        priced = plan_run(plan.chosen, plan.shape, plan.stats, plan.strategy, plan.nccl, **known)
    if not DEVICES[config.run.device].is_host and not_captured(config):
        device = dataclasses.replace(machine.device, call_s=max(machine.device.call_s, EAGER_S))
        machine = dataclasses.replace(machine, device=device)
    step, batch = training_cost(priced, machine), batch_cost(priced, machine)
    step_s = step.seconds if batch is None else batch.step_s(step.seconds)
    return BatchPrice(
        rows=sizes.rows,
        overlap=sizes.rows / max(sizes.distinct, 1),
        bytes_sent=round(plan.steps * _sent(plan, sizes)),
        step=step,
        step_s=step_s,
        epoch_s=plan.steps * step_s,
    )


def _sent(plan: RunPlan, sizes: BatchSizes) -> float:
    """Return the bytes that all ranks send in a step."""
    rank, exchanged, rows = plan.ranks[0], 0, dict(sizes.exchanged)
    blocks = () if plan.stack is None else plan.stack.exchanged  # others' rows are gathered by each rank
    for op, kind in aggregations(rank.train.ops):
        if kind.block in blocks and kind.block in rows:
            forth, back = rows[kind.block]
            moved = SharedPlan(Capacity(0, 0, 0, sent=forth, sent_back=back), len(plan.ranks))
            exchanged += bytes_sent(moved.steps(op.cols, rank.sizes.operand, kind.backward, 0, kind.op))
    return exchanged / sizes.steps + sum(one.bytes_summed(one.train) for one in plan.ranks)
