"""Builds a rank that can train from a plan: its backend, shard, inputs, aggregations and memory."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler import record_function

from mggcn.aggregate.base import BlockAggregations, BuildContext
from mggcn.assemble.batches import (
    drawn_tiles,
    mapped_once,
    norm_of,
    relays_of,
    sampled_feed,
    shard_options,
    stored_features,
)
from mggcn.assemble.first_sums import compute_first_sums
from mggcn.assemble.links import link_feed, link_scores, pair_loader
from mggcn.assemble.parts import scales_of_all, waves_of
from mggcn.assemble.plan import threads_per_rank
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.figures import ASSUMED, Figures
from mggcn.backend.cuda.base import Device
from mggcn.backend.cuda.driver import visible_gpus
from mggcn.backend.sparse_products import WrapSpmm
from mggcn.backend.spmm_choice import NO_CHOICES, Choices
from mggcn.blocks.block import OWNED, WHOLE, Stack
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.gather import refuse_shared
from mggcn.comm.rank import gpu_index
from mggcn.config import Config, TrainConfig
from mggcn.errors import ConfigError
from mggcn.feed.batch import Batch, Feed, WholeGraph
from mggcn.feed.features import FeatureReader, VertexFeatures
from mggcn.feed.labels import read_labels
from mggcn.feed.norm_scales import NormScales
from mggcn.graph.csr import Graph
from mggcn.graph.splits import SPLITS, evaluated_rows
from mggcn.host import release_freed
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import REAL, TF32_PARTS, not_captured
from mggcn.model.runtime import Inputs, Rows, Target
from mggcn.partition.base import Partition
from mggcn.partition.order import Owners, whole_graph
from mggcn.partition.rows.partition import row_owners
from mggcn.partition.rows.shard import ShardOptions, build_shard
from mggcn.planning.batches import padded_layout, pads_batches
from mggcn.planning.learned import row_moments
from mggcn.planning.links import keeps_pairs, pair_room
from mggcn.planning.op_cost import epoch_threads, first_threads
from mggcn.planning.pruning import build_blocks
from mggcn.planning.run import SIGNALS, RankPlan, RunPlan
from mggcn.planning.sparse_rows import sparse_rows
from mggcn.planning.task import COUNTED
from mggcn.train.batches import BatchLoader
from mggcn.train.block_evaluator import BlockEvaluator, EvaluatedGraph, SplitScores, required_rows
from mggcn.train.engine import Stop
from mggcn.train.epoch import LoadBatch
from mggcn.train.hosted import PinnedRows
from mggcn.train.inputs import load_inputs
from mggcn.train.learned import LearnedRows
from mggcn.train.link_scores import LinkScores
from mggcn.train.padded import PaddedLoader
from mggcn.train.pages import PageFile, mapped_arrays
from mggcn.train.partial import Partial
from mggcn.train.ranking import RankingScores
from mggcn.train.runtime import DTYPES, BoundProgram, RankRuntime, Staged, Weights, bind, state_views
from mggcn.train.staged import page_file, stage_programs, watched, write_features
from mggcn.train.targets import StepTargets, make_target, unweighted
from mggcn.train.threads import Cores, ThreadChoice
from mggcn.train.timeline import Timeline, Unwatched, Watch
from mggcn.train.trainer import RankTrainer


@dataclass(slots=True)
class Rank:
    """A rank that is ready to train: its trainer, the counted transport, and how long set-up took."""

    trainer: RankTrainer
    comm: CountingCommunicator
    plan: RankPlan
    watch: Watch
    feed: Feed


def gpu_of_rank(config: Config, comm: Communicator) -> Device:
    """Return the GPU of this rank: that of its number on the machine, the first for ranks that are threads.

    Collective for ranks that are processes. Raises: BackendError, also if two of them have one GPU.
    """
    from mggcn.backend.cuda.device import CudaDevice

    run, index = config.run, 0
    if run.transport == "nccl":
        gpus = visible_gpus()
        index = gpu_index(comm.rank, len(gpus))
        refuse_shared(comm, gpus[index].uuid)
    return CudaDevice(index, capture=not not_captured(config))


def make_backend(
    config: Config,
    plan: RankPlan,
    device: Callable[[], Device],
    choices: Choices = NO_CHOICES,
    wrap_spmm: WrapSpmm | None = None,
    threads: int = 0,
    figures: Figures = ASSUMED,
) -> KernelBackend:
    """Return the kernels of one rank. Raises: BackendError.

    threads: of a CPU; 0: those of the configuration. choices: measured variants of sparse products. wrap_spmm:
    wraps sparse products. figures: of the CPU, by which its kernels are chosen.
    """
    storage = DTYPES[plan.sizes.dtype]
    if config.run.device == "cpu":
        threads = threads or threads_per_rank(config)
        return CpuBackend(storage, threads, choices=choices, wrap_spmm=wrap_spmm, figures=figures)
    from mggcn.backend.cuda.backend import CudaBackend

    workspace_bytes = plan.regions["kernel work space"]
    parts = TF32_PARTS.get(config.run.precision, 0)
    return CudaBackend(storage, device(), workspace_bytes, config.run.spmm, choices, wrap_spmm, parts)


def make_rank(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    partition: Partition,
    comm: Communicator,
    stop: Stop | None = None,
    device_of: Callable[[Config, Communicator], Device] = gpu_of_rank,
    folder: Path | None = None,
    choices: Choices = NO_CHOICES,
    wrap_spmm: WrapSpmm | None = None,
    feed: Feed | None = None,
    partial: Partial | None = None,
) -> Rank:
    """Build one rank: its shard, its device memory as planned, its inputs. Collective.

    device_of: which device serves a rank under run.device cuda. folder: the run's, into which run.timeline writes.
    choices: measured variants of sparse products; on a CPU none changes a result, on a GPU slices add long rows in another
    order. wrap_spmm: wraps sparse products, such as to note them.
    feed: makes the steps of an epoch over the blocks for which the plan was made; by default one, over the whole graph.
    partial: of a rank that evaluates from disk, once: where that goes on. Raises: GraphError, BackendError, PlanError.
    """
    if config.run.ranks != comm.size:
        raise ConfigError(f"run.ranks is {config.run.ranks}, but {comm.size} ranks are connected")
    threads = epoch_threads(plan, threads_per_rank(config))
    # Kernels plan work space and blocks for `threads`. Epochs begin with `first`: short ones wait for a second thread
    # longer than it helps (docs/notes/0022-small-graphs.md).
    first = first_threads(plan, threads) if config.run.threads == 0 else threads
    # torch's products may differ in the last bits between numbers of threads: theirs depends on the plan alone.
    torch.set_num_threads(first)
    rank_plan = plan.ranks[comm.rank]
    backend = make_backend(
        config, rank_plan, lambda: device_of(config, comm), choices, wrap_spmm, threads, plan.figures
    )
    context = _make_context(config, graph, plan, partition, backend, comm, folder)
    counted, inputs = context.comm, _read_inputs(context)
    inputs, learned = _learned_rows(context, inputs)
    # The arena comes last: a plan counts the larger of set-up and epochs, not both (RankPlan.total_bytes).
    with nullcontext() if rank_plan.disk is None else watched(backend):
        aggregations = _build_aggregations(context)
        release_freed()
        runtime = _allocate_runtime(context, inputs, aggregations, learned, partial)
    # A X, once, where X was.
    if rank_plan.setup and not (partial is not None and partial.has_inputs):
        runtime.run(runtime.programs["setup"])
    if partial is not None and not partial.has_inputs:
        partial.finished(0)
    load: LoadBatch = _unchanged
    by_blocks: SplitScores | None = None
    if plan.stack is not None:
        graph, feed, load, by_blocks = _on_batches(context, runtime, plan.stack, feed)
    feed = feed or link_feed(config, graph, context.local_index, comm.rank) or WholeGraph()
    watch: Watch = Unwatched()
    if config.run.timeline and folder is not None:
        watch = Timeline(plan, comm, folder, feed.num_steps)
        runtime.annotate = counted.annotate = record_function
    choice = _thread_choice(config, backend, first)
    room = pair_room(config, plan.shape, rank_plan.sizes.owned, None) if keeps_pairs(config) else None
    # Where they are not kept in one place, pairs of vertices are others in every step.
    alike = pads_batches(config) if feed.stack is not None else not graph.links or room is not None
    ranking: RankingScores | LinkScores | None = _ranking_scores(context, runtime.inputs)
    if graph.links:
        if not pads_batches(config):
            load = pair_loader(config, graph, runtime, load, room).load
        ranking = link_scores(config, graph, rank_plan, runtime, context.local_index, counted)
    release_freed()
    trainer = RankTrainer(
        config,
        rank_plan,
        runtime,
        counted,
        config.train.metric,
        ranking,
        stop or Stop(),
        watch,
        choice,
        feed,
        load,
        alike,
        by_blocks,
    )
    return Rank(trainer, counted, rank_plan, watch, feed)


def _on_batches(
    context: _RankContext, runtime: RankRuntime, stack: Stack, feed: Feed | None
) -> tuple[Graph, Feed, LoadBatch, SplitScores | None]:
    """Return what steps on batches need: the graph as they read it, their feed, by default one that draws, what loads its
    batches, and what evaluates by blocks, if the plan does. stack: the plan's. Collective.
    """
    config, plan, counted = context.config, context.plan, context.comm
    values, owners = context.rank_plan.values, row_owners(context.partition)
    graph = mapped_once(context.graph if values.typed else context.graph.untyped())
    rows, of = VertexFeatures(graph, config.data.row_normalize), values.first
    norm = scales_of_all(config, graph, owners, counted) if config.draws_at_owners else norm_of(config, graph)
    sums = None if of is None else compute_first_sums(config, rows, norm, of, runtime)
    targets = _step_targets(context, runtime, graph)
    labels = None if targets is None else targets.read
    if feed is None:
        owner = owners.owner_of(slice(None))  # once, because ranges make it
        of_owners = waves_of if config.draws_at_owners else relays_of
        relays = of_owners(config, graph, plan, owner, rows, counted) if config.fetches_rows else None
        feed = sampled_feed(
            config, graph, plan, owners, owner, counted.rank, rows, norm, context.backend, sums, labels, relays
        )
    load = _loader(context, runtime, feed.stack or stack, rows, norm, targets)
    return graph, feed, load, _split_scores(context, runtime, rows, norm)


def _split_scores(
    context: _RankContext, runtime: RankRuntime, rows: VertexFeatures, norm: NormScales | None
) -> SplitScores | None:
    """Return what evaluates by blocks, if the plan does, and leave the rank with inputs of vertices in splits alone.

    rows: features, of the graph that batches read. Collective.
    """
    plan, config, graph = context.rank_plan.by_blocks, context.config, rows.graph
    if plan is None:
        return None
    options, evaluated = shard_options(config), evaluated_rows(graph, config.data.splits, config.data.split)
    if graph.links:
        evaluated[:] = True  # any vertex may be the end of a link
    owned = runtime.inputs.owned
    mine = np.flatnonzero(evaluated[owned.ids.numpy()])
    index, target = torch.from_numpy(mine), owned.target
    some = Rows(ids=owned.ids[index], target=None if target is None else target.rows(index))
    runtime.inputs = dataclasses.replace(runtime.inputs, rows={**runtime.inputs.rows, OWNED: some})
    read = EvaluatedGraph(
        adj_t=graph.adj_t,
        features=rows,
        norm=norm,
        options=options,
        everyone=whole_graph(graph.num_vertices),
        required=required_rows(graph, evaluated, len(plan.blocks), options.threads),
        drawn=drawn_tiles(config, graph, context.plan, context.comm.rank),
    )
    evaluator = BlockEvaluator(plan, read, runtime, runtime.programs["train"].arena)
    return SplitScores(evaluator, plan, read.required[-1], some.ids.numpy(), context.backend)


def _unchanged(batch: Batch) -> None:
    """Leave the whole graph as it is."""


def _reader(context: _RankContext) -> FeatureReader:
    """Return what reads features, of this rank or of any vertex."""
    return FeatureReader(context.graph, context.local_index, context.comm.rank, context.config.data.row_normalize)


def _step_targets(context: _RankContext, runtime: RankRuntime, graph: Graph) -> StepTargets | None:
    """Return what makes the targets of steps on batches; None where links are predicted."""
    if graph.links:
        return None
    config, whole = context.config, runtime.inputs.target
    whole = unweighted(whole) if config.sample.deal == "by-class" else whole
    return StepTargets(graph, whole, config.train, context.shard_options.dtype)


def _loader(
    context: _RankContext,
    runtime: RankRuntime,
    stack: Stack,
    rows: VertexFeatures,
    norm: NormScales | None,
    targets: StepTargets | None,
) -> LoadBatch:
    """Return what brings a feed's batches to the device. norm: the scales of batches that have none."""
    config, plan, dtype = context.config, context.rank_plan, context.rank_plan.sizes.dtype
    if pads_batches(config):
        layout = padded_layout(config, context.plan.shape, stack, plan.values)
        return PaddedLoader(runtime, layout, rows, norm, targets, dtype, config.sample.ahead).load
    sparse = sparse_rows(config, context.plan.shape, stack, plan.values)
    dropped = None
    if sparse is not None and sparse.dropped:
        dropped = context.backend.allocate(sparse.dropped_bytes).view(DTYPES[REAL[config.run.precision]])
    loader = BatchLoader(
        runtime=runtime,
        stack=stack,
        features=rows,
        norm=norm,
        sparse=sparse,
        dropped=dropped,
        first=plan.values.first,
        stored=stored_features(plan.values, rows, DTYPES[dtype]),
        targets=targets,
        dtype=dtype,
        typed=plan.values.typed,
    )
    return loader.load


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankContext:
    """The arguments and objects that the steps of `make_rank` share."""

    config: Config
    graph: Graph
    plan: RunPlan
    partition: Partition
    local_index: Owners
    backend: KernelBackend
    comm: CountingCommunicator
    folder: Path | None
    """The run's."""

    @property
    def rank_plan(self) -> RankPlan:
        return self.plan.ranks[self.comm.rank]

    @property
    def shard_options(self) -> ShardOptions:
        return shard_options(self.config)

    @property
    def scratch(self) -> Path:
        """The folder of what lies on disk."""
        return Path(self.config.run.scratch or self.folder or tempfile.gettempdir())

    @property
    def edge_options(self) -> ShardOptions:
        """As `shard_options`, with the edges in mapped files if rows lie on disk; those of relations are put in order."""
        disk, options = self.rank_plan.disk, self.shard_options
        mapped = disk is not None and disk.edge_bytes > 0
        return dataclasses.replace(options, array=mapped_arrays(self.scratch)) if mapped else options


