"""The only module that names concrete classes: from a graph and a configuration to a plan, and to a rank that trains."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mggcn import native
from mggcn.aggregate.base import Strategy
from mggcn.aggregate.broadcast import BroadcastStrategy
from mggcn.aggregate.delayed import DelayedStrategy
from mggcn.aggregate.halo import HaloStrategy
from mggcn.aggregate.slice import SliceStrategy
from mggcn.backend.cpu.cores import bind_beside_gpu, bind_rank
from mggcn.backend.cpu.machine import Host, caches_of, processor_name
from mggcn.backend.cpu.variants import NO_CHOICES, Choices
from mggcn.backend.cuda.driver import visible_gpus
from mggcn.backend.cuda.memory import gpu_free_bytes
from mggcn.comm.nccl_memory import NcclMemory
from mggcn.comm.nccl_settings import UNMEASURED, sizes_of, user_settings
from mggcn.comm.rank import gpu_index, num_gpus_used
from mggcn.config import Config
from mggcn.cost.machine import Machine, default_machine, tuned_path
from mggcn.errors import BackendError, ConfigError, PlanError
from mggcn.graph.csr import CSR, Graph
from mggcn.memory.device import REAL, not_captured, runs_nccl, threads_of
from mggcn.memory.units import free_bytes, human
from mggcn.partition.cut_rows import CutStats
from mggcn.partition.libra import libra_nbytes
from mggcn.partition.make import is_cached, make_partition, stats_of
from mggcn.partition.parts import Partition, PartitionStats, RowStats
from mggcn.partition.required_rows import expected_shares
from mggcn.partition.splits import training_rows
from mggcn.planning.pruning import build_pruned
from mggcn.planning.record import plan_from_dict
from mggcn.planning.run import SIGNALS, RankPlan, RunPlan, plan_run
from mggcn.planning.shape import GraphShape, graph_shape

if TYPE_CHECKING:
    from mggcn.backend.base import KernelBackend
    from mggcn.backend.cpu.explore import Exploration
    from mggcn.backend.device import Device
    from mggcn.comm.base import Communicator
    from mggcn.comm.counting import CountingCommunicator
    from mggcn.trace.timeline import Watch
    from mggcn.train.trainer import RankTrainer, Stop
    from mggcn.train.tuning import Tuning

STRATEGIES: dict[str, Strategy] = {
    "broadcast": BroadcastStrategy(),
    "halo": HaloStrategy(),
    "slice": SliceStrategy(),
    "delayed": DelayedStrategy(),
}
_METRICS = {"accuracy": "accuracy", "roc_auc": "roc_auc", "roc auc": "roc_auc", "macro_f1": "macro_f1"}


def resolve(config: Config, graph: Graph) -> Config:
    """Return the configuration with what `auto` stands for on this graph and machine filled in."""
    train, run = config.train, config.run
    if train.metric == "auto":
        train = dataclasses.replace(train, metric=_METRICS.get(str(graph.meta.get("metric", "")).lower(), "accuracy"))  # type: ignore[arg-type]
    if run.transport == "auto":
        several: Literal["gloo", "nccl"] = "gloo" if run.device == "cpu" else "nccl"
        run = dataclasses.replace(run, transport="single" if run.ranks == 1 else several)
    if run.ranks == 1 and STRATEGIES[run.strategy].kind == "cut":
        # One rank has nothing to cut and nothing to delay.
        run = dataclasses.replace(run, strategy="broadcast")
    return dataclasses.replace(config, train=train, run=run)


def threads_per_rank(config: Config) -> int:
    """Return the threads of one rank: as set, or an equal share of the cores that this process may use."""
    return threads_of(config.run)


def host_of(config: Config) -> Host:
    """Return this machine, or its first GPU, as measured ways of a run's sparse products belong to it."""
    if config.run.device == "cuda":
        from mggcn.backend.cuda.presence import gpu_host

        return gpu_host()
    threads = threads_per_rank(config)
    return Host(processor_name(), native.isa(), threads, caches_of(threads))


