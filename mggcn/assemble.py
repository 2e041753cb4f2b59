"""The only module that names concrete classes: from a graph and a configuration to a plan, and to a rank that trains."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mggcn.config import Config
from mggcn.errors import BackendError, ConfigError, GraphError
from mggcn.graph.csr import CSR, Graph
from mggcn.partition.order import Assignment, assign
from mggcn.partition.statistics import (
    TileStatistics,
    estimate_aggregated_nnz,
    expected_statistics,
    tile_statistics,
)
from mggcn.plan.machine import free_bytes
from mggcn.train.runplan import GraphShape, RankPlan, RunPlan, plan_run

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator
    from mggcn.comm.counting import CountingCommunicator
    from mggcn.train.trainer import RankTrainer, Stop

_METRICS = {"accuracy": "accuracy", "roc_auc": "roc_auc", "roc auc": "roc_auc", "macro_f1": "macro_f1"}


def resolve(config: Config, graph: Graph) -> Config:
    """Return the configuration with what `auto` stands for on this graph and machine filled in."""
    train, run = config.train, config.run
    if train.metric == "auto":
        train = dataclasses.replace(train, metric=_METRICS.get(str(graph.meta.get("metric", "")).lower(), "accuracy"))  # type: ignore[arg-type]
    if run.transport == "auto":
        run = dataclasses.replace(run, transport="single" if run.ranks == 1 else "gloo")
    return dataclasses.replace(config, train=train, run=run)


def threads_per_rank(config: Config) -> int:
    """Return the threads of one rank: as set, or an equal share of the cores that this process may use."""
    return config.run.threads or max(1, len(os.sched_getaffinity(0)) // config.run.ranks)


def memory_limit(config: Config) -> int:
    """Return the bytes that one rank may use: as set, or an equal share of what is free."""
    return config.run.memory_limit or free_bytes() // config.run.ranks


def graph_shape(graph: Graph, config: Config) -> GraphShape:
    """Return what a plan needs to know of a graph. Cost: none, or a sample of A_hat X for sparse features."""
    features = graph.features
    if features is None:
        raise GraphError(
            f"{graph.name} has no features; give it some when you prepare it, for example a sparse identity matrix"
        )
    sparse = isinstance(features, CSR)
    aggregates = config.model.kind == "gcn" and not config.model.input_dropout
    return GraphShape(
        graph.name,
        graph.num_vertices,
        graph.num_edges,
        features.num_cols if isinstance(features, CSR) else features.shape[1],
        graph.num_classes,
        graph.symmetric,
        graph.adj.values is not None,
        features.nnz if isinstance(features, CSR) else None,
        estimate_aggregated_nnz(graph, self_loops=config.model.self_loops) if sparse and aggregates else 0,
    )


def plan_graph(config: Config, graph: Graph, statistics: TileStatistics | None = None) -> tuple[RunPlan, Assignment]:
    """Assign the vertices and plan every rank of a run on `graph`.

    Cost: two sweeps over the edges unless `statistics` are given. Raises: ConfigError, GraphError, PlanError.
    """
    shape = graph_shape(graph, config)
    owners = assign(graph.num_vertices, config.run.ranks, config.run.order, config.train.seed)
    if statistics is None:
        statistics = tile_statistics(graph, owners, self_loops=config.model.self_loops)
    return plan_run(config, shape, statistics, owners.counts), owners


def plan_shape(config: Config, shape: GraphShape) -> RunPlan:
    """Plan a run on a graph of which only the shape is known, in the expectation over random assignments."""
    from mggcn.partition.order import part_sizes

    counts = part_sizes(shape.num_vertices, config.run.ranks)
    loops = config.model.self_loops
    statistics = expected_statistics(shape.num_vertices, shape.num_edges, counts, self_loops=loops)
    return plan_run(config, shape, statistics, counts)


@dataclass(slots=True)
class Rank:
    """A rank that is ready to train: its trainer, the counted transport, and how long set-up took."""

    trainer: RankTrainer
    comm: CountingCommunicator
    plan: RankPlan


def make_rank(
    config: Config, graph: Graph, plan: RunPlan, owners: Assignment, comm: Communicator, stop: Stop | None = None
) -> Rank:
    """Build one rank: its shard, its device memory as planned, its inputs. Collective.

    Raises: GraphError, BackendError.
    """
    import torch

    from mggcn.aggregate.broadcast import Broadcast
    from mggcn.backend.cpu import CpuBackend
    from mggcn.comm.counting import CountingCommunicator
    from mggcn.partition.features import FeatureReader
    from mggcn.partition.shard import ShardOptions, build_shard
    from mggcn.train.inputs import load_inputs, upload_tiles
    from mggcn.train.ranking import RankingScores
    from mggcn.train.runtime import DTYPES, RankRuntime, Weights, arena_views
    from mggcn.train.trainer import RankTrainer, Stop

    if config.run.device != "cpu":
        raise BackendError("run.device cuda is not available in this version of mggcn; use --device cpu")
    if config.run.ranks != comm.size:
        raise ConfigError(f"run.ranks is {config.run.ranks}, but {comm.size} ranks are connected")
    threads = threads_per_rank(config)
    torch.set_num_threads(threads)
    counted = CountingCommunicator(comm)
    rank_plan = plan.ranks[comm.rank]
    dtype = DTYPES[config.run.precision]
    backend = CpuBackend(dtype, threads)
    options = ShardOptions(
        config.model.kind == "gcn",
        config.model.norm,
        config.model.self_loops,
        config.data.splits,
        config.data.split,
        np.dtype("f8" if config.run.precision == "fp64" else "f4").name,
        threads,
    )
    shard = build_shard(graph, owners, comm.rank, options)
    if config.train.patience and not shard.split_sizes[1]:
        raise ConfigError("train.patience needs validation vertices, and this split has none; set train.patience = 0")
    reader = FeatureReader(graph, owners, comm.rank, config.data.row_normalize)
    inputs = load_inputs(backend, shard, reader, rank_plan.model, threads)
    tiles, tiles_t = upload_tiles(backend, shard)
    aggregation = Broadcast(rank_plan.aggregation, tiles, tiles_t, counted, backend)  # type: ignore[arg-type]
    programs = [rank_plan.train, rank_plan.evaluate, *([rank_plan.setup] if rank_plan.setup else [])]
    arena = backend.allocate(rank_plan.arena_bytes)
    weights = Weights(rank_plan.model.layers, config.model.bias, dtype, backend)
    classes = plan.shape.num_classes
    counts = torch.zeros((3, 3, classes), dtype=torch.int64)
    signals = torch.zeros(2, dtype=torch.float64)
    runtime = RankRuntime(backend, aggregation, inputs, weights, arena_views(arena, programs), signals, counts)
    if rank_plan.setup:
        runtime.run(rank_plan.setup)
    ranking = None
    if config.train.metric == "roc_auc":
        ranking = RankingScores(inputs, graph.num_vertices, classes, counted)
    trainer = RankTrainer(config, rank_plan, runtime, counted, config.train.metric, ranking, stop or Stop())
    return Rank(trainer, counted, rank_plan)