def _thread_choice(config: Config, backend: KernelBackend, first: int) -> ThreadChoice | None:
    """Return what chooses the threads of epochs; None where the user has set them, or a timeline is to show them."""
    if config.run.threads or config.run.timeline:
        return None
    return ThreadChoice(backend.team, first, config.run.ranks, Cores())


def _make_context(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    partition: Partition,
    backend: KernelBackend,
    comm: Communicator,
    folder: Path | None,
) -> _RankContext:
    counted = CountingCommunicator(comm)
    counted.use_stream(backend.comm_stream)
    return _RankContext(
        config=config,
        graph=graph,
        plan=plan,
        partition=partition,
        local_index=partition.local_index(comm.rank),
        backend=backend,
        comm=counted,
        folder=folder,
    )


def _read_inputs(context: _RankContext) -> Inputs:
    """Read the rank's shard and features, and write them to the device. Collective. Raises: ConfigError, GraphError."""
    config, graph, backend, options = context.config, context.graph, context.backend, context.shard_options
    owners, rank, partition = context.local_index, context.comm.rank, context.partition
    target: Target | None = None
    if graph.links:
        sizes = tuple(graph.links[name].shape[0] if name in graph.links else 0 for name in SPLITS)
    else:
        labels = read_labels(graph, owners, rank, partition.owned(rank), config.data, options.dtype)
        target, sizes = make_target(backend, graph, labels, config, options.dtype)
    _check_splits(config.train, sizes)
    shard = build_shard(graph, partition, rank, options, owners)
    return load_inputs(backend, shard, _reader(context), context.rank_plan, threads_per_rank(config), target)


