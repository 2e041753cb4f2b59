"""Advice on memory: whether a plan fits, and if not, which ranks, precision, strategy, rows or widths would."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mggcn.aggregate.base import Strategy
from mggcn.config.model import ModelConfig
from mggcn.errors import ConfigError, GraphError, PlanError
from mggcn.memory.device import DEVICES
from mggcn.memory.units import human
from mggcn.planning.run import RunPlan, plan_ranks

MAX_ADVISED_RANKS = 1024
WHERE: Final = {"disk": "on disk", "host": "on the host"}
"""Where rows are on the last rung, in words."""
SAMPLING_MARGIN = 1.02
"""Margin on expected nonzeros: those of a real assignment scatter about the expectation."""


@dataclass(frozen=True, slots=True)
class Room:
    """The alternatives for a run on this machine: other numbers of ranks, and other strategies."""

    per_rank: Callable[[int], int]
    """Bytes for each of P ranks; 0 if the machine cannot run so many."""
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    """Exact strategies that partition rows."""
    began: bool = False
    """Whether the run has begun: other results, and what a run keeps from its beginning, are out of the question."""


def require_fit(plan: RunPlan, limit: int, room: Room | None = None) -> None:
    """Raise PlanError if a rank needs more than `limit` bytes, or rows on disk or on the host more than is free there; the
    message says what would fit.
    """
    if lacking := lacking_space(plan):
        raise PlanError(lacking)
    rank = plan.largest
    if rank.total_bytes <= limit:
        return
    widths = ",".join(str(w) for w in plan.config.model.hidden)
    raise PlanError(
        f"rank {rank.rank} needs {human(rank.total_bytes)} for {rank.sizes.owned:,} of {plan.shape.num_vertices:,} rows "
        f"and hidden widths {widths or 'none'}, but only {human(limit)} may be used; {advice(plan, limit, room)}"
    )


def fits(plan: RunPlan, limit: int) -> bool:
    """Return whether `require_fit` refuses nothing."""
    return plan.largest.total_bytes <= limit and not lacking_space(plan)


def lacking_space(plan: RunPlan) -> str:
    """Say what rows on disk or on the host need where that lacks it; "" if it does not."""
    ladder = plan.ladder
    if ladder is None or not (plan.on_disk or plan.on_host) or ladder.has_space:
        return ""
    if plan.on_host:
        return (
            f"rows on the host need {human(ladder.last_bytes)} of its memory, pinned, and {human(ladder.space.free)} are "
            "free; free memory there, or use narrower hidden layers"
        )
    return (
        f"rows on disk need {human(ladder.last_bytes)} in {ladder.space.folder}, {human(ladder.space.free)} are free; free "
        "space there, or name a folder on another disk: --set run.scratch=FOLDER"
    )


def require_pinned(plan: RunPlan, ranks: int, free: int) -> None:
    """Raise PlanError if the batches that wait for GPUs, of so many ranks on a host, need more memory than it has free."""
    need = ranks * plan.largest.pinned_bytes
    if need > free:
        sample = plan.config.sample
        fewer = f"sample.ahead below {sample.ahead}, " if sample.ahead else ""
        raise PlanError(
            f"batches on their way to GPUs need {human(need)} of the host's memory, most of it pinned, but {human(free)} "
            f"are free; set {fewer}fewer ranks, or smaller sample.batch or sample.fanout"
        )


def smallest_ranks(plan: RunPlan, limit: int) -> int:
    """Return the smallest number of ranks, each with `limit` bytes, that fits; the plan's own if none smaller does."""
    own = plan.config.run.ranks
    if plan.on_disk or plan.on_host:  # whatever has too few ranks has more there
        return own
    return _first(1, own, lambda p: _estimate(plan, p, limit=limit) <= limit) or own


