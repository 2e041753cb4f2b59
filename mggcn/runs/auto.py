"""The choice behind `auto`: plan and price every strategy, order and way to take batches at hand, and take the fastest
exact one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mggcn.assemble.plan import (
    STRATEGIES,
    check_ranks,
    figures_here,
    fitted,
    memory_limit,
    nccl_memory,
    plan_shape,
    resolve,
    room_of,
    this_machine,
)
from mggcn.assemble.stack import drawn_sizes, stack_for
from mggcn.blocks.block import Stack
from mggcn.config import Config, RunConfig
from mggcn.cost.machine import Machine
from mggcn.errors import ConfigError, GraphError, MggcnError, PlanError
from mggcn.graph.csr import Graph
from mggcn.partition.base import PartitionStats
from mggcn.partition.cache.cuts import is_kept
from mggcn.partition.cut.libra import LibraSettings
from mggcn.partition.cut.partition import CutStats
from mggcn.partition.locality.order import LocalitySettings
from mggcn.partition.make import make_partition
from mggcn.partition.metis.run import MetisKind, MetisSettings
from mggcn.partition.order import MAX_PARTS
from mggcn.partition.ranges import RELABELLED
from mggcn.partition.rows.partition import row_owners
from mggcn.partition.stream import StreamSettings
from mggcn.planning.batch_sharing import BatchSizes, expected_sizes, with_batches
from mggcn.planning.links import check_links
from mggcn.planning.run import RunPlan, Space, plan_run
from mggcn.planning.select import Candidate, Choice, choose
from mggcn.planning.shape import GraphShape, graph_shape, in_blocks, partition_stats

ORDERS: tuple[str, ...] = ("random", "none")
"""Orders that cost nothing to make; METIS's parts and a stream's are candidates where they are kept."""
ORDER_EDGES = 50_000_000
"""Stored edges up to which an order by locality is made to be compared: some seconds; above, only a cached one is."""
CUT_EDGES = 20_000_000
"""Stored edges up to which a vertex cut is made to be compared; above, only a cached one is."""
UNDELAYED: dict[str, Any] = {"delay": "0", "stale_aggregates": "discard"}
"""Settings of the delayed strategy where no message is delayed."""
DELAYED = "5"
"""The delay that is listed beside the exact ones."""


class NoChoiceError(PlanError):
    """No exact strategy fits or is possible; `choice` holds the table of candidates."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.reason)
        self.choice = choice


def is_auto(config: Config) -> bool:
    """Return whether strategy, order or batches are `auto`, so that planning must choose."""
    return "auto" in (config.run.strategy, config.run.order) or _compares_batches(config)


def _compares_batches(config: Config) -> bool:
    return config.run.batches == "auto" and config.run.ranks > 1 and config.sample.batch > 0


def resolve_auto(
    config: Config,
    graph: Graph,
    machine: Machine | None = None,
    limit: int | None = None,
    space: Space | None = None,
) -> tuple[Config, Choice | None]:
    """Replace every `auto` of a configuration, strategy and order included; return the choice too, if there was one.

    machine: where the seconds are predicted (default: `this_machine`); limit: bytes that a rank may use; space: as of
    `plan_graph`.
    Cost: a few sweeps over the edges per order, a vertex cut of a small graph. Raises: PlanError if nothing fits;
    ConfigError for delays without a strategy that has any.
    """
    room = room_of(config, None if limit is None else machine)
    check_ranks(config, graph.num_vertices, graph.name, room)
    config = _without_order(_without_delays(config))
    if not is_auto(config):
        return resolve(config, graph), None
    machine = machine or this_machine(config)
    base = resolve(_with_run(config, _fallback(config.run)), graph)
    limit = memory_limit(base) if limit is None else limit
    choice = choose(list(_candidates(config, base, graph, machine, limit, space)), machine, limit, room)
    return _apply_choice(base, choice), choice


def resolve_auto_shape(
    config: Config,
    shape: GraphShape,
    replication: float,
    machine: Machine | None = None,
    limit: int | None = None,
    space: Space | None = None,
) -> tuple[Config, Choice | None]:
    """As `resolve_auto` for a bare shape, in expectation over random assignments; a vertex cut needs its replication."""
    room = room_of(config, None if limit is None else machine)
    check_ranks(config, shape.num_vertices, "the shape", room)
    config = _without_order(_without_delays(config))
    if not is_auto(config):
        return config, None
    machine = machine or this_machine(config)
    base = _with_run(config, _fallback(config.run))
    limit = memory_limit(base) if limit is None else limit
    candidates, compares = [], _compares_batches(config)
    sizes = expected_sizes(base, shape) if compares else {}
    for run, exact in _variants(config, ("random",)):
        trial = _with_run(base, run)
        partition = "libra" if STRATEGIES[trial.run.strategy].kind == "cut" else "rows"
        one = functools.partial(_candidate, trial.run, partition, exact, compares, sizes.get(trial.run.batches))
        try:
            plan = plan_shape(trial, shape, replication, machine, limit, space)
        except MggcnError as error:
            candidates.append(one(None, str(error)))
        else:
            candidates.append(one(plan))
    choice = choose(candidates, machine, limit, room)
    return _apply_choice(base, choice), choice