def _check_splits(train: TrainConfig, sizes: Sequence[int]) -> None:
    """Raise ConfigError if a setting needs validation vertices, or links, and there are none."""
    if sizes[1]:
        return
    if train.patience:
        raise ConfigError("train.patience needs validation vertices, and this split has none; set train.patience = 0")
    if train.schedule == "plateau":
        raise ConfigError(
            "train.schedule plateau needs validation vertices, and this split has none; choose constant, cosine or step"
        )


def _build_aggregations(context: _RankContext) -> BlockAggregations:
    """Build the rank's aggregations of training and evaluation: tiles and messages of the run's strategy. Collective."""
    plan, backend = context.rank_plan, context.backend
    states = state_views(backend, plan.states)
    if not context.config.model.aggregates:
        return BlockAggregations()
    built_from = BuildContext(
        graph=context.graph if plan.values.typed else context.graph.untyped(),
        partition=context.partition,
        rank=context.comm.rank,
        options=context.edge_options,
        backend=backend,
        comm=context.comm,
        states=states,
        local_index=context.local_index,
    )
    return build_blocks(plan.training, plan.evaluation.get(WHOLE), built_from, context.config.data)


def _learned_rows(context: _RankContext, inputs: Inputs) -> tuple[Inputs, LearnedRows | None]:
    """Return the inputs with this rank's learned rows as X, and the rows; None where features are read."""
    if context.rank_plan.learned is None:
        return inputs, None
    plan, stack, sizes = context.plan, context.plan.stack, context.rank_plan.sizes
    learned = LearnedRows(
        context.backend,
        context.comm,
        context.local_index,
        BufferSpec("learned rows", sizes.owned, plan.shape.num_features, sizes.dtype),
        row_moments(context.config.train, batches=stack is not None),
        None if stack is None else stack.capacities[0].sources,
    )
    gradient = None if learned.in_batches else learned.gradient
    owned = dataclasses.replace(inputs.owned, dense=learned.values, gradient=gradient)
    return dataclasses.replace(inputs, rows={**inputs.rows, OWNED: owned}), learned


