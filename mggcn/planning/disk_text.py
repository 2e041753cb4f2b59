"""A plan on the capacity ladder as text and as plain values: rungs, bytes on disk, stages, and what bounds them."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Any, Final

from mggcn.cost.disk import DiskCost
from mggcn.cost.machine import UPLOAD, Machine
from mggcn.errors import MggcnError
from mggcn.memory.units import human
from mggcn.planning.advice import WHERE
from mggcn.planning.cost_text import seconds_text
from mggcn.planning.disk import StagePlan
from mggcn.planning.op_cost import disk_cost, epoch_cost, host_cost
from mggcn.planning.run import Ladder, RankPlan, RunPlan
from mggcn.planning.text import table

NAMES: Final = {
    "memory": "everything in memory",
    "recompute": "products made again (run.recompute=on)",
    "host": "rows on the host",
    "disk": "rows on disk",
}
SLOW: Final = 10.0
"""Times as long as in memory that epochs from disk may take before a run says so."""


def rung_lines(plan: RunPlan, machine: Machine) -> list[str]:
    """Return a line on what run.capacity took and why; no line where everything is in memory.

    Without seconds where the machine lacks the rates.
    """
    ladder = plan.ladder
    if plan.rung == "memory":
        return []
    taken = f"products are made again backwards: {human(plan.largest.total_bytes)}"
    if plan.on_disk:
        folder = "" if ladder is None else f" in {ladder.space.folder}"
        taken = f"rows between stages go to disk: {human(plan.disk_bytes)}{folder}, {human(plan.moved)} moved an epoch"
    elif plan.on_host:
        taken = f"{plan.elsewhere} from the forward to the backward pass, {human(plan.moved)} moved an epoch"
    taken += _epoch_s(plan, machine)
    if ladder is None or not ladder.passed:
        return [taken]
    first, *others = ladder.passed
    needs = [human(first.largest.total_bytes)]
    needs += [f"with products made again {human(other.largest.total_bytes)}" for other in others]
    in_memory = _seconds(first, machine)
    return [
        f"everything in memory needs {', '.join(needs)}, {human(ladder.limit)} may be used: {taken}"
        + (f" ({in_memory} in memory)" if in_memory != "-" else "")
    ]


def long_run_lines(plan: RunPlan, machine: Machine) -> list[str]:
    """Return a line of advice where run.capacity auto has rows on disk instead of a refusal, and epochs are predicted to
    take SLOW times as long as in memory or more, or from rates of the disk that are assumed; else none.
    """
    if not plan.on_disk or plan.ladder is None or not plan.ladder.passed:
        return []
    times, scratch = 0.0, plan.config.run.scratch
    with suppress(MggcnError):  # a machine without the rates of a precision
        times = epoch_cost(plan, machine).step_s / epoch_cost(plan.ladder.passed[0], machine).step_s
    said = [f"an epoch from disk takes some {times:,.0f} times as long as in memory would"] if times >= SLOW else []
    todo = ["more memory or fewer columns (model.hidden) make it shorter"] if said else []
    if machine.disk is None:
        said.append("the disk's rates are assumed")
        todo.insert(0, f"mggcn tune --scratch {shlex.quote(scratch) if scratch else 'FOLDER'} measures them")
    todo.append("--set run.capacity=memory refuses such a run")
    return [f"{', and '.join(said)}: {'; '.join(todo)}"] if said else []


def _epoch_s(plan: RunPlan, machine: Machine) -> str:
    """Say how long an epoch takes, and from disk what bounds it; "" where the machine lacks the rates."""
    if (seconds := _seconds(plan, machine)) == "-":
        return ""
    bound = f", bound by {disk_cost(plan, machine, 'train').bound}{_assumed(machine)}" if plan.on_disk else ""
    if plan.on_host:
        bound = f", {seconds_text(host_cost(plan, machine).waiting_s)} of them waiting for copies"
    return f", {seconds} an epoch{bound}"


def disk_lines(plan: RunPlan, machine: Machine, *, explain: bool = False) -> list[str]:
    """Return the rungs that were planned with their bytes and seconds, and of a plan from disk what a step moves and what
    bounds it; nothing where everything fits in memory. explain: also every stage of the largest rank.

    Raises: PlanError, ConfigError as `epoch_cost`.
    """
    lines = [] if plan.ladder is None else _ladder_lines(plan, plan.ladder, machine)
    if plan.on_host:
        lines += _host_lines(plan, machine, explain=explain)
    if not plan.on_disk:
        return lines
    lines += ["", "rows on disk", *(line for name in ("train", "evaluate") for line in _program(plan, machine, name))]
    disk = machine.disk_rates
    lines.append(
        f"  the disk reads {disk.read / 1e9:.2f} GB/s, writes {disk.write / 1e9:.2f}, and moves {disk.both / 1e9:.2f} "
        f"doing both{_assumed(machine)}; it works beside computing, part by part"
    )
    return [*lines, *(stage_lines(plan.largest) if explain else [])]


def _ladder_lines(plan: RunPlan, ladder: Ladder, machine: Machine) -> list[str]:
    where = WHERE[plan.config.last_rung]
    header = ("", "rung", "memory", where, "moved an epoch", "predicted", "verdict")
    rows = [
        (
            "*" if one.rung == plan.rung else "",
            NAMES[one.rung],
            human(one.largest.total_bytes),
            human(ladder.last_bytes) if one is ladder.last else "-",
            human(one.moved) if one.moved else "-",
            _seconds(one, machine),
            _verdict(one, ladder),
        )
        for one in _planned(plan, ladder)
    ]
    if ladder.missing:
        rows.append(("", NAMES[plan.config.last_rung], "-", "-", "-", "-", f"not possible: {ladder.missing}"))
    return ["", f"rungs of run.capacity, {human(ladder.limit)} per rank may be used", *table(header, rows)]


def _planned(plan: RunPlan, ladder: Ladder) -> list[RunPlan]:
    last = [] if ladder.last is None else [ladder.last]
    return [*ladder.passed, *([plan] if plan.again else []), *last]


def _verdict(plan: RunPlan, ladder: Ladder) -> str:
    if plan.largest.total_bytes > ladder.limit:
        return "does not fit"
    if plan is ladder.last and not ladder.has_space:
        return f"{ladder.space.folder} has {human(ladder.space.free)}"
    return "fits"


def _seconds(plan: RunPlan, machine: Machine) -> str:
    with suppress(MggcnError):  # a machine without the rates of a precision
        return seconds_text(epoch_cost(plan, machine).step_s)
    return "-"


def _program(plan: RunPlan, machine: Machine, name: str) -> list[str]:
    """Say what a program of all ranks moves, and in what seconds."""
    cost, what = disk_cost(plan, machine, name), {"train": "an epoch", "evaluate": "an evaluation"}[name]
    programs = [rank.disk.programs[name] for rank in plan.ranks if rank.disk is not None]
    read, written = sum(one.read for one in programs), sum(one.written for one in programs)
    return [
        f"  {what} reads {human(read)} and writes {human(written)} in {len(cost.stages)} stages: {_bound(cost)}",
    ]


def _bound(cost: DiskCost) -> str:
    waits = (
        f"in {cost.waiting} of them computing waits for the disk" if cost.waiting else "computing waits for no stage"
    )
    return (
        f"{seconds_text(cost.cost.seconds)}, bound by {cost.bound} ({seconds_text(cost.disk_s)} of disk, "
        f"{seconds_text(cost.compute_s)} of computing); {waits}"
    )


def _host_lines(plan: RunPlan, machine: Machine, *, explain: bool) -> list[str]:
    """Say what goes to the host and back in an epoch, and in what seconds; explain: also each matrix."""
    rank, cost = plan.largest, host_cost(plan, machine)
    lines = [
        "",
        "rows on the host",
        f"  an epoch copies {human(rank.host_bytes)} of a rank there and back, {len(rank.hosted)} matrices at "
        f"{(machine.device.upload or UPLOAD) / 1e9:.1f} GB/s, beside computing: {seconds_text(cost.copying_s)}, for "
        f"{seconds_text(cost.waiting_s)} of which computing waits",
    ]
    if explain:
        rows = [(slot, spec.name, human(spec.nbytes)) for slot, spec in enumerate(rank.hosted, 1)]
        lines += [f"  slots of rank {rank.rank}, pinned", *table(("slot", "what", "bytes"), rows)]
    return lines


def _assumed(machine: Machine) -> str:
    return "" if machine.disk is not None else ", which is assumed; mggcn tune --scratch FOLDER measures it"


def stage_lines(rank: RankPlan) -> list[str]:
    """Return the stages of a rank's programs: what runs over what at a time, and the bytes."""
    disk, lines = rank.disk, list[str]()
    if disk is None:
        return lines
    for name, program in disk.programs.items():
        rows = [
            (
                number,
                ", ".join(op.label for op in stage.program.ops) or "-",
                _parts(stage),
                human(sum(disk.pages[one.page].spec.nbytes for one in stage.reads)),
                human(sum(disk.pages[one.page].spec.nbytes for one in stage.writes)),
                human(stage.nbytes),
            )
            for number, stage in enumerate(program.stages, 1)
        ]
        title = {"train": "an epoch", "evaluate": "an evaluation", "setup": "set-up"}[name]
        lines += ["", f"stages of {title} of rank {rank.rank}"]
        lines += table(("", "ops", "at a time", "read", "written", "memory"), rows)
        kept = [f"{p.spec.name} {human(p.spec.nbytes)}" for p in disk.resident[name].placements]
        lines.append(f"  in memory from stage to stage: {', '.join(kept) or 'nothing'}")
    return lines