def memory_limit(config: Config) -> int:
    """Return the bytes that one rank may use: as set, or an equal share of what is free, on a GPU what it has free."""
    if config.run.memory_limit:
        return config.run.memory_limit
    if config.run.device == "cuda":
        run = config.run
        sharing = run.ranks if run.transport == "threads" else 1
        return gpu_free_bytes(num_gpus_used(run.ranks, run.transport)) // sharing
    return free_bytes() // config.run.ranks


def partition_graph(config: Config, graph: Graph) -> Partition:
    """Return who holds which rows of a run. Cost: O(N), or a vertex cut, which is kept beside the store."""
    run = config.run
    bins = max(run.delay_epochs or 0, 1)
    kind = STRATEGIES[run.strategy].kind
    if kind == "cut":
        need = sum(libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, run.ranks).values())
        if need > (free := free_bytes()) and not is_cached(graph, ranks=run.ranks, seed=config.train.seed):
            raise PlanError(
                f"Libra needs {human(need)} to cut the graph, {human(free)} are free; cut it on a larger machine with "
                f"mggcn partition --parts {run.ranks} --seed {config.train.seed}, or choose another strategy"
            )
    return make_partition(kind, graph, ranks=run.ranks, order=run.order, seed=config.train.seed, bins=bins)


def nccl_memory(config: Config, machine: Machine | None = None) -> NcclMemory:
    """Return what is known of NCCL's memory: by its settings, and as measured on a machine, by default this one.

    Raises: ConfigError if this machine's file cannot be read.
    """
    if not runs_nccl(config.run):
        return UNMEASURED
    machine = machine or default_machine(config.run.device, tuned_path())
    return NcclMemory(sizes_of(user_settings(os.environ)), machine.nccl)


def plan_graph(config: Config, graph: Graph, machine: Machine | None = None) -> tuple[RunPlan, Partition]:
    """Share out the vertices and plan every rank of a run on `graph`.

    machine: on which NCCL's memory may have been measured, by default this one.
    Cost: a few sweeps over the edges. Raises: ConfigError, GraphError, StoreError, PlanError.
    """
    shape, strategy = graph_shape(graph, config.model), STRATEGIES[config.run.strategy]
    partition = partition_graph(config, graph)
    stats = partition_stats(config, graph, partition)
    return plan_run(config, shape, stats, strategy, nccl_memory(config, machine)), partition


def partition_stats(config: Config, graph: Graph, partition: Partition) -> PartitionStats:
    """Return the sizes of a partition, and what training epochs need of it if they may leave rows out.

    Cost: a few sweeps over the edges.
    """
    model, data = config.model, config.data
    depth = len(model.hidden) + 1
    if not isinstance(graph.features, CSR) and not model.input_dropout:
        depth -= 1  # layer 1 aggregates no more once its input is A X
    pruning = config.run.prune == "auto" and model.aggregates and depth
    training = training_rows(graph, data.splits, data.split) if pruning else None
    return stats_of(graph, partition, self_loops=model.self_loops, training=training, depth=depth)


def plan_shape(config: Config, shape: GraphShape, replication: float = 0.0, machine: Machine | None = None) -> RunPlan:
    """Plan a run on a graph of which only the shape is known: in the expectation over random assignments.

    replication: copies of a vertex on average, which a strategy that cuts vertices asks for. machine: as for plan_graph.
    Raises: ConfigError.
    """
    strategy, run, loops = STRATEGIES[config.run.strategy], config.run, config.model.self_loops
    nccl = nccl_memory(config, machine)
    if run.ranks == 1 and strategy.kind == "cut":
        replication = 1.0
    if run.order in ("metis", "locality") and strategy.kind == "rows":
        raise ConfigError(f"the order {run.order} follows the edges, which a shape does not say; plan it on a store")
    sizes = (shape.num_vertices, shape.num_edges, run.ranks)
    if strategy.kind == "rows":
        depth = len(config.model.hidden) + 1
        share = (shape.num_training or 0) / max(shape.num_vertices, 1)
        shares = expected_shares(share, shape.num_edges / max(shape.num_vertices, 1), depth) if share else []
        return plan_run(config, shape, RowStats.expected(*sizes, self_loops=loops, shares=shares), strategy, nccl)
    if not replication:
        raise ConfigError(
            f"the replication of a vertex cut is not known from a shape; give it (--replication), for example "
            f"{run.ranks**0.5:.2f} for {run.ranks} ranks, or plan the strategy {strategy.name} on a store"
        )
    bins = max(run.delay_epochs or 0, 1)
    cut = CutStats.expected(*sizes, replication, bins=bins, self_loops=loops)
    return plan_run(config, shape, cut, strategy, nccl)


