"""Predicted seconds of a plan on a machine, and the papers' analyses of it, as text and as plain values. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from mggcn.config import ModelConfig, SampleConfig
from mggcn.cost.analysis import AggregationWork, aggregation_work, analyse_15d, work_lines
from mggcn.cost.batches import BatchCost
from mggcn.cost.epoch import Cost
from mggcn.cost.machine import Machine
from mggcn.cost.work import KINDS
from mggcn.errors import ConfigError, PlanError
from mggcn.memory.units import human
from mggcn.planning.op_cost import EpochCost, epoch_cost, training_cost
from mggcn.planning.run import RunPlan, plan_run
from mggcn.planning.text import table

NARROW: Final = ("bf16", "mixed")
NARROW_GAIN: Final = 1.05
"""How many times as fast as float32 a narrower type must be predicted to be worth its rounding beyond the memory."""
WAITING: Final = 0.25
"""Share of an epoch that waits for messages from which narrower ones, half as long, gain more than NARROW_GAIN asks."""


def seconds_text(seconds: float | None) -> str:
    """Return seconds as text, in milliseconds below one; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def parts_cells(parts: Mapping[Any, float]) -> list[str]:
    """Return the cells of a row of seconds by kind, under the headers `KINDS.values()`."""
    return [seconds_text(parts[kind]) for kind in KINDS]


def cost_lines(plan: RunPlan, machine: Machine, replication: float | None = None) -> list[str]:
    """Return the cost of a plan on a machine: seconds by kind of work, DistGNN's work count, MG-GCN's 1.5D ratio.

    replication: average number of ranks that hold a vertex, if it differs from the plan's own. Raises: PlanError,
    ConfigError as `epoch_cost`.
    """
    cost, whole = epoch_cost(plan, machine), unpruned(plan)
    costs = _costs(cost) | ({} if whole is None else {"training, all rows": training_cost(whole, machine)})
    rows = [(name, seconds_text(c.seconds), *parts_cells(c.parts)) for name, c in costs.items()]
    rank = f", parts of rank {cost.train.critical}, which computes longest" if len(plan.ranks) > 1 else ""
    caveat = f" ({machine.caveat})" if machine.caveat else ""
    lines = [f"predicted on {machine.title}{caveat}{rank}", *table(("", "seconds", *KINDS.values()), rows)]
    lines += _batch_lines(cost, plan.steps) + _link_lines(cost)
    if plan.config.model.aggregates:
        lines += work_lines(plan_work(plan, replication), len(plan.ranks))
    if len(plan.ranks) > 1 and machine.topology is not None:
        lines.append(f"1.5D instead of 1D (MG-GCN 5.1, analysis only): {text_15d(machine, len(plan.ranks))}")
    return lines


def _batch_lines(cost: EpochCost, steps: int) -> list[str]:
    """Say what a batch takes beside its step, and what an epoch takes in all; nothing for the whole graph's steps."""
    batch, train_s = cost.batch, cost.train.seconds
    if batch is None:
        return []
    sent = f", sent to its GPU in {seconds_text(batch.upload_s)}" if batch.upload_s else ""
    threads = f"one of {batch.ahead} threads" if batch.ahead > 1 else "a thread" if batch.ahead else "the rank"
    each = "a core each" if batch.alone_s <= batch.sample_s else "some cores each to gather"
    threads += f", {each}" * (batch.ahead > 1 and not batch.cores)
    return [
        f"a batch is drawn and gathered in {seconds_text(batch.sample_s)} by {threads} (estimated){sent}: a step every "
        f"{seconds_text(cost.step_s)}, {batch.limit(train_s)}; an epoch {seconds_text(steps * cost.step_s)}, without its "
        "evaluation",
        *_relay_lines(batch, train_s),
    ]