def _parts(stage: StagePlan) -> str:
    if stage.how == "whole":
        return "all"
    count = len(stage.parts)
    return f"{stage.step:,} {stage.how}" + (f", {count} times" if count > 1 else "")


def disk_dict(plan: RunPlan, machine: Machine) -> dict[str, Any]:
    """Return what `disk_lines` says as plain values, for JSON; {} where everything fits in memory."""
    found = dict[str, Any]()
    ladder = plan.ladder
    if ladder is not None:
        found["rungs"] = [
            {
                "rung": one.rung,
                "memory_bytes": one.largest.total_bytes,
                "disk_bytes": ladder.last_bytes if one.on_disk else 0,
                **({"host_bytes": ladder.last_bytes} if one.on_host else {}),
                "bytes_moved_per_epoch": one.moved,
                "predicted_seconds": epoch_cost(one, machine).step_s,
                "verdict": _verdict(one, ladder),
            }
            for one in _planned(plan, ladder)
        ]
    if plan.on_host:
        found["host"] = host_cost(plan, machine)._asdict() | {"bytes": sum(rank.host_bytes for rank in plan.ranks)}
    if plan.on_disk:
        found["disk"] = {
            name: {
                "seconds": cost.cost.seconds,
                "disk_seconds": cost.disk_s,
                "compute_seconds": cost.compute_s,
                "bound_by": cost.bound,
            }
            for name in ("train", "evaluate")
            for cost in [disk_cost(plan, machine, name)]
        }
    return found
