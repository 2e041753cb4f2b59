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
from mggcn.errors import GraphError, PlanError
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
from mggcn.plan.machine import MIB, human
from mggcn.plan.memory import ALIGNMENT, ITEM_BYTES, BufferSpec

RUNTIME_BYTES = {"cpu": 285 * MIB, "cuda": 900 * MIB}
"""A process before it holds any data: Python, torch, its math libraries and their work space (bench/memory.py).

On the CPU the middle of 250 to 320 MiB: how much of torch's libraries is resident depends on the state of the page cache.
"""
CHUNK_BYTES = 24 * MIB
"""What set-up reads and converts at a time, unless the graph is smaller (partition/sweep.py, partition/features.py)."""
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "sgd": 1}


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What a plan knows of a graph: a bare shape, or the counts of a store."""

    name: str
    num_vertices: int
    num_edges: int
    num_features: int
    num_classes: int
    symmetric: bool
    weighted: bool = False
    feature_nnz: int | None = None
    """Nonzeros of sparse features; None: dense."""
    aggregated_nnz: int = 0
    """Estimated nonzeros of A_hat X for sparse features."""


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
        sums = (self.gradient_bytes, SIGNAL_BYTES) if program is self.train else (self.score_bytes,)
        return sent + sum(ring_bytes(nbytes, self.ranks) for nbytes in sums)


SIGNAL_BYTES = 16
"""Loss and stop flag, float64, summed over ranks once an epoch."""


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
        runtime = self.largest.regions["runtime"]
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
    _check_shape(shape)
    return RunPlan(
        config, shape, statistics, tuple(plan_rank(config, shape, statistics, counts, r) for r in range(len(counts)))
    )


def _check_shape(shape: GraphShape) -> None:
    if not 1 <= shape.num_vertices < 2**31:
        raise GraphError(f"{shape.name} must have 1 .. 2^31 - 1 vertices (32-bit ids), got {shape.num_vertices:,}")
    if not 0 <= shape.num_edges <= shape.num_vertices**2:
        raise GraphError(
            f"{shape.num_vertices:,} vertices have at most {shape.num_vertices**2:,} edges, got {shape.num_edges:,}"
        )
    if shape.feature_nnz is not None and not 0 <= shape.feature_nnz <= shape.num_vertices * shape.num_features:
        raise GraphError(
            f"{shape.num_vertices:,} x {shape.num_features:,} features have at most "
            f"{shape.num_vertices * shape.num_features:,} nonzeros, got {shape.feature_nnz:,}"
        )
    for name in ("num_features", "num_classes"):
        if getattr(shape, name) < 1:
            raise GraphError(
                f"{shape.name} has {name} = {getattr(shape, name)}, training needs at least 1; add "
                f"{'features' if name == 'num_features' else 'labels'} when you prepare the graph"
            )


def plan_rank(
    config: Config, shape: GraphShape, statistics: TileStatistics, counts: tuple[int, ...], rank: int
) -> RankPlan:
    """Plan one rank: choose, lower, place, and add up its bytes."""
    from mggcn.aggregate.broadcast import BroadcastPlan

    rows, ranks, dtype = counts[rank], len(counts), config.run.precision
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
    chosen = choose_input(config.model, whole, width, config.run.features, dtype)
    choice = InputChoice(chosen.sparse, chosen.aggregated, _input_bytes(config, chosen, inputs, dtype), chosen.reason)
    layers = choose_layers(config.model, shape.num_features, shape.num_classes, chosen, config.run.products)
    model = Model(config.model, choice, layers, rows, dtype, graph and config.model.norm == "symmetric")
    aggregation = BroadcastPlan(rank, counts)
    train, evaluate = lower_training(model, aggregation), lower_evaluation(model, aggregation)
    setup = lower_setup(model, aggregation, _panel_width(model, counts))
    programs = [train, evaluate, *([setup] if setup else [])]
    arena = max(p.arena.nbytes for p in programs)
    item = ITEM_BYTES[dtype]
    weights = sum(
        _padded(c.d_in * c.d_out * item) + (_padded(c.d_out * item) if config.model.bias else 0) for c in layers
    )
    regions = {
        "arena": arena,
        "features": choice.nbytes,
        "graph": _graph_bytes(shape, tiles, rows, ranks, item) if graph else 0,
        "vertex data": rows * (8 + 4 + 1 + (item if graph else 0)) + _metric_bytes(config, shape),
        "weights and optimiser": weights * (3 + OPTIMIZER_STATES[config.train.optimizer]),
        "runtime": RUNTIME_BYTES[config.run.device],
    }
    return RankPlan(
        rank,
        model,
        train,
        evaluate,
        setup,
        regions,
        _setup_bytes(config, shape, regions, choice, inputs),
        aggregation,
        weights,
        ranks,
        sum(tiles),
        paper_arena_bytes(model, ranks, max(counts)),
        _score_bytes(config, shape) or 9 * shape.num_classes * 8,
    )


def _panel_width(model: Model, counts: tuple[int, ...]) -> int:
    """Columns of a panel of set-up. The largest rank's sizes decide: a panel is sent, so all ranks take the same."""
    from mggcn.aggregate.broadcast import BroadcastPlan

    rank = counts.index(max(counts))
    largest, aggregation = dataclasses.replace(model, rows=counts[rank]), BroadcastPlan(rank, counts)
    programs = (lower_training(largest, aggregation), lower_evaluation(largest, aggregation))
    return panel_width(largest, aggregation, max(p.arena.nbytes for p in programs))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _input_bytes(config: Config, chosen: InputChoice, inputs: InputShape, dtype: str) -> int:
    """Bytes of the chosen input on this rank."""
    from mggcn.model.choices import sparse_bytes

    if not chosen.sparse:
        return BufferSpec("", inputs.rows, inputs.cols, dtype).nbytes
    nnz = inputs.aggregated_nnz if chosen.aggregated else inputs.nnz or 0
    return sparse_bytes(inputs, nnz, dtype, config.model.input_dropout > 0)