def _relay_lines(batch: BatchCost, train_s: float) -> list[str]:
    """Say what rows of other ranks take in a step, and their edges; nothing where they are not fetched."""
    relay = batch.relay
    if relay is None:
        return []
    rows = "counted on drawn batches" if relay.counted else "if any rank owned a vertex with the same chance"
    beside = "beside computing, a step each" if relay.early else "which a step waits for"
    what, given = "rows", "with rows that are gathered for others a step"
    if relay.edges:
        what, given = "edges and rows", "a step"
    return [
        f"{what} of other ranks, {rows}: messages of {seconds_text(relay.messages_s)} a step, {beside}; {given} waits "
        f"{seconds_text(batch.waiting_s(train_s))} of its seconds"
    ]


def _link_lines(cost: EpochCost) -> list[str]:
    """Say what links take on the host beside the programs; nothing for other tasks."""
    lines = []
    if cost.pairs_s:
        lines.append(
            f"the pairs of an epoch are drawn and sorted in {seconds_text(cost.pairs_s)} (estimated): an epoch "
            f"{seconds_text(cost.step_s)}"
        )
    if cost.scores_s:
        lines.append(
            f"validation and test links are scored in {seconds_text(cost.scores_s)} (estimated): an evaluation "
            f"{seconds_text(cost.evaluate_s)}"
        )
    return lines


def memory_alone(plan: RunPlan, machine: Machine, in_float32: Machine) -> list[str]:
    """Return a line saying that bf16 only saves memory, if its epochs are not predicted to be faster; else no line.

    in_float32: the machine with the rates of a run in float32.
    """
    precision = plan.config.run.precision
    if precision not in NARROW or machine.device.kind != "cpu":
        return []
    narrow, full = training_cost(plan, machine).seconds, training_cost(_otherwise(plan, precision="fp32"), in_float32)
    if narrow * NARROW_GAIN <= full.seconds:
        return []
    return [
        f"{precision} gains memory alone here: {seconds_text(narrow)} per epoch are predicted, "
        f"{seconds_text(full.seconds)} in float32"
    ]


def narrow_messages(plan: RunPlan, machine: Machine) -> list[str]:
    """Return a line saying what mixed is predicted to take, if a whole graph's epoch waits for messages; else no line.

    Nothing chooses a precision by itself: it changes results.
    """
    if plan.config.run.precision not in ("fp32", "tf32") or len(plan.ranks) == 1:
        return []
    if plan.config.sample.batch:  # where the host that draws may be what a step waits for
        return []
    cost = training_cost(plan, machine)
    waiting = cost.parts["messages"]
    if waiting < WAITING * cost.seconds:
        return []
    try:
        narrow = training_cost(_otherwise(plan, precision="mixed"), machine).seconds
    except (ConfigError, PlanError):  # rows of attention and of maxima have no room for bfloat16
        return []
    if narrow * NARROW_GAIN > cost.seconds:
        return []
    return [
        f"{seconds_text(waiting)} of an epoch's {seconds_text(cost.seconds)} are spent waiting for messages: --precision "
        f"mixed, which rounds what is sent and gathered to bfloat16, is predicted to take {seconds_text(narrow)}"
    ]


def whole_graph(plan: RunPlan, machine: Machine) -> list[str]:
    """Return a line on the same run without batches; no line where it has none, or its settings need them.

    All rows are computed, also those that training over the whole graph could leave out. Cost: a plan, without the graph.
    """
    config = plan.chosen
    if not config.sample.batch:
        return []
    try:
        whole = dataclasses.replace(
            config,
            sample=SampleConfig(),
            train=dataclasses.replace(config.train, evaluate="auto"),
            run=dataclasses.replace(config.run, batches="independent"),
        )
        other = plan_run(whole, plan.shape, plan.stats, plan.strategy, plan.nccl, figures=plan.figures)
        cost = epoch_cost(other, machine)
    except (ConfigError, PlanError):  # such as rows of a graph that only batches learn by
        return []
    return [
        "over the whole graph (--batch all) an epoch would be one step with the exact gradient: "
        f"at most {seconds_text(cost.step_s)}, and a peak of {human(other.largest.total_bytes)} per rank"
    ]


