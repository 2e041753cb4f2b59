"""Choice of strategy, order, partition and batches: candidates priced on a machine, in a table, with the reason.

Only exact candidates that fit into memory can be chosen. The 1.5D partition of MG-GCN 5.1 is a row of analysis. Needs
no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mggcn.aggregate.steps import bytes_sent
from mggcn.cost.analysis import analyse_15d
from mggcn.cost.machine import Machine
from mggcn.cost.work import KINDS
from mggcn.memory.units import human
from mggcn.partition.locality.reuse import BOUNDS, near_share
from mggcn.partition.rows.partition import row_stats
from mggcn.planning.advice import Room, advice
from mggcn.planning.batch_sharing import BatchPrice, BatchSizes, batch_price
from mggcn.planning.cost_text import parts_cells, seconds_text
from mggcn.planning.op_cost import batch_cost, training_cost
from mggcn.planning.run import RunPlan
from mggcn.planning.text import table

NEAR_ROWS: Final = 4096
"""Rows of a width of 128 that a core's cache of 2 MiB holds; one of partition/locality/reuse.py's BOUNDS."""
NEAR_ROW_BYTES: Final = 512
"""Bytes of a row of that width."""
ORDER_GAIN: Final = 1.03
"""An order by locality must promise to be faster by this factor: making it costs time, and the model predicts a gain
even for random graphs."""
REPLICATED: Final = ("arena", "features", "vertex data")
"""Regions of a rank that grow with its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One variant of a run: its names, whether its gradients are exact, and its plan or why there is none.

    partition: the partition in words, such as "rows" or "libra, replication 1.64". run: the settings of [run] that make
    this candidate, such as {"strategy": "halo", "order": "random"}. batches: how ranks take a batch, "" if that is not
    compared; sizes: of these batches, by which they are priced.
    """

    strategy: str
    order: str
    partition: str
    exact: bool
    plan: RunPlan | None
    reason: str = ""
    run: Mapping[str, str] = field(default_factory=dict)
    batches: str = ""
    sizes: BatchSizes | None = None

    @property
    def name(self) -> str:
        order, batches = f"order {self.order}" * bool(self.order), f"{self.batches} batches" * bool(self.batches)
        return ", ".join(filter(None, [self.strategy, order, batches]))


Rank = Callable[["Row"], tuple[float, int, int]]
"""The key by which rows are compared: the least is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A candidate with its costs; None where there is no plan, or, in a row of analysis, no prediction.

    verdict: "fits", "does not fit", "not possible", "not exact" or "analysis".
    """

    candidate: Candidate
    verdict: str
    bytes_sent: int | None = None
    memory_bytes: int | None = None
    seconds: float | None = None
    parts: Mapping[str, float] | None = None
    note: str = ""
    near: float | None = None
    """Share of the gathers that find their row among the `near_rows` last used ones; None where it is not known."""
    path: float | None = None
    """Critical path of the stages over that of equal tiles; None but for partitions of the rows."""
    price: BatchPrice | None = None
    """What batches cost in this way; None where the ways are not compared."""


@dataclass(frozen=True, slots=True)
class Choice:
    """All rows in the order of the candidates, the chosen one if any can be, and why."""

    machine: Machine
    rows: tuple[Row, ...]
    chosen: Row | None
    reason: str


def choose(candidates: Sequence[Candidate], machine: Machine, limit: int, room: Room | None = None) -> Choice:
    """Cost the candidates on `machine`, each rank of which may use `limit` bytes, and choose the fastest exact one.

    Equal predictions are decided by fewer bytes sent, then by less memory, then by the order of the candidates.
    room: as for `advice`. Raises: PlanError, ConfigError as `training_cost`.
    """
    rows = [_row(candidate, machine, limit) for candidate in candidates]
    eligible = [row for row in rows if row.verdict == "fits"]
    named = {candidate.order for candidate in candidates if candidate.order} == {"locality"}
    rank = functools.partial(_rank, gain=1.0 if named else ORDER_GAIN)
    best = min(eligible, key=rank, default=None)
    if analysed := _row_15d(candidates, machine):
        rows.append(analysed)
    reason = _none_reason(rows, limit, room) if best is None else _reason(best, rows, near_rows(machine), rank)
    return Choice(machine, tuple(rows), best, reason)


def near_rows(machine: Machine) -> int:
    """Return how many rows of 128 columns the cache of a CPU core, or a GPU's L2, holds: one of BOUNDS."""
    if machine.device.kind == "cpu":
        return NEAR_ROWS
    held = machine.device.gather.points[0][0] / NEAR_ROW_BYTES
    return int(max((bound for bound in BOUNDS if bound <= held), default=BOUNDS[0]))