def advice(plan: RunPlan, limit: int, room: Room | None = None) -> str:
    """Say which changes would make the run fit, the smallest first; each is planned before it is named.

    room: the memory for other numbers of ranks; None: every rank has `limit` bytes, however many there are.
    """
    room = room or Room(lambda _: limit)
    most = min(MAX_ADVISED_RANKS, plan.shape.num_vertices)
    if not room.per_rank(most):
        most = bisect.bisect_left(range(1, most + 1), True, key=lambda p: not room.per_rank(p))
    hints = [
        *_space(plan, limit),
        *_ranks(plan, limit, room, most),
        *(_rung(plan, limit) if room.began else _settings(plan, limit, room)),
        *(() if room.began else _widths(plan, limit)),
    ]
    if hints:
        return " or ".join(hints) + _missing(plan, limit)
    alone = DEVICES[plan.config.run.device].process_bytes
    why = f": a process takes {human(alone)} before it holds anything" if room.per_rank(1) < alone else ""
    missing = _missing(plan, limit)
    return f"no number of ranks up to {most} would fit{why}{missing}; free memory or raise --memory-limit"


def _space(plan: RunPlan, limit: int) -> Iterator[str]:
    """Rows on a disk with more space, or on a host with more memory."""
    ladder = plan.ladder
    if ladder is None or ladder.last is None or plan.rung == ladder.last.rung:
        return
    if (need := ladder.last.largest.total_bytes) <= limit:
        where = "a host" if ladder.last.on_host else "--set run.scratch=FOLDER on a disk"
        yield (
            f"{where} with {human(ladder.last_bytes)} for rows ({ladder.space.folder} has {human(ladder.space.free)}) "
            f"would fit into {human(need)}"
        )


def _missing(plan: RunPlan, limit: int) -> str:
    """Say why rows on disk, or on the host, do not help, if they were tried."""
    ladder, where = plan.ladder, WHERE[plan.config.last_rung]
    if ladder is None or plan.on_disk or plan.on_host:
        return ""
    if ladder.last is not None:
        need = ladder.last.largest.total_bytes
        return f"; with rows {where} {human(need)} are needed at least" if need > limit else ""
    return f"; rows cannot be {where}: {ladder.missing}" if ladder.missing else ""


def _ranks(plan: RunPlan, limit: int, room: Room, most: int) -> Iterator[str]:
    """Fewer ranks, where these have more memory each; then more."""
    own = plan.config.run.ranks
    fewer = [p for p in (own >> shift for shift in range(1, own.bit_length())) if room.per_rank(p) > limit]
    if found := next((p for p in fewer if _estimate(plan, p, limit=room.per_rank(p)) <= room.per_rank(p)), None):
        yield f"{found} rank{'s' * (found > 1)} with {human(room.per_rank(found))} each would fit"
    if found := _first(own + 1, most + 1, lambda p: _estimate(plan, p, limit=room.per_rank(p)) <= room.per_rank(p)):
        each = "as much memory" if room.per_rank(found) == limit else human(room.per_rank(found))
        yield f"{found} ranks with {each} each would fit"


def _settings(plan: RunPlan, limit: int, room: Room) -> Iterator[str]:
    """A narrower type, another exact strategy, products made again, or one copy of the graph."""
    run = plan.config.run
    if run.precision != "bf16" and (need := _estimate(plan, limit=limit, precision="bf16")) <= limit:
        yield f"--precision bf16 would fit into {human(need)}"
    if plan.strategy.kind == "rows":
        needs = {name: _estimate(plan, limit=limit, strategy=name, by=one) for name, one in room.strategies.items()}
        needs.pop(run.strategy, None)
        if needs and needs[best := min(needs, key=lambda name: needs[name])] <= limit:
            yield f"--strategy {best} would fit into {human(needs[best])}"
    if run.recompute == "off" and (need := _estimate(plan, limit=limit, recompute="on")) <= limit:
        yield f"--set run.recompute=on, which makes products again backwards, would fit into {human(need)}"
    yield from _rung(plan, limit)
    if (
        plan.config.sample.batch
        and not plan.by_blocks
        and not plan.config.sample.compare_gradient
        and (need := _estimate(plan, limit=limit, evaluate="blocks")) <= limit
    ):
        yield f"--set train.evaluate=blocks, which evaluates layer by layer, would fit into {human(need)}"
    if plan.ranks[0].pruned and _estimate(plan, limit=limit, prune="off") <= limit:
        yield "--set debug.prune=off, which computes all rows from one copy of the graph, would fit"