def _without_delays(config: Config) -> Config:
    """Raise if delay settings come with a strategy that ignores them. On one rank they are reset."""
    run = config.run
    named = [f"run.{name} {getattr(run, name)}" for name, value in UNDELAYED.items() if getattr(run, name) != value]
    if not named:
        return config
    if run.strategy != "auto" and STRATEGIES[run.strategy].kind == "rows":
        raise ConfigError(
            f"{' and '.join(named)} would change nothing with run.strategy {run.strategy}, which delays no message; "
            "use --strategy delayed, or --delay 0 --set debug.stale_aggregates=discard"
        )
    return config if run.ranks > 1 else _with_run(config, UNDELAYED)


def _without_order(config: Config) -> Config:
    """Reset an order that is `auto` beside a vertex cut, which has none."""
    run = config.run
    named = run.strategy != "auto" and STRATEGIES[run.strategy].kind == "cut"
    return _with_run(config, {"order": "random"}) if named and run.order == "auto" else config


def _apply_choice(base: Config, choice: Choice) -> Config:
    """Return the configuration with what was chosen. Raises: NoChoiceError, with the table, if nothing can be."""
    if choice.chosen is None:
        raise NoChoiceError(choice)
    taken = dict(choice.chosen.candidate.run)
    rows = STRATEGIES[taken["strategy"]].kind == "rows"
    return _with_run(base, UNDELAYED | taken if rows else taken)


def _with_run(config: Config, run: dict[str, Any]) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **run))


def _fallback(run: RunConfig) -> dict[str, Any]:
    """Settings to resolve the rest with, before strategy, order and batches are chosen."""
    return {
        "strategy": "broadcast" if run.strategy == "auto" else run.strategy,
        "order": "random" if run.order == "auto" else run.order,
        "batches": "independent" if run.batches == "auto" else run.batches,
    }


