"""Layers of a training epoch that aggregate fewer than all rows: the choice, its reasons, and their aggregations on a rank.

Rows that nothing reads have no gradient either, so leaving them out is exact: partition/rows/required.py. A row that keeps
its entries keeps its bits, unless it is so long that kernels sum it in parts, whose ends may move. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.base import AggregationPlan, BlockAggregations, BuildContext, RankAggregations, Strategy
from mggcn.blocks.block import WHOLE, Block, required
from mggcn.config import DataConfig, RunConfig
from mggcn.errors import GraphError
from mggcn.graph.splits import training_rows
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import RowStats, row_stats
from mggcn.partition.rows.required import LEAST_SAVED, required_sets, worth_pruning


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows that the aggregation of a layer computes in a training epoch.

    rows, nnz: how many rows and nonzeros the loss needs, over all ranks; None: not counted.
    """

    layer: int
    """The aggregation's number in the model, from 1."""
    rows: int | None
    nnz: int | None
    block: Block
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
        return _everything(aggregating, "as set by debug.prune")
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
            chosen.append(LayerRows(layer, rows, nnz, required(level), reason))
        elif level == above:
            reason = f"less than {LEAST_SAVED:.0%} of the nonzeros would be saved"
            chosen.append(LayerRows(layer, rows, nnz, WHOLE, reason))
        else:
            chosen.append(LayerRows(layer, None, None, WHOLE, "it needs as many rows as the layer above"))
    return tuple(chosen)


def _everything(layers: Sequence[int], reason: str) -> tuple[LayerRows, ...]:
    return tuple(LayerRows(layer, None, None, WHOLE, reason) for layer in layers)


def blocks_of(rows: Sequence[LayerRows]) -> dict[int, Block]:
    """Return the blocks of the aggregations that do not compute all rows, by site."""
    return {layer.layer: layer.block for layer in rows if layer.block.hops is not None}


def block_stats(rows: Sequence[LayerRows], stats: PartitionStats) -> dict[Block, RowStats]:
    """Return the statistics of every block but the whole graph, the smallest first: those of all ranks, for fewer rows."""
    hops = sorted({block.hops for block in blocks_of(rows).values() if block.hops is not None})
    return {required(count): row_stats(stats).only(count) for count in hops}


def set_bytes(blocks: Iterable[Block]) -> int:
    """Return how many bytes per vertex of the graph set-up holds to know which rows are required."""
    return max((block.hops + 1 for block in blocks if block.hops is not None), default=0)


def build_blocks(
    training: Mapping[Block, AggregationPlan],
    evaluation: AggregationPlan | None,
    context: BuildContext,
    data: DataConfig,
) -> BlockAggregations:
    """Build a rank's aggregations over every block. data: says which vertices train. evaluation: None if nothing runs over
    the whole graph. Collective.

    Cost: as each would cost alone; a sweep over the edges for each set of required rows but the first.
    Raises: GraphError if the training split is missing; as AggregationPlan.build.
    """
    if WHOLE not in training:
        local = {block: plan.build(context).training for block, plan in training.items()}
        return BlockAggregations(local, {} if evaluation is None else {WHOLE: evaluation.build(context).exact})
    whole = training[WHOLE].build(context)
    sets, built = _required_sets(training, context, data), dict[Block, RankAggregations]()
    for block, plan in training.items():
        if block.hops is not None:
            built[block] = plan.build(dataclasses.replace(context, required=sets[block.hops]))
    smaller = {block: one.training for block, one in built.items()}
    return BlockAggregations({WHOLE: whole.training, **smaller}, {WHOLE: whole.exact})


def _required_sets(
    blocks: Iterable[Block], context: BuildContext, data: DataConfig
) -> tuple[npt.NDArray[np.bool_], ...]:
    count = set_bytes(blocks)
    if not count:
        return ()
    training = training_rows(context.graph, data.splits, data.split)
    if training is None:
        raise GraphError(
            f"{context.graph.name} has lost the training split that the run was planned for; start a new run"
        )
    return required_sets(context.graph, training, count, context.options.threads)
