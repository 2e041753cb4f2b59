"""Advice on memory: whether a plan fits, and if not, whether one copy of the graph, more ranks or narrower layers would."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

from mggcn.errors import GraphError, PlanError
from mggcn.memory.units import human
from mggcn.planning.run import RunPlan, plan_ranks

MAX_ADVISED_RANKS = 1024
SAMPLING_MARGIN = 1.02
"""On expected nonzeros: those of a real assignment scatter about them."""


def require_fit(plan: RunPlan, limit: int) -> None:
    """Raise PlanError if a rank needs more than `limit` bytes; the message says what would fit."""
    rank = plan.largest
    if rank.total_bytes <= limit:
        return
    widths = ",".join(str(w) for w in plan.config.model.hidden)
    raise PlanError(
        f"rank {rank.rank} needs {human(rank.total_bytes)} for {rank.sizes.rows:,} of {plan.shape.num_vertices:,} rows "
        f"and hidden widths {widths or 'none'}, {human(limit)} may be used; {advice(plan, limit)}"
    )


def smallest_ranks(plan: RunPlan, limit: int) -> int:
    """Return the smallest number of ranks, each with `limit` bytes, that fits; the plan's own if none smaller does."""
    own = plan.config.run.ranks
    return _first(1, own, lambda p: _estimate(plan, p, 1.0) <= limit) or own


def advice(plan: RunPlan, limit: int) -> str:
    """Say whether one copy of the graph, how many ranks, each with `limit` bytes, or which narrower widths would fit."""
    hints = []
    own, hidden = plan.config.run.ranks, plan.config.model.hidden
    if plan.ranks[0].pruned:
        run = dataclasses.replace(plan.config.run, prune="off")
        if _estimate(dataclasses.replace(plan, config=dataclasses.replace(plan.config, run=run)), own, 1.0) <= limit:
            hints.append("--set run.prune=off, which computes all rows from one copy of the graph, would fit")
    ranks = _first(own + 1, MAX_ADVISED_RANKS + 1, lambda p: _estimate(plan, p, 1.0) <= limit)
    if ranks:
        hints.append(f"{ranks} ranks with as much memory each would fit")
    cut = _first(1, 16, lambda c: _estimate(plan, own, 1 - c / 16) <= limit) if hidden else None
    if cut:
        widths = ",".join(str(w) for w in _narrowed(hidden, 1 - cut / 16))
        hints.append(f"--set model.hidden={widths} would fit on {own}")
    return " or ".join(hints) or (
        f"no number of ranks up to {MAX_ADVISED_RANKS} would fit; free memory or raise --memory-limit"
    )


def _first(start: int, stop: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first of start .. stop - 1 that fits, None if there is none; what is above one that fits does too."""
    found = start + bisect.bisect_left(range(start, stop), True, key=fits)
    return found if found < stop else None


def _narrowed(hidden: tuple[int, ...], share: float) -> tuple[int, ...]:
    return tuple(max(1, int(w * share)) for w in hidden)


def _estimate(plan: RunPlan, ranks: int, share: float) -> int:
    """Predicted peak of the largest rank for another number of ranks or narrower layers."""
    model = dataclasses.replace(plan.config.model, hidden=_narrowed(plan.config.model.hidden, share))
    transport = plan.config.run.transport if ranks in (1, plan.config.run.ranks) else "auto"
    run = dataclasses.replace(plan.config.run, ranks=ranks, transport=transport)
    config = dataclasses.replace(plan.config, model=model, run=run)
    shape = plan.shape
    try:
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
            rank.total_bytes for rank in plan_ranks(config, shape, stats, plan.strategy, sorted(chosen), plan.nccl)
        )
    except GraphError:
        return 2**62