def plan_recorded(config: Config, content: Mapping[str, Any]) -> RunPlan:
    """Return the plan that a run folder's plan.json records, planned again from its figures."""
    return plan_from_dict(config, content, STRATEGIES[config.run.strategy])


@dataclass(slots=True)
class Rank:
    """A rank that is ready to train: its trainer, the counted transport, and how long set-up took."""

    trainer: RankTrainer
    comm: CountingCommunicator
    plan: RankPlan
    watch: Watch


def bind_process(config: Config, rank: int) -> None:
    """Bind this process, which is one rank, to cores of one memory node, with a GPU to those beside it (run.bind = auto).

    To be called before threads are started. What is wrong with the GPU is told later, by `gpu_of_rank`.
    """
    run = config.run
    if run.bind == "off":
        return
    if run.device == "cpu":
        bind_rank(rank, run.ranks, threads_of(run))
        return
    with suppress(BackendError):
        gpus = visible_gpus()
        bind_beside_gpu(gpus[gpu_index(rank, len(gpus))].pci, threads_of(run))


def gpu_of_rank(config: Config, comm: Communicator) -> Device:
    """Return the GPU of this rank: that of its number on the machine, the first for ranks that are threads.

    Collective for ranks that are processes. Raises: BackendError, also if two of them have one GPU.
    """
    from mggcn.backend.cuda.device import CudaDevice
    from mggcn.comm.gpus import refuse_shared

    run, index = config.run, 0
    if run.transport == "nccl":
        gpus = visible_gpus()
        index = gpu_index(comm.rank, len(gpus))
        refuse_shared(comm, gpus[index].uuid)
    return CudaDevice(index, capture=not not_captured(run))


def dense_products(config: Config) -> AbstractContextManager[None]:
    """Return what a process trains in: torch multiplies on GPUs as run.precision says, and as before once it is left."""
    if config.run.device == "cpu":
        return nullcontext()
    from mggcn.backend.cuda.products import float32_products

    return float32_products(tf32=config.run.precision == "tf32")