def _variants(config: Config, orders: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the settings of every variant, and whether it is exact; what the user named is not varied."""
    run = config.run
    names = list(STRATEGIES) if run.strategy == "auto" else [str(run.strategy)]
    tried = orders if run.order == "auto" else (str(run.order),)
    for name in names:
        if STRATEGIES[name].kind == "rows":
            for order in tried:
                for batches, exact in _ways(config):
                    yield {"strategy": name, "order": order, "batches": batches}, exact
        elif run.ranks > 1 and not config.sample.batch and not config.data.learned:  # with which no message is delayed
            listed = run.delay if run.delay_epochs else DELAYED
            for delay in ("0", listed, "none") if run.strategy == "auto" else (run.delay,):
                yield {"strategy": name, "order": "random", "delay": delay}, delay == "0"


def _ways(config: Config) -> list[tuple[str, bool]]:
    """Return the values of run.batches that are compared, and whether the results of each are those of one rank."""
    if not _compares_batches(config):
        return [("independent" if config.run.batches == "auto" else config.run.batches, True)]
    return [("independent", not config.reads_whole_batches), ("cooperative", True)]


def _candidate(
    run: RunConfig,
    partition: str,
    exact: bool,
    compares: bool,
    sizes: BatchSizes | None,
    plan: RunPlan | None,
    reason: str = "",
) -> Candidate:
    """compares: whether ways to take batches are compared; sizes: of these batches."""
    settings: dict[str, str] = {"strategy": run.strategy, "order": run.order, "batches": run.batches}
    name: str = run.strategy
    if STRATEGIES[run.strategy].kind == "cut":
        settings["delay"] = run.delay
        name = f"{run.strategy} {'0c' if run.delay == 'none' else f'cd-{run.delay}'}"
    order = run.order if STRATEGIES[run.strategy].kind == "rows" else ""
    return Candidate(
        strategy=name,
        order=order,
        partition=partition,
        exact=exact,
        plan=plan,
        reason=reason,
        run=settings,
        batches=run.batches if compares else "",
        sizes=sizes,
    )


def _candidates(
    config: Config, base: Config, graph: Graph, machine: Machine, limit: int, space: Space | None
) -> Iterator[Candidate]:
    """Plan every variant on a graph; a partition is made once per order and number of bins."""
    shape, seed, ranks = graph_shape(graph, base), base.train.seed, base.run.ranks
    nccl, figures = nccl_memory(base, machine), figures_here(base)
    orders = ("ranges", *ORDERS) if RELABELLED in graph.meta else ORDERS
    # A cached partition has at most MAX_PARTS parts.
    first = (config.data.splits, config.data.split) == ("main", 0)
    cuts: tuple[MetisKind, ...] = ("metis", "metis-balanced") if first else ("metis",)
    if ranks <= MAX_PARTS and is_kept(graph, StreamSettings(parts=ranks).name):
        orders = (*orders, "stream")
    for cut in cuts if ranks <= MAX_PARTS else ():
        if is_kept(graph, MetisSettings(parts=ranks, seed=seed % 2**31, kind=cut).name):
            orders = (*orders, cut)
    if ranks <= MAX_PARTS:
        orders = (*orders, "locality")
    known: dict[tuple[str, str, int], _Counted | str] = {}
    compares = _compares_batches(config)
    # Which rank has a seed depends on the order, the size of its batches hardly.
    owner = (np.arange(graph.num_vertices) % ranks).astype(np.uint16)
    stacks = {base.run.batches: stack_for(base, graph, shape, owner)}

    def planned(counted: _Counted, of: Config, most: int = 0) -> RunPlan:
        stack, sizes = (counted.stacks or stacks)[of.run.batches], shape
        if of.evaluates_by_blocks:
            sizes = in_blocks(shape, graph, of)
        strategy = STRATEGIES[of.run.strategy]
        return plan_run(of, sizes, counted.stats, strategy, nccl, figures=figures, stack=stack, limit=most)

    for run, exact in _variants(config, orders):
        trial = _with_run(base, run)
        kind = STRATEGIES[trial.run.strategy].kind
        bins = trial.run.cut_bins if kind == "cut" else 1
        key = (kind, trial.run.order, bins)
        if key not in known:
            unasked = config.run.order == "auto" and kind == "rows"
            draws = compares and not graph.links
            known[key] = (unasked and _too_large(graph, trial)) or _count_partition(
                graph, shape, trial, kind, bins, draws
            )
        counted = known[key]
        # Where links are predicted, there is no other way than batches of their own.
        one = functools.partial(
            _candidate, trial.run, exact=exact or (compares and bool(graph.links)), compares=compares
        )
        if isinstance(counted, str):
            yield one("libra" if kind == "cut" else "rows", sizes=None, plan=None, reason=counted)
            continue
        partition = "rows"
        if isinstance(counted.stats, CutStats):
            partition = f"libra, replication {counted.stats.replication:.2f}"
        one = functools.partial(one, partition, sizes=counted.sizes.get(trial.run.batches))
        try:
            if compares:
                _check_batches(trial, graph)
            plan = fitted(trial, functools.partial(planned, counted), limit, space)
        except (GraphError, PlanError) as error:
            yield one(plan=None, reason=str(error))
        else:
            yield one(plan=plan)


def _check_batches(config: Config, graph: Graph) -> None:
    """Raise PlanError where ranks cannot take batches in this way."""
    try:
        check_links(config, graph)
    except ConfigError as error:
        raise PlanError(str(error)) from error


def _too_large(graph: Graph, config: Config) -> str:
    """Return why an order is too expensive to build for a comparison; "" if it is not, or is kept."""
    run, seed = config.run, config.train.seed
    if run.order != "locality" or graph.num_edges <= ORDER_EDGES:
        return ""
    if is_kept(graph, LocalitySettings(parts=run.ranks, seed=seed).name):
        return ""
    return f"not at hand; make it with mggcn partition --kind locality --parts {run.ranks} --seed {seed}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Counted:
    """A partition's statistics. stacks, sizes: planned blocks of a step, and what batches have on average, by the value of
    run.batches; {} if that is not compared.
    """

    stats: PartitionStats
    stacks: Mapping[str, Stack | None]
    sizes: Mapping[str, BatchSizes]


def _count_partition(
    graph: Graph, shape: GraphShape, config: Config, kind: Any, bins: int, draws: bool = False
) -> _Counted | str:
    """Return what is known of a partition, or why it is not at hand. draws: whether batches are drawn in both ways."""
    run, seed = config.run, config.train.seed
    if kind == "cut" and run.ranks > MAX_PARTS:
        return f"a vertex cut has at most {MAX_PARTS} parts"
    if (
        kind == "cut"
        and graph.num_edges > CUT_EDGES
        and not is_kept(graph, LibraSettings(parts=run.ranks, seed=seed).name)
    ):
        return f"no vertex cut at hand; make one with mggcn partition --parts {run.ranks} --seed {seed}"
    try:
        partition = make_partition(kind, graph, ranks=run.ranks, order=run.order, seed=seed, bins=bins)
    except MggcnError as error:
        return str(error)
    stats = partition_stats(config, graph, shape, partition)
    if not draws:
        return _Counted(stats, {}, {})
    owner = row_owners(partition).owner_of(slice(None))
    sizes = drawn_sizes(config, graph, shape, owner)
    return _Counted(stats, {way: stack_for(with_batches(config, way), graph, shape, owner) for way in sizes}, sizes)