def _graph_bytes(shape: GraphShape, tiles: list[int], rows: int, ranks: int, item: int) -> int:
    """Bytes of the tiles: 64-bit row pointers, 32-bit columns, values if the edges have weights; A too if not symmetric."""
    entry = 4 + (item if shape.weighted else 0)
    return (sum(tiles) * entry + ranks * (rows + 1) * 8) * (1 if shape.symmetric else 2)


def _score_bytes(config: Config, shape: GraphShape) -> int:
    """Scores of all vertices that every rank gathers for ROC AUC: one column for two classes."""
    columns = 1 if shape.num_classes == 2 else shape.num_classes
    return 8 * shape.num_vertices * columns if config.train.metric == "roc_auc" else 0


def _metric_bytes(config: Config, shape: GraphShape) -> int:
    """The gathered scores, labels and mask of ROC AUC, and the copies that ranking them takes (train/ranking.py)."""
    scores = _score_bytes(config, shape)
    return 4 * scores + 64 * shape.num_vertices if scores else 0


def _setup_bytes(
    config: Config, shape: GraphShape, regions: Mapping[str, int], choice: InputChoice, inputs: InputShape
) -> int:
    """Peak of set-up: the assignment of all vertices (20 bytes each while drawn, 6 after), the shard, chunks of files."""
    shard = regions["features"] + regions["graph"] + regions["vertex data"]
    sorting = 16 * (inputs.nnz or 0) if choice.sparse else 0
    if choice.sparse and choice.aggregated:
        sorting += 16 * (shape.feature_nnz or 0) + 32 * inputs.aggregated_nnz
    drawing = 20 * shape.num_vertices if config.run.ranks > 1 or config.run.order == "permute" else 0
    return regions["runtime"] + max(drawing, 6 * shape.num_vertices + shard + sorting + min(CHUNK_BYTES, shard))
