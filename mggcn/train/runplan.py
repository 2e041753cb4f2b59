"""The plan of a run: per rank, every buffer, byte and message, from the sizes of the graph and the configuration alone.

N vertices, P ranks, V rows of a rank. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mggcn.aggregate.base import AggregationPlan, Strategy
from mggcn.config import Config
from mggcn.errors import PlanError
from mggcn.model.choices import InputChoice, InputShape, choose_input, choose_layers
from mggcn.model.lower import (
    Model,
    Program,
    lower_evaluation,
    lower_setup,
    lower_training,
    panel_width,
    paper_arena_bytes,
    spmm_ops,
)
from mggcn.partition.parts import Figures
from mggcn.partition.tiles import check_tile_nnz
from mggcn.plan.device import FIGURES, STORAGE
from mggcn.plan.machine import human
from mggcn.plan.memory import BufferSpec
from mggcn.plan.steps import Step, bytes_sent, num_messages, num_products
from mggcn.plan.work import ring_bytes
from mggcn.train.prune import LayerRows, choose_rows, of_layers, pruned_plans, set_bytes
from mggcn.train.regions import RankSizes, input_bytes, score_bytes
from mggcn.train.shape import GraphShape, check_shape


@dataclass(frozen=True)
class RankPlan:
    """One rank: its model, programs and bytes."""

    rank: int
    model: Model
    train: Program
    evaluate: Program
    setup: Program | None
    regions: Mapping[str, int]
    """Bytes by purpose: arena, features, graph, vertex data, weights and optimiser, runtime."""
    setup_bytes: int
    """Peak of set-up, before the first epoch."""
    aggregation: AggregationPlan
    """How training epochs aggregate."""
    exact: AggregationPlan
    """How evaluation and set-up aggregate."""
    states: Mapping[str, tuple[BufferSpec, ...]]
    """What the aggregations of training epochs keep, by name of the op."""
    gradient_bytes: int
    ranks: int
    nnz: int
    paper_bytes: int
    score_bytes: int
    """What an evaluation sums over ranks: counts of each class, or the scores of all vertices for ROC AUC."""
    rows: tuple[LayerRows, ...] = ()
    """What every aggregating layer computes in training epochs."""
    pruned: Mapping[int, AggregationPlan] = field(default_factory=dict)
    """How layers aggregate that do not compute all rows, by level of the figures' `wanted`."""

    @property
    def arena_bytes(self) -> int:
        programs = [self.train, self.evaluate, *([self.setup] if self.setup else [])]
        return max(program.arena.nbytes for program in programs)

    @property
    def total_bytes(self) -> int:
        """Predicted peak of the process."""
        return max(sum(self.regions.values()), self.setup_bytes)

    @cached_property
    def num_spmm(self) -> int:
        """Sparse products with the graph in one training epoch."""
        return sum(num_products(steps) for steps in self.steps(self.train))

    @property
    def evaluate_spmm(self) -> int:
        """Sparse products with the graph in one evaluation."""
        return sum(num_products(steps) for steps in self.steps(self.evaluate))

    def steps(self, program: Program, turn: int = 0) -> list[tuple[Step, ...]]:
        """Return the steps of every aggregation of a program, in the epochs e with e mod period = turn."""
        plans = of_layers(self.rows, self.pruned) if program is self.train else {}
        every = self.aggregation if program is self.train else self.exact
        specs = [(op, program.arena[op.src].spec) for op in spmm_ops(program.ops)]
        return [plans.get(op.layer, every).steps(spec.cols, spec.dtype, op.backward, turn) for op, spec in specs]

    def _turns(self, program: Program) -> range:
        return range(self.aggregation.period if program is self.train else 1)

    def messages(self, program: Program) -> int:
        """Collective operations of a program: broadcasts, and the sums of gradients, loss and counts."""
        if self.ranks == 1:
            return 0
        return sum(num_messages(steps) for steps in self.steps(program)) + (2 if program is self.train else 1)

    def bytes_sent(self, program: Program) -> int:
        """Bytes that leave this rank in a program; an all-reduce counts as 2 (P - 1) / P of its buffer, as a ring sends.

        Where epochs differ: the average over a period, rounded up.
        """
        if self.ranks == 1:
            return 0
        turns = self._turns(program)
        sent = -(-sum(bytes_sent(steps) for turn in turns for steps in self.steps(program, turn)) // len(turns))
        sums = (self.gradient_bytes, 8 * SIGNALS) if program is self.train else (self.score_bytes,)
        return sent + sum(ring_bytes(nbytes, self.ranks) for nbytes in sums)


SIGNALS = 3
"""Loss, stop flag and seconds, float64, summed over ranks once an epoch."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of all ranks."""

    config: Config
    shape: GraphShape
    figures: Figures
    strategy: Strategy
    ranks: tuple[RankPlan, ...]

    @property
    def largest(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def process_bytes(self) -> int:
        """Predicted peak of one process: the largest rank's, or that of all ranks if they are threads of one process."""
        if self.config.run.transport != "threads":
            return self.largest.total_bytes
        runtime = FIGURES[self.config.run.device].process_bytes
        return runtime + sum(rank.total_bytes - runtime for rank in self.ranks)

    def __str__(self) -> str:
        from mggcn.train.plantext import render

        return render(self)

    def check(self, limit: int) -> None:
        """Raise PlanError if a rank needs more than `limit` bytes; the message says what would fit."""
        from mggcn.train.advice import advice

        rank = self.largest
        if rank.total_bytes <= limit:
            return
        widths = ",".join(str(w) for w in self.config.model.hidden)
        raise PlanError(
            f"rank {rank.rank} needs {human(rank.total_bytes)} for {rank.model.rows:,} of {self.shape.num_vertices:,} rows "
            f"and hidden widths {widths or 'none'}, {human(limit)} may be used; {advice(self, limit)}"
        )


def plan_run(config: Config, shape: GraphShape, figures: Figures, strategy: Strategy) -> RunPlan:
    """Plan every rank. Cost: no pass over the graph.

    Raises: GraphError for a matrix of 2^31 nonzeros or more; PlanError for an inconsistent program.
    """
    check_shape(shape)
    ranks = range(len(figures.counts))
    return RunPlan(
        config, shape, figures, strategy, tuple(plan_rank(config, shape, figures, strategy, rank) for rank in ranks)
    )


def plan_rank(config: Config, shape: GraphShape, figures: Figures, strategy: Strategy, rank: int) -> RankPlan:
    """Plan one rank: choose, lower, place, and add up its bytes."""
    counts, precision = figures.counts, config.run.precision
    rows, ranks = counts[rank], len(counts)
    graph = config.model.aggregates
    aggregation, exact = (
        strategy.plan(config.run, figures, rank, shape.symmetric, training) for training in (True, False)
    )
    nnz = sum(matrix.nnz for matrix in aggregation.matrices) if graph else 0
    share = rows / max(shape.num_vertices, 1)
    nnz_x = None if shape.feature_nnz is None else math.ceil(shape.feature_nnz * share)
    inputs = InputShape(rows, shape.num_features, nnz_x, nnz, math.ceil(shape.aggregated_nnz * share))
    # Every rank must make the same choice: it is made from global figures.
    whole = InputShape(
        shape.num_vertices, shape.num_features, shape.feature_nnz, figures.num_entries, shape.aggregated_nnz
    )
    width = (*config.model.hidden, shape.num_classes)[0]
    chosen = choose_input(config.model, whole, width, config.run.features, precision)
    choice = InputChoice(chosen.sparse, chosen.aggregated, input_bytes(config, chosen, inputs), chosen.reason)
    layers = choose_layers(config.model, shape.num_features, shape.num_classes, chosen, config.run.products)
    scaled = graph and config.model.norm == "symmetric"
    model = Model(config.model, choice, layers, rows, STORAGE[precision], scaled, FIGURES[config.run.device])
    wanted = choose_rows(config.run, layers, figures, strategy)
    pruned = pruned_plans(config.run, wanted, figures, strategy, rank)
    held = (aggregation, *pruned.values()) if graph else ()
    matrices = [matrix for plan in held for matrix in plan.matrices]
    matrices_t = [matrix for plan in held for matrix in plan.matrices_t]
    for matrix in (*matrices, *matrices_t):
        check_tile_nnz(matrix.nnz, ranks)
    of_layer = of_layers(wanted, pruned)
    train, evaluate = lower_training(model, aggregation, of_layer), lower_evaluation(model, exact)
    panel = _panel_width(config, shape, figures, strategy, model, wanted)
    setup = lower_setup(model, exact, panel)
    programs = [train, evaluate, *([setup] if setup else [])]
    arena = max(p.arena.nbytes for p in programs)
    states = {
        op.name: of_layer.get(op.layer, aggregation).state(op.name, train.arena[op.src].spec.cols, model.dtype)
        for op in spmm_ops(train.ops)
    }
    indices = sum(plan.index_bytes for plan in held)
    assignment = figures.assignment_bytes + set_bytes(pruned)
    sizes = RankSizes(config, shape, model, inputs, matrices, matrices_t, indices, assignment)
    regions = {"arena": arena} | sizes.regions(panel if setup else 0)
    if model.device.is_host:
        regions["who holds which rows"] = figures.kept_bytes * shape.num_vertices
    if kept := sum(spec.nbytes for specs in states.values() for spec in specs):
        regions["messages and sums in flight"] = kept
    return RankPlan(
        rank,
        model,
        train,
        evaluate,
        setup,
        regions,
        sizes.setup_bytes(regions),
        aggregation,
        exact,
        states,
        sizes.weight_bytes,
        ranks,
        nnz,
        paper_arena_bytes(model, ranks, max(counts)),
        score_bytes(config, shape) or 9 * shape.num_classes * 8,
        wanted,
        pruned,
    )


def _panel_width(
    config: Config,
    shape: GraphShape,
    figures: Figures,
    strategy: Strategy,
    model: Model,
    wanted: Sequence[LayerRows],
) -> int:
    """Columns of a panel of set-up. The largest rank's sizes decide: a panel is sent, so all ranks take the same."""
    rank = figures.counts.index(max(figures.counts))
    largest = dataclasses.replace(model, rows=figures.counts[rank])
    training, exact = (strategy.plan(config.run, figures, rank, shape.symmetric, kind) for kind in (True, False))
    of_layer = of_layers(wanted, pruned_plans(config.run, wanted, figures, strategy, rank))
    programs = (lower_training(largest, training, of_layer), lower_evaluation(largest, exact))
    return panel_width(largest, exact, max(p.arena.nbytes for p in programs))