def _rank(row: Row, gain: float) -> tuple[float, int, int]:
    factor = gain if row.candidate.order == "locality" else 1.0
    return (factor * (row.seconds or 0.0), row.bytes_sent or 0, row.memory_bytes or 0)


def _row(candidate: Candidate, machine: Machine, limit: int) -> Row:
    plan = candidate.plan
    if plan is None:
        return Row(candidate=candidate, verdict="not possible", note=candidate.reason)
    cost, batch = training_cost(plan, machine), batch_cost(plan, machine)
    memory = plan.largest.total_bytes
    price = None if candidate.sizes is None else batch_price(plan, candidate.sizes, machine)
    verdict, note = "fits", plan.elsewhere or "products again" * plan.again
    if memory > limit:
        verdict, note = "does not fit", f"{human(limit)} may be used"
    if not candidate.exact:
        verdict, note = "not exact", "; ".join(filter(None, ["never chosen by auto", note]))
    sent = plan.steps * max(rank.bytes_sent(rank.train) for rank in plan.ranks)
    seconds = cost.seconds if batch is None else plan.steps * batch.step_s(cost.seconds)
    if price is not None:
        sent, seconds = -(-price.bytes_sent // len(plan.ranks)), price.epoch_s
    parts = {str(kind): each for kind, each in (cost if price is None else price.step).parts.items()}
    near, path = _order_stats(plan, near_rows(machine))
    return Row(
        candidate=candidate,
        verdict=verdict,
        bytes_sent=sent,
        memory_bytes=memory,
        seconds=seconds,
        parts=parts,
        note=note,
        near=near,
        path=path,
        price=price,
    )


def _order_stats(plan: RunPlan, rows: int) -> tuple[float | None, float | None]:
    """Return `near` and `path` of a row."""
    if plan.stats.kind != "rows":
        return None, None
    stats = row_stats(plan.stats)
    own, total = int(stats.tiles.nnz.trace()), int(stats.tiles.nnz.sum())
    shares = stats.reuse.together(own, total - own)
    return near_share(shares, rows) if shares else None, stats.tiles.critical_path_over_ideal


def _row_15d(candidates: Sequence[Candidate], machine: Machine) -> Row | None:
    """The 1.5D partition beside the first broadcast; None without one, on a single rank, or of batches, whose steps have no
    broadcast.
    """
    base = next((c for c in candidates if c.strategy == "broadcast" and c.plan is not None), None)
    if base is None or base.plan is None or len(base.plan.ranks) == 1 or base.plan.config.sample.batch:
        return None
    candidate = Candidate(strategy="1.5D broadcast", order=base.order, partition=base.partition, exact=True, plan=None)
    found = analyse_15d(machine, len(base.plan.ranks))
    if isinstance(found, str):
        return Row(candidate=candidate, verdict="analysis", note=f"MG-GCN 5.1: {found}")
    rank = base.plan.largest
    grown = sum(nbytes for name, nbytes in rank.regions.items() if name in REPLICATED)
    # The sums of gradients stay what they are.
    aggregated = [sum(bytes_sent(steps) for steps in r.steps(r.train)) for r in base.plan.ranks]
    sent = [
        r.bytes_sent(r.train) - n + round(n * found.sent_ratio)
        for r, n in zip(base.plan.ranks, aggregated, strict=True)
    ]
    return Row(
        candidate=candidate,
        verdict="analysis",
        bytes_sent=max(sent),
        memory_bytes=rank.total_bytes + (found.replication - 1) * grown,
        note=f"MG-GCN 5.1: {found.replication} copies of all rows, communication takes {found.time_ratio:.2f} of 1D's",
    )


def _reason(best: Row, rows: Sequence[Row], near: int, rank: Rank) -> str:
    """Say which candidate was chosen, by how much it wins, and which would have been faster but may not be chosen."""
    text = f"{best.candidate.name} is chosen: {seconds_text(best.seconds)} per epoch predicted"
    others = [row for row in rows if row.verdict == "fits" and row is not best]
    second = min(others, key=rank, default=None)
    if second is None:
        text += ", the only exact one that fits"
    elif best.seconds and second.seconds:
        text += f", {second.candidate.name} takes {second.seconds / best.seconds:.2f} times as long"
    text += _order_reason(best, others, near, rank)
    for row in rows:
        if row.verdict in ("fits", "not exact", "does not fit") and (row.seconds or 0) < (best.seconds or 0):
            text += f"; {row.candidate.name} would take {seconds_text(row.seconds)} but {_but(row)}"
    return text


def _order_reason(best: Row, others: Sequence[Row], near: int, rank: Rank) -> str:
    """Compare the order of the chosen row with the next best one under the same strategy."""
    alike = [row for row in others if row.candidate.strategy == best.candidate.strategy and row.near is not None]
    same = [row for row in alike if row.candidate.order != best.candidate.order]
    other = min(same, key=rank, default=None)
    if other is None or best.near is None:
        return ""
    text = f"; {best.near:.0%} of its gathers find their row among the {near:,} last used ones"
    text += f", {other.near:.0%} of those of order {other.candidate.order}"
    if best.path is not None and other.path is not None:
        text += f", and the stages take {best.path:.2f} of equal tiles' time, there {other.path:.2f}"
    return text


def _but(row: Row) -> str:
    if row.verdict == "fits":
        return "gains too little for an order that the settings do not name"
    return "is not exact" if row.verdict == "not exact" else f"needs {human(row.memory_bytes or 0)} per rank"


def _none_reason(rows: Sequence[Row], limit: int, room: Room | None) -> str:
    large = [(row, row.candidate.plan) for row in rows if row.verdict == "does not fit"]
    if large:
        least, plan = min(large, key=lambda entry: entry[0].memory_bytes or 0)
        hints = "" if plan is None else f"; {advice(plan, limit, room)}"
        return (
            f"no exact strategy fits into {human(limit)} per rank; {least.candidate.name} needs the least, "
            f"{human(least.memory_bytes or 0)}{hints}"
        )
    reasons = "; ".join(f"{r.candidate.name}: {r.note}" for r in rows if r.verdict == "not possible")
    return f"no exact strategy is possible{': ' if reasons else ''}{reasons}; name one with --strategy"


def choice_lines(choice: Choice) -> list[str]:
    """Return the table and the reason as text."""
    stats = ("near", "path", "sent per epoch", "memory", "predicted")
    priced = [row for row in choice.rows if row.price is not None]
    header = ("", "strategy", "order", *["batches"] * bool(priced), "partition", "exact", *stats, "verdict")
    cells = [
        (
            "*" if row is choice.chosen else "",
            row.candidate.strategy,
            row.candidate.order,
            *[row.candidate.batches] * bool(priced),
            row.candidate.partition,
            "yes" if row.candidate.exact else "no",
            "-" if row.near is None else f"{row.near:.0%}",
            "-" if row.path is None else f"{row.path:.2f}",
            "-" if row.bytes_sent is None else human(row.bytes_sent),
            "-" if row.memory_bytes is None else human(row.memory_bytes),
            seconds_text(row.seconds),
            "; ".join(filter(None, [row.verdict, row.note])),
        )
        for row in choice.rows
    ]
    caveat = f" ({choice.machine.caveat})" if choice.machine.caveat else ""
    lines = [f"strategies on {choice.machine.title}{caveat}, per rank", *table(header, cells), f"  {choice.reason}"]
    near = f"  near: gathers that find their row among the {near_rows(choice.machine):,} last used ones"
    lines.append(f"{near}; path: time of the stages over that of equal tiles")
    lines += [f"  {row.candidate.name}: {row.price.line()}" for row in priced if row.price is not None]
    return [*lines, "", *parts_lines(choice.rows)]


def parts_lines(rows: Sequence[Row]) -> list[str]:
    """Return the predicted seconds of every row by kind of work, as text."""
    costed = [row for row in rows if row.parts is not None]
    if not costed:
        return []
    cells = [(row.candidate.name, *parts_cells(row.parts or {})) for row in costed]
    plan = costed[0].candidate.plan
    what = "a step on a batch" if plan is not None and plan.config.sample.batch else "an epoch"
    return [f"predicted seconds of {what}, on the rank that computes longest", *table(("", *KINDS.values()), cells)]


def choice_dict(choice: Choice) -> dict[str, Any]:
    """Return the table as plain values, for JSON."""
    return {
        "machine": choice.machine.name,
        "machine_origin": choice.machine.origin,
        "chosen": None if choice.chosen is None else choice.rows.index(choice.chosen),
        "reason": choice.reason,
        "candidates": [
            {
                "strategy": row.candidate.strategy,
                "order": row.candidate.order,
                "partition": row.candidate.partition,
                "exact": row.candidate.exact,
                "verdict": row.verdict,
                "note": row.note,
                "bytes_sent_per_epoch": row.bytes_sent,
                "memory_bytes": row.memory_bytes,
                "near_share": row.near,
                "critical_path_over_ideal": row.path,
                "predicted_seconds": row.seconds,
                "predicted_parts": None if row.parts is None else dict(row.parts),
                **({"batches": row.candidate.batches} if row.candidate.batches else {}),
                **({} if row.price is None else {"batch": row.price.to_dict()}),
            }
            for row in choice.rows
        ],
    }
