"""Layers of a training epoch that aggregate fewer than all rows: the choice, its reasons, and their aggregations on a rank.

Rows that nothing reads have no gradient either, so leaving them out is exact: partition/rows/required.py. A row that keeps
its entries keeps its bits, unless it is so long that kernels sum it in parts, whose ends may move. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mggcn.aggregate.base import AggregationPlan, BuildContext, RankAggregations, Strategy
from mggcn.aggregate.per_layer import PerLayer
from mggcn.config import RunConfig
from mggcn.errors import GraphError
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import RowStats, row_stats
from mggcn.partition.rows.required import LEAST_SAVED, required_sets, worth_pruning
from mggcn.partition.rows.shard import training_rows


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows that the aggregation of a layer computes in a training epoch.

    rows, nnz: numbers that the loss needs, over all ranks; None: not counted. level: index into the statistics'
    `required`; None: all rows are computed.
    """

    layer: int
    """The aggregation's number in the model, from 1."""
    rows: int | None
    nnz: int | None
    level: int | None
    reason: str


def choose_rows(
    run: RunConfig,
    aggregates: Sequence[tuple[int, int]],
    stats: PartitionStats,
    strategy: Strategy,
    reads_all: str = "",
) -> tuple[LayerRows, ...]:
    """Choose the rows of every aggregation of an epoch, given as its site and the number of further ones between it and
    the loss.

    reads_all: a node whose result depends on every row, such as batch norm; "" if there is none.
    Where paths of several lengths lead to the loss, the longest counts: its rows include those of the others. Every
    rank makes the same choice, from global counts.
    """
    aggregating = [site for site, _ in aggregates]
    if run.prune == "off":
        return _everything(aggregating, "as set by run.prune")
    if strategy.kind != "rows":
        return _everything(
            aggregating, f"the strategy {strategy.name} cuts vertices; pruning works on partitions of rows"
        )
    if reads_all:
        return _everything(aggregating, f"{reads_all} takes its statistics from all vertices")
    known = row_stats(stats).required
    if not known:
        return _everything(aggregating, "it is not known which vertices train")
    chosen = []
    for layer, above in aggregates:
        # Sets that are not listed equal the last one, or contain it and save too little as well.
        level = min(above, len(known) - 1)
        rows, nnz = known[level].num_rows, known[level].num_entries
        if worth_pruning(nnz, stats.num_entries):
            reason = "the others are not read, and have no gradient"
            chosen.append(LayerRows(layer, rows, nnz, level, reason))
        elif level == above:
            reason = f"less than {LEAST_SAVED:.0%} of the nonzeros would be saved"
            chosen.append(LayerRows(layer, rows, nnz, None, reason))
        else:
            chosen.append(LayerRows(layer, None, None, None, "it needs as many rows as the layer above"))
    return tuple(chosen)


def _everything(layers: Sequence[int], reason: str) -> tuple[LayerRows, ...]:
    return tuple(LayerRows(layer, None, None, None, reason) for layer in layers)


def level_stats(rows: Sequence[LayerRows], stats: PartitionStats) -> dict[int, RowStats]:
    """Return the statistics of every level in use: those of all ranks, for fewer rows."""
    levels = sorted({layer.level for layer in rows if layer.level is not None})
    return {level: row_stats(stats).only(level) for level in levels}


def pruned_plans(
    run: RunConfig, levels: Mapping[int, RowStats], strategy: Strategy, rank: int
) -> dict[int, AggregationPlan]:
    """Return a rank's plan for every level: that of the same strategy for fewer rows."""
    # The rows of A^T that are kept are the columns of A: two matrices, also of a symmetric graph.
    return {level: strategy.plan(run, stats, rank, False, True) for level, stats in levels.items()}


def levels_of(rows: Sequence[LayerRows]) -> dict[int, int]:
    """Return the levels of the aggregations that do not compute all rows, by site."""
    return {layer.layer: layer.level for layer in rows if layer.level is not None}


def set_bytes(plans: Mapping[int, AggregationPlan]) -> int:
    """Return the bytes per vertex of the graph that set-up holds to know which rows are required."""
    return max(plans) + 1 if plans else 0


def build_pruned(
    every: RankAggregations,
    rows: Sequence[LayerRows],
    plans: Mapping[int, AggregationPlan],
    context: BuildContext,
) -> RankAggregations:
    """Return a rank's aggregations with those of pruned layers in training. Collective.

    Cost: as each would cost alone; a sweep over the edges for each level but the first.
    Raises: GraphError if the training split is missing; as AggregationPlan.build.
    """
    if not plans:
        return every
    options = context.options
    training = training_rows(context.graph, options.splits, options.split)
    if training is None:
        raise GraphError(
            f"{context.graph.name} has lost the training split that the run was planned for; start a new run"
        )
    sets = required_sets(context.graph, training, max(plans) + 1, options.threads)
    built = {level: plan.build(dataclasses.replace(context, required=sets[level])) for level, plan in plans.items()}
    of_layer = {layer.layer: built[layer.level].training for layer in rows if layer.level is not None}
    tiles = [side for one in (every, *built.values()) for side in one.tiles]
    return RankAggregations(PerLayer(every.training, of_layer), every.exact, tiles)