def unpruned(plan: RunPlan) -> RunPlan | None:
    """Return the plan with all rows computed in training epochs; None if the plan already computes all."""
    if not plan.ranks[0].pruned:
        return None
    return _otherwise(plan, prune="off")


def _otherwise(plan: RunPlan, **run: Any) -> RunPlan:
    """The plan of the same graph and partition with other settings of [run]."""
    config = dataclasses.replace(plan.chosen, run=dataclasses.replace(plan.chosen.run, **run))
    planned = plan_run(config, plan.shape, plan.stats, plan.strategy, plan.nccl, figures=plan.figures, limit=plan.limit)
    return dataclasses.replace(planned, read=plan.read)


def text_15d(machine: Machine, ranks: int) -> str:
    """Return MG-GCN's comparison of 1.5D and 1D in words, or why there is none."""
    found = analyse_15d(machine, ranks)
    if isinstance(found, str):
        return found
    return (
        f"communication takes {found.time_ratio:.2f} of 1D's time and sends {found.sent_ratio:.2f} of its bytes, "
        f"{found.replication} copies of all rows"
    )


def plan_work(plan: RunPlan, replication: float | None = None) -> AggregationWork:
    """Return DistGNN's count of aggregation work for one rank of a plan."""
    shape, ranks = plan.shape, len(plan.ranks)
    held = sum(plan.stats.counts) / max(shape.num_vertices, 1) if replication is None else replication
    widths = summed_widths(plan.config.model, shape.num_features, shape.num_classes)
    return aggregation_work(shape.num_vertices, shape.num_edges, widths, ranks, held)


def summed_widths(model: ModelConfig, num_features: int, num_classes: int) -> tuple[int, ...]:
    """Return the columns of a neighbour that each layer's sum reads: of the layer's input, as DistGNN counts them; of
    attention those of all heads, and of sgc and appnp the classes, in every hop.
    """
    if model.kind in ("sgc", "appnp"):
        return (num_classes,) * model.hops
    inputs = (*(num_features, *model.dense_before)[-1:], *model.hidden)
    joined = 1 if model.concat_heads else model.heads
    attended = (*(joined * width for width in model.hidden), model.heads_of(last=True) * num_classes)
    widths = attended if model.attends else inputs
    return widths[:-1] if model.head == "linear" else widths


def cost_dict(plan: RunPlan, machine: Machine, replication: float | None = None) -> dict[str, Any]:
    """Return the content of `cost_lines` as plain values, for JSON."""
    found: dict[str, Any] = {"machine": machine.name, "origin": machine.origin}
    costs = epoch_cost(plan, machine)
    for name, cost in _costs(costs).items():
        found[name] = {"seconds": cost.seconds, "link_seconds": cost.link_s, "ranks": [dict(r) for r in cost.ranks]}
    if (batch := costs.batch) is not None:
        parts = {"sample_seconds": batch.sample_s, "upload_seconds": batch.upload_s, "lock_seconds": batch.lock_s}
        parts["step_seconds"] = costs.step_s
        if batch.relay is not None:
            parts["relay_seconds"] = batch.relay.messages_s
            parts["relay_waiting_seconds"] = batch.waiting_s(costs.train.seconds)
        found["batch"] = parts | {"epoch_seconds": plan.steps * costs.step_s}
    if costs.pairs_s or costs.scores_s:
        found["links"] = {"pair_seconds": costs.pairs_s, "score_seconds": costs.scores_s}
    if (whole := unpruned(plan)) is not None:
        found["training_all_rows"] = {"seconds": training_cost(whole, machine).seconds}
    if plan.config.model.aggregates:
        found["aggregation_work"] = plan_work(plan, replication).total
    analysed = analyse_15d(machine, len(plan.ranks))
    if not isinstance(analysed, str) and len(plan.ranks) > 1:
        found["time_ratio_15d"] = analysed.time_ratio
    return found


def _costs(cost: EpochCost) -> dict[str, Cost]:
    return {"training": cost.train, "evaluation": cost.evaluate}
