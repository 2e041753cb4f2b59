"""Decisions that all ranks of a run share, made from global statistics, and what they mean for one rank. Needs no torch.

N vertices, V rows of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mggcn.aggregate.base import AggregationPlan, Strategy
from mggcn.aggregate.local import LocalPlan
from mggcn.aggregate.shared import SharedPlan
from mggcn.blocks.block import OWNED, WHOLE, Block, Stack
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError
from mggcn.memory.device import DEVICES, OPERAND, STORAGE
from mggcn.model.builder import Network
from mggcn.model.choices import InputShape
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.lower import Plans, lower, panel_width
from mggcn.model.network import NETWORKS, Choices, Values, make_values
from mggcn.model.runtime import Sizes
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import RowStats
from mggcn.planning.batches import first_block, gathered_first, stack_of, steps_of
from mggcn.planning.block_evaluation import BlockEvaluation, plan_blocks
from mggcn.planning.history import history_plan
from mggcn.planning.links import pair_rows, scoring_of
from mggcn.planning.pruning import LayerRows, block_stats, blocks_of, choose_rows
from mggcn.planning.shape import GraphShape
from mggcn.planning.sparse_rows import dense_rows, may_read_stored


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDecisions:
    """The choices that every rank must make alike. values: the model, its input that of all ranks together."""

    config: Config
    shape: GraphShape
    stats: PartitionStats
    strategy: Strategy
    values: Values
    required: tuple[LayerRows, ...]
    smaller: Mapping[Block, RowStats]
    """Statistics of the blocks of layers that do not compute all rows."""
    stack: Stack | None = None
    """The blocks of a step, if it does not run over the whole graph."""
    network: Network | None = None
    evaluations: dict[int, BlockEvaluation] = field(default_factory=dict, compare=False)
    """Evaluations by blocks that were planned, by the rows of a rank."""

    @staticmethod
    def of(
        config: Config,
        shape: GraphShape,
        stats: PartitionStats,
        strategy: Strategy,
        network: Network | None = None,
        stack: Stack | None = None,
    ) -> RunDecisions:
        """Make the choices. network: the model, by default that of model.kind. stack: the blocks of a step."""
        run, stack = config.run, stack or stack_of(config, shape)
        blocks, capacities = ((WHOLE,), ()) if stack is None else (stack.blocks, stack.capacities)
        first = None if stack is None else first_block(config.sample, stack)
        whole = InputShape(
            rows=shape.num_vertices,
            cols=shape.num_features,
            nnz=shape.feature_nnz,
            adj_nnz=stats.num_entries,
            aggregated_nnz=shape.aggregated_nnz,
        )
        values = make_values(
            network or NETWORKS[config.model.kind],
            config.model,
            shape.num_features,
            shape.num_classes,
            Choices(
                shape=whole,
                features=run.features,
                products=run.products,
                precision=run.precision,
                recompute=run.recompute == "on",
                num_relations=shape.num_relations,
                counted=shape.repeats == "counted",
                blocks=blocks if first is None else (first, *blocks),
                capacities=capacities,
                compared=stack is not None and config.sample.compare_gradient > 0,
                pairs=scoring_of(config, shape),
                first=first is not None,
                learned=config.data.learned > 0,
                dense_rows="" if stack is None else dense_rows(config, stack),
                stored=stack is not None and may_read_stored(config, shape),
            ),
        )
        stack = None if stack is None else gathered_first(stack, values.training)
        aggregates = values.aggregates if stack is None else ()
        required = choose_rows(run, aggregates, stats, strategy, values.reads_all)
        smaller = block_stats(required, stats)
        return RunDecisions(
            config=config,
            shape=shape,
            stats=stats,
            strategy=strategy,
            values=values.pruned(blocks_of(required)),
            required=required,
            smaller=smaller,
            stack=stack,
            network=network,
        )

    def by_blocks(self, rank: int) -> BlockEvaluation | None:
        """Return how a rank evaluates by blocks, as all of its number of rows do; None if by the whole graph's program."""
        if not self.config.evaluates_by_blocks:
            return None
        rows = self.stats.counts[rank]
        if rows not in self.evaluations:
            entries = self.stats.num_entries
            self.evaluations[rows] = plan_blocks(
                self.config, self.shape, rows, self._sizes(rank), entries, self.network
            )
        return self.evaluations[rows]

    def inputs(self, rank: int, nnz: int) -> InputShape:
        """Return the shape of a rank's input; nnz: of its matrices."""
        rows, shape = self.stats.counts[rank], self.shape
        share = rows / max(shape.num_vertices, 1)
        nnz_x = None if shape.feature_nnz is None else math.ceil(shape.feature_nnz * share)
        return InputShape(
            rows=rows,
            cols=shape.num_features,
            nnz=nnz_x,
            adj_nnz=nnz,
            aggregated_nnz=math.ceil(shape.aggregated_nnz * share),
        )

    def sizes(self, rank: int) -> Sizes:
        """Return the sizes that determine a rank's buffers."""
        sizes, found = self._sizes(rank), self.by_blocks(rank)
        return sizes if found is None else replace(sizes, rows={**sizes.rows, **found.rows})

    def _sizes(self, rank: int) -> Sizes:
        run = self.config.run
        rows, device = self.stats.counts[rank], DEVICES[run.device]
        sets = {OWNED: rows} | ({} if self.stack is None else self.stack.rows) | pair_rows(self.config, self.shape)
        return Sizes(rows=sets, dtype=STORAGE[run.precision], operand=OPERAND[run.precision], device=device)

    def aggregations(self, rank: int) -> tuple[Plans, Plans]:
        """Return a rank's plans of training epochs, and of evaluation and set-up, by block."""
        run, plan, found = self.config.run, self.strategy.plan, self.by_blocks(rank)
        training, exact = (plan(run, self.stats, rank, self.shape.symmetric, training) for training in (True, False))
        # The rows of A^T that are left are the columns of A: two matrices, also of a symmetric graph.
        smaller = {block: plan(run, stats, rank, False, True) for block, stats in self.smaller.items()}
        if self.stack is None:
            return {WHOLE: training, **smaller}, {WHOLE: exact}
        stack = self.stack
        kinds = (value.kind for value in self.values.training.values())
        back = {kind.block for kind in kinds if isinstance(kind, Aggregate) and kind.backward}
        blocks: Plans = {
            block: SharedPlan(size, run.ranks, block in back)
            if block in stack.exchanged
            else self._local(block, LocalPlan(size, block in back), rank)
            for block, size in zip(stack.blocks, stack.capacities, strict=True)
        }
        return blocks, {WHOLE: exact} if found is None else found.plans

    def _local(self, block: Block, local: LocalPlan, rank: int) -> AggregationPlan:
        """Return the plan of a block whose edges are all on the rank; rows of other ranks may come from a cache."""
        if not self.config.reads_history:
            return local
        values = self.values.training.values()
        over = ((v.kind, v.operands[0]) for v in values if isinstance(v.kind, Aggregate) and not v.kind.backward)
        kind, operand = next((kind, operand) for kind, operand in over if kind.block == block)
        return history_plan(self.config, self.stats, rank, local, kind, operand, steps_of(self.config, self.shape))

    def panel_width(self) -> int:
        """Return the columns of a panel of set-up, 0 if it computes nothing: all ranks use the width that fits the
        largest rank.

        Cost: the programs of a rank are lowered.
        """
        counts = self.stats.counts
        rank = counts.index(max(counts))
        values, cols = self.values, self.shape.num_features
        if not values.input.aggregated or values.input.sparse:
            return 0
        training, evaluation = self.aggregations(rank)
        sizes = self.sizes(rank)
        programs = (
            lower("train", values.training, sizes, training),
            lower("evaluate", values.evaluation, sizes, evaluation),
        )
        return panel_width(evaluation[WHOLE], sizes, cols, max(program.arena.nbytes for program in programs))


def could_read_sums(config: Config, shape: GraphShape, stats: PartitionStats, strategy: Strategy) -> bool:
    """Return whether a run on batches, which does not yet, could read its first sums from A X (sample.first full)."""
    if config.sample.first == "full" or shape.task == "links":  # a step's own links are left out of its sums
        return False
    try:
        full = replace(config, sample=replace(config.sample, first="full"))
        RunDecisions.of(full, shape, stats, strategy)
    except (ConfigError, PlanError):
        return False
    return True
