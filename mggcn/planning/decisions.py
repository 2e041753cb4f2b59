"""Decisions that all ranks of a run share, made from global statistics, and what they mean for one rank. Needs no torch.

N vertices, V rows of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mggcn.aggregate.base import AggregationPlan, Strategy
from mggcn.config import Config
from mggcn.memory.device import DEVICES, OPERAND, STORAGE
from mggcn.model.builder import Network
from mggcn.model.choices import InputShape
from mggcn.model.lower import Aggregations, lower, panel_width
from mggcn.model.network import NETWORKS, Choices, Values, make_values
from mggcn.model.runtime import Sizes
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import RowStats
from mggcn.planning.pruning import LayerRows, choose_rows, level_stats, levels_of, pruned_plans
from mggcn.planning.shape import GraphShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDecisions:
    """The choices that every rank must make alike. values: the model, its input that of all ranks together."""

    config: Config
    shape: GraphShape
    stats: PartitionStats
    strategy: Strategy
    values: Values
    required: tuple[LayerRows, ...]
    levels: Mapping[int, RowStats]
    """Statistics of the layers that do not compute all rows, by level of the partition statistics' `required`."""

    @staticmethod
    def of(
        config: Config, shape: GraphShape, stats: PartitionStats, strategy: Strategy, network: Network | None = None
    ) -> RunDecisions:
        """Make the choices. network: the model, by default that of model.kind."""
        run = config.run
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
            ),
        )
        required = choose_rows(run, values.aggregates, stats, strategy, values.reads_all)
        levels = level_stats(required, stats)
        return RunDecisions(
            config=config,
            shape=shape,
            stats=stats,
            strategy=strategy,
            values=values.pruned(levels_of(required)),
            required=required,
            levels=levels,
        )

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
        run = self.config.run
        rows, device = self.stats.counts[rank], DEVICES[run.device]
        return Sizes(rows=rows, dtype=STORAGE[run.precision], operand=OPERAND[run.precision], device=device)

    def aggregations(self, rank: int) -> tuple[AggregationPlan, AggregationPlan]:
        """Return a rank's plans of training epochs, and of evaluation and set-up."""
        training, exact = (
            self.strategy.plan(self.config.run, self.stats, rank, self.shape.symmetric, training)
            for training in (True, False)
        )
        return training, exact

    def pruned(self, rank: int) -> dict[int, AggregationPlan]:
        """Return a rank's plans of layers that do not compute all rows, by level."""
        return pruned_plans(self.config.run, self.levels, self.strategy, rank)

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
        training, exact = self.aggregations(rank)
        sizes = self.sizes(rank)
        programs = (
            lower("train", values.training, sizes, Aggregations(training, self.pruned(rank))),
            lower("evaluate", values.evaluation, sizes, Aggregations(exact, {})),
        )
        return panel_width(exact, sizes, cols, max(program.arena.nbytes for program in programs))
