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
from mggcn.model.choices import InputChoice, InputShape, LayerChoice, choose_input, choose_layers
from mggcn.model.lower import Model, lower_evaluation, lower_training, panel_width
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.partition import RowStats
from mggcn.planning.pruning import LayerRows, choose_rows, level_stats, of_layers, pruned_plans
from mggcn.planning.regions import input_bytes
from mggcn.planning.shape import GraphShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDecisions:
    """The choices that every rank must make alike. chosen: the input of all ranks together."""

    config: Config
    shape: GraphShape
    stats: PartitionStats
    strategy: Strategy
    chosen: InputChoice
    layers: tuple[LayerChoice, ...]
    required: tuple[LayerRows, ...]
    levels: Mapping[int, RowStats]
    """PartitionStats of the layers that do not compute all rows, by level of the figures' `required`."""

    @staticmethod
    def of(config: Config, shape: GraphShape, stats: PartitionStats, strategy: Strategy) -> RunDecisions:
        """Make the choices."""
        whole = InputShape(
            shape.num_vertices, shape.num_features, shape.feature_nnz, stats.num_entries, shape.aggregated_nnz
        )
        width = (*config.model.hidden, shape.num_classes)[0]
        chosen = choose_input(config.model, whole, width, config.run.features, config.run.precision)
        layers = choose_layers(config.model, shape.num_features, shape.num_classes, chosen, config.run.products)
        required = choose_rows(config.run, layers, stats, strategy)
        levels = level_stats(required, stats)
        return RunDecisions(
            config=config,
            shape=shape,
            stats=stats,
            strategy=strategy,
            chosen=chosen,
            layers=layers,
            required=required,
            levels=levels,
        )

    def inputs(self, rank: int, nnz: int) -> InputShape:
        """Return the shape of a rank's input; nnz: of its matrices."""
        rows, shape = self.stats.counts[rank], self.shape
        share = rows / max(shape.num_vertices, 1)
        nnz_x = None if shape.feature_nnz is None else math.ceil(shape.feature_nnz * share)
        return InputShape(rows, shape.num_features, nnz_x, nnz, math.ceil(shape.aggregated_nnz * share))

    def model(self, inputs: InputShape) -> Model:
        """Return the model of a rank with such an input."""
        config, chosen = self.config, self.chosen
        choice = InputChoice(chosen.sparse, chosen.aggregated, input_bytes(config, chosen, inputs), chosen.reason)
        scaled = config.model.aggregates and config.model.norm == "symmetric"
        precision, device = config.run.precision, DEVICES[config.run.device]
        dtype, operand = STORAGE[precision], OPERAND[precision]
        return Model(config.model, choice, self.layers, inputs.rows, dtype, scaled, operand, device)

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
        """Return the columns of a panel of set-up: a panel is sent, so all ranks take what the largest can.

        Cost: the programs of a rank are lowered.
        """
        counts = self.stats.counts
        rank = counts.index(max(counts))
        model = self.model(self.inputs(rank, 0))
        training, exact = self.aggregations(rank)
        of_layer = of_layers(self.required, self.pruned(rank))
        programs = (lower_training(model, training, of_layer), lower_evaluation(model, exact))
        return panel_width(model, exact, max(program.arena.nbytes for program in programs))