def _rung(plan: RunPlan, limit: int) -> Iterator[str]:
    """Rows on disk, or on the host, where the settings have them in memory."""
    last = plan.config.last_rung
    if plan.config.moves_instead and (need := _estimate(plan, limit=limit, capacity=last)) <= limit:
        yield f"--set run.capacity={last}, which has rows {WHERE[last]}, would fit into {human(need)}"


def _widths(plan: RunPlan, limit: int) -> Iterator[str]:
    own, hidden = plan.config.run.ranks, plan.config.model.hidden
    if hidden and (cut := _first(1, 16, lambda c: _estimate(plan, limit=limit, share=1 - c / 16) <= limit)):
        widths = ",".join(str(w) for w in _narrowed(plan.config.model, 1 - cut / 16))
        yield f"--set model.hidden={widths} would fit on {own}"


def _first(start: int, stop: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first of start .. stop - 1 that fits, None if none does; everything above a value that fits fits,
    too.
    """
    found = start + bisect.bisect_left(range(start, stop), True, key=fits)
    return found if found < stop else None


def _narrowed(model: ModelConfig, share: float) -> tuple[int, ...]:
    """Return the hidden widths times a share, multiples of the heads that lie side by side in them."""
    unit = model.heads if model.attends and model.concat_heads else 1
    return tuple(unit * max(1, int(width * share) // unit) for width in model.hidden)


def _estimate(
    plan: RunPlan,
    ranks: int | None = None,
    share: float = 1.0,
    by: Strategy | None = None,
    evaluate: Literal["auto", "whole", "blocks"] = "auto",
    limit: int = 0,
    **settings: Any,
) -> int:
    """Predicted peak of the largest rank for another number of ranks, narrower layers or other settings of [run].

    limit: bytes of a rank, which rows on disk or on the host leave room for others in.
    """
    ranks = ranks or plan.config.run.ranks
    model = dataclasses.replace(plan.config.model, hidden=_narrowed(plan.config.model, share))
    transport = plan.config.run.transport if ranks in (1, plan.config.run.ranks) else "auto"
    shape = plan.shape
    try:
        config = plan.chosen if evaluate == "auto" else plan.chosen.evaluating(evaluate)
        run = dataclasses.replace(config.run, ranks=ranks, transport=transport, **settings)
        config = dataclasses.replace(config, model=model, run=run)
        if ranks == plan.config.run.ranks:
            stats = plan.stats
            chosen = set(range(ranks))
        else:
            # The order may have left one rank with more than its share of the edges; it will again.
            entries = [rank.nnz for rank in plan.ranks]
            skew = max(entries) * len(entries) / sum(entries) if any(entries) else 1.0
            edges = math.ceil(shape.num_edges * skew * SAMPLING_MARGIN)
            stats = plan.stats.resized(shape.num_vertices, edges, ranks, self_loops=model.self_loops)
            counts = stats.counts
            # Parts have at most two sizes, and the smaller may have to hold a block of the larger.
            chosen = {counts.index(max(counts)), counts.index(min(counts))}
        return max(
            rank.total_bytes
            for rank in plan_ranks(
                config,
                shape,
                stats,
                by or plan.strategy,
                sorted(chosen),
                plan.nccl,
                figures=plan.figures,
                limit=limit if config.run.capacity in ("host", "disk") else 0,
            )
        )
    except (ConfigError, GraphError, PlanError):
        return 2**62
