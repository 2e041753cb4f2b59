"""The plan of a run: per rank, every buffer, byte and message, from the sizes of the graph and the configuration alone.

N vertices, P ranks, V rows of a rank. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mggcn.aggregate.base import AggregationPlan
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
from mggcn.partition.statistics import TileStatistics
from mggcn.partition.tiles import check_tile_nnz
from mggcn.plan.device import FIGURES, STORAGE
from mggcn.plan.machine import human
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
    gradient_bytes: int
    ranks: int
    nnz: int
    paper_bytes: int
    score_bytes: int
    """What an evaluation sums over ranks: counts of each class, or the scores of all vertices for ROC AUC."""

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
        return len(spmm_ops(self.train.ops)) * self.aggregation.num_spmm

    @property
    def evaluate_spmm(self) -> int:
        """Sparse products with the graph in one evaluation."""
        return len(spmm_ops(self.evaluate.ops)) * self.aggregation.num_spmm

    def messages(self, program: Program) -> int:
        """Collective operations of a program: broadcasts, and the sums of gradients, loss and counts."""
        if self.ranks == 1:
            return 0
        return len(spmm_ops(program.ops)) * self.aggregation.messages + (2 if program is self.train else 1)

    def bytes_sent(self, program: Program) -> int:
        """Bytes that leave this rank in a program; an all-reduce counts as 2 (P - 1) / P of its buffer, as a ring sends."""
        if self.ranks == 1:
            return 0
        sent = sum(self.aggregation.bytes_sent(program.arena[op.src].spec) for op in spmm_ops(program.ops))
        sums = (self.gradient_bytes, 8 * SIGNALS) if program is self.train else (self.score_bytes,)
        return sent + sum(ring_bytes(nbytes, self.ranks) for nbytes in sums)


SIGNALS = 3
"""Loss, stop flag and seconds, float64, summed over ranks once an epoch."""


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends to sum a buffer over the ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


@dataclass(frozen=True)
class RunPlan:
    """The plan of all ranks."""

    config: Config
    shape: GraphShape
    statistics: TileStatistics
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


def plan_run(config: Config, shape: GraphShape, statistics: TileStatistics, counts: tuple[int, ...]) -> RunPlan:
    """Plan every rank. `counts`: rows per rank. Cost: no pass over the graph.

    Raises: GraphError for a tile of 2^31 nonzeros or more; PlanError for an inconsistent program.
    """
    check_shape(shape)
    return RunPlan(
        config, shape, statistics, tuple(plan_rank(config, shape, statistics, counts, r) for r in range(len(counts)))
    )


def plan_rank(
    config: Config, shape: GraphShape, statistics: TileStatistics, counts: tuple[int, ...], rank: int
) -> RankPlan:
    """Plan one rank: choose, lower, place, and add up its bytes."""
    from mggcn.aggregate.broadcast import BroadcastPlan

    rows, ranks, precision = counts[rank], len(counts), config.run.precision
    graph = config.model.kind == "gcn"
    tiles = [int(n) for n in statistics.nnz[rank]] if graph else []
    for nnz in tiles:
        check_tile_nnz(nnz, ranks)
    share = rows / max(shape.num_vertices, 1)
    nnz_x = None if shape.feature_nnz is None else math.ceil(shape.feature_nnz * share)
    inputs = InputShape(rows, shape.num_features, nnz_x, sum(tiles), math.ceil(shape.aggregated_nnz * share))
    # Every rank must make the same choice: it is made from global figures.
    whole = InputShape(
        shape.num_vertices, shape.num_features, shape.feature_nnz, int(statistics.nnz.sum()), shape.aggregated_nnz
    )
    width = (*config.model.hidden, shape.num_classes)[0]
    chosen = choose_input(config.model, whole, width, config.run.features, precision)
    choice = InputChoice(chosen.sparse, chosen.aggregated, input_bytes(config, chosen, inputs), chosen.reason)
    layers = choose_layers(config.model, shape.num_features, shape.num_classes, chosen, config.run.products)
    scaled = graph and config.model.norm == "symmetric"
    model = Model(config.model, choice, layers, rows, STORAGE[precision], scaled, FIGURES[config.run.device])
    aggregation = BroadcastPlan(rank, counts)
    train, evaluate = lower_training(model, aggregation), lower_evaluation(model, aggregation)
    panel = _panel_width(model, counts)
    setup = lower_setup(model, aggregation, panel)
    programs = [train, evaluate, *([setup] if setup else [])]
    arena = max(p.arena.nbytes for p in programs)
    # Tile (i, j) of A^T has the edges from part j to part i: that of A those of tile (j, i).
    backward = [] if shape.symmetric or not graph else [int(n) for n in statistics.nnz[:, rank]]
    sizes = RankSizes(config, shape, model, inputs, tiles, backward, ranks)
    regions = {"arena": arena} | sizes.regions(panel if setup else 0)
    return RankPlan(
        rank,
        model,
        train,
        evaluate,
        setup,
        regions,
        sizes.setup_bytes(regions),
        aggregation,
        sizes.weight_bytes,
        ranks,
        sum(tiles),
        paper_arena_bytes(model, ranks, max(counts)),
        score_bytes(config, shape) or 9 * shape.num_classes * 8,
    )


def _panel_width(model: Model, counts: tuple[int, ...]) -> int:
    """Columns of a panel of set-up. The largest rank's sizes decide: a panel is sent, so all ranks take the same."""
    from mggcn.aggregate.broadcast import BroadcastPlan

    rank = counts.index(max(counts))
    largest, aggregation = dataclasses.replace(model, rows=counts[rank]), BroadcastPlan(rank, counts)
    programs = (lower_training(largest, aggregation), lower_evaluation(largest, aggregation))
    return panel_width(largest, aggregation, max(p.arena.nbytes for p in programs))