def _allocate_runtime(
    context: _RankContext,
    inputs: Inputs,
    aggregations: BlockAggregations,
    learned: LearnedRows | None,
    partial: Partial | None,
) -> RankRuntime:
    """Allocate the memory of epochs, as planned: arena, weights, counts, signals and clock; and a page file."""
    plan, backend, config = context.rank_plan, context.backend, context.config
    arena = backend.allocate(plan.arena_bytes)
    weights = Weights(plan.values.parameters, DTYPES[REAL[config.run.precision]], backend)
    classes = context.plan.shape.num_classes
    stages: Mapping[str, Staged] = {}
    pages: PageFile | None = None
    if plan.disk is None:
        over_whole = {program.name: bind(program, arena, aggregations.exact) for program in plan.programs.over_whole}
        programs = {"train": bind(plan.train, arena, aggregations.training), **over_whole}
    else:
        if partial is None:
            pages = page_file(plan.disk, context.scratch, backend)
        else:
            pages = page_file(plan.disk, partial.folder, backend, partial.pages_name)
        staged, kept = stage_programs(plan.disk, arena, pages)
        stages = staged
        if partial is not None:
            partial.begin(pages, staged["evaluate"], plan.disk.resident["evaluate"])
        if partial is None or not partial.has_inputs:
            write_features(pages, plan.disk, _reader(context), inputs.owned.ids, backend)
        programs = {
            program.name: BoundProgram(
                program,
                arena,
                aggregations.training if program is plan.train else aggregations.exact,
                dict.fromkeys([program.result], kept) if program is plan.evaluate and kept is not None else {},
            )
            for program in plan.programs.all
        }
    return RankRuntime(
        backend=backend,
        programs=programs,
        stages=stages,
        pages=pages,
        inputs=inputs,
        weights=weights,
        signals=backend.allocate(8 * SIGNALS).view(torch.float64),
        counts=backend.allocate(8 * 9 * classes).view(torch.int64).view(3, 3, classes),
        clock=backend.allocate(16).view(torch.int64),
        comm=context.comm,
        learned=learned,
        host=PinnedRows(plan.hosted, backend) if plan.hosted else None,
    )


def _ranking_scores(context: _RankContext, inputs: Inputs) -> RankingScores | None:
    """Return the gathered scores of metrics that need them in one place, None for others."""
    metric = context.config.train.metric
    if metric in ("auto", *COUNTED) or context.graph.links:
        return None
    graph, classes = context.graph, context.plan.shape.num_classes
    return RankingScores(metric, inputs, graph.num_vertices, classes, context.comm, context.backend)