def make_backend(
    config: Config,
    plan: RankPlan,
    device: Callable[[], Device],
    choices: Choices = NO_CHOICES,
    exploration: Exploration | None = None,
) -> KernelBackend:
    """Return the kernels of one rank. Raises: BackendError.

    choices: measured ways of sparse products. exploration: tries the ways of the others.
    """
    from mggcn.train.runtime import DTYPES

    storage = DTYPES[plan.model.dtype]
    if config.run.device == "cpu":
        from mggcn.backend.cpu.backend import CpuBackend

        return CpuBackend(storage, threads_per_rank(config), choices=choices, exploration=exploration)
    from mggcn.backend.cuda.backend import CudaBackend

    workspace_bytes = plan.regions["kernel work space"]
    return CudaBackend(storage, device(), workspace_bytes, config.run.spmm, choices, exploration)


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
    tuning: Tuning | None = None,
) -> Rank:
    """Build one rank: its shard, its device memory as planned, its inputs. Collective.

    device_of: which device serves a rank under run.device cuda. folder: the run's, into which run.timeline writes.
    choices: measured ways of sparse products. tuning: finds out those of the others in the epochs to come; it has the same
    transport. On a CPU neither changes a result, on a GPU slices add long rows in another order.
    Raises: GraphError, BackendError.
    """
    import torch

    from mggcn.aggregate.base import BuildContext, RankAggregations
    from mggcn.aggregate.no_aggregation import NoAggregation
    from mggcn.comm.counting import CountingCommunicator
    from mggcn.partition.features import FeatureReader
    from mggcn.partition.shard import ShardOptions, build_shard
    from mggcn.trace.timeline import Timeline, Unwatched
    from mggcn.train.inputs import load_inputs
    from mggcn.train.ranking import RankingScores
    from mggcn.train.runtime import DTYPES, RankRuntime, Weights, arena_views, state_views
    from mggcn.train.trainer import RankTrainer, Stop
    from mggcn.train.tuning import TunedEpochs

    if config.run.ranks != comm.size:
        raise ConfigError(f"run.ranks is {config.run.ranks}, but {comm.size} ranks are connected")
    threads = threads_per_rank(config)
    torch.set_num_threads(threads)
    rank_plan = plan.ranks[comm.rank]
    exploration = None if tuning is None else tuning.exploration
    backend = make_backend(config, rank_plan, lambda: device_of(config, comm), choices, exploration)
    timeline = None
    if config.run.timeline and folder is not None:
        ranges = torch.cuda.nvtx.range if torch.cuda.is_available() else None
        in_flight = config.run.transport == "gloo"
        timeline = Timeline(backend, comm, folder, config.train.epochs, in_flight=in_flight, ranges=ranges)
        backend, comm = timeline.backend, timeline.comm
    counted = CountingCommunicator(comm)
    counted.use_stream(backend.comm_stream)
    options = ShardOptions(
        config.model.aggregates,
        config.model.norm,
        config.model.self_loops,
        config.data.splits,
        config.data.split,
        {"fp32": "float32", "fp64": "float64"}[REAL[config.run.precision]],
        threads,
    )
    held = partition.held(comm.rank)
    shard = build_shard(graph, partition, comm.rank, options, held)
    if config.train.patience and not shard.split_sizes[1]:
        raise ConfigError("train.patience needs validation vertices, and this split has none; set train.patience = 0")
    reader = FeatureReader(graph, held, comm.rank, config.data.row_normalize)
    inputs = load_inputs(backend, shard, reader, rank_plan.model, threads)
    states = state_views(backend, rank_plan.states)
    aggregates = RankAggregations(NoAggregation(), NoAggregation())
    if options.aggregates:
        context = BuildContext(
            graph=graph,
            partition=partition,
            rank=comm.rank,
            options=options,
            backend=backend,
            comm=counted,
            states=states,
            local_index=held,
        )
        every = rank_plan.aggregation.build(context)
        aggregates = build_pruned(every, rank_plan.rows, rank_plan.pruned, context)
    programs = [rank_plan.train, rank_plan.evaluate, *([rank_plan.setup] if rank_plan.setup else [])]
    arena = backend.allocate(rank_plan.arena_bytes)
    weights = Weights(rank_plan.model.layers, config.model.bias, DTYPES[REAL[config.run.precision]], backend)
    classes = plan.shape.num_classes
    counts = backend.allocate(8 * 9 * classes).view(torch.int64).view(3, 3, classes)
    signals = backend.allocate(8 * SIGNALS).view(torch.float64)
    clock = backend.allocate(16).view(torch.int64)
    views = arena_views(arena, programs)
    runtime = RankRuntime(
        backend, aggregates.training, aggregates.exact, inputs, weights, views, signals, counts, clock
    )
    if rank_plan.setup:
        runtime.run(rank_plan.setup)
    ranking = None
    if config.train.metric == "roc_auc":
        ranking = RankingScores(inputs, graph.num_vertices, classes, counted, backend)
    watched = rank_plan
    if timeline is not None:
        timeline.number_tiles(*aggregates.tiles)
        watched = dataclasses.replace(rank_plan, train=timeline.program(rank_plan.train))
    watch: Watch = timeline or Unwatched()
    if tuning is not None:
        watch = TunedEpochs(watch, tuning, backend.synchronize)
    trainer = RankTrainer(config, watched, runtime, counted, config.train.metric, ranking, stop or Stop(), watch)
    return Rank(trainer, counted, rank_plan, watch)
