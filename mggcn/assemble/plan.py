"""Plans a run on this machine from a graph and a configuration. Needs no torch.

Only this module and rank.py name concrete classes and ask which device a run has.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal

from mggcn.aggregate.base import Strategy
from mggcn.aggregate.broadcast import BroadcastStrategy
from mggcn.aggregate.delayed import DelayedStrategy
from mggcn.aggregate.halo import HaloStrategy
from mggcn.aggregate.slice import SliceStrategy
from mggcn.assemble.ladder import climb, space_of
from mggcn.assemble.stack import stack_for
from mggcn.backend.cpu.cores import bind_beside_gpu, bind_rank, usable_cores
from mggcn.backend.cpu.figures import ASSUMED, Figures
from mggcn.backend.cpu.kept_figures import figures_of
from mggcn.backend.cpu.machine import Host, this_host
from mggcn.backend.cuda.driver import visible_gpus
from mggcn.backend.cuda.memory import gpu_free_bytes
from mggcn.blocks.block import Stack
from mggcn.comm.nccl_memory import NcclMemory
from mggcn.comm.nccl_settings import UNMEASURED, sizes_of, user_settings
from mggcn.comm.rank import gpu_index, num_gpus_used, ranks_here
from mggcn.config import Config
from mggcn.cost.machine import Machine, default_machine, tuned_path, with_figures
from mggcn.errors import BackendError, ConfigError, MggcnError, PlanError
from mggcn.graph.csr import Graph
from mggcn.memory.arena import ITEM_BYTES
from mggcn.memory.device import DEVICES, OPERAND, runs_nccl, threads_of
from mggcn.memory.units import free_bytes, human
from mggcn.model.builder import Network
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.cut.libra import libra_nbytes
from mggcn.partition.cut.partition import CutStats
from mggcn.partition.make import is_cached, make_partition
from mggcn.partition.rows.partition import RowStats, row_owners
from mggcn.partition.rows.required import expected_shares
from mggcn.planning.advice import Room
from mggcn.planning.batches import check_batches, pads_batches
from mggcn.planning.links import check_links
from mggcn.planning.record import plan_from_dict
from mggcn.planning.run import RunPlan, Space, plan_run
from mggcn.planning.shape import GraphShape, graph_shape, in_blocks, partition_stats
from mggcn.planning.shared import Shared, partition_key
from mggcn.planning.task import resolve_task
from mggcn.train.tensorboard import require_tensorboard

STRATEGIES: dict[str, Strategy] = {
    "broadcast": BroadcastStrategy(),
    "halo": HaloStrategy(),
    "slice": SliceStrategy(),
    "delayed": DelayedStrategy(),
}


def resolve(config: Config, graph: Graph) -> Config:
    """Return the configuration with every `auto` replaced by the choice for this graph and machine."""
    train, run = config.train, config.run
    train = resolve_task(train, graph)
    check_batches(config)
    check_links(config, graph)
    if run.transport == "auto":
        run = dataclasses.replace(run, transport="single" if run.ranks == 1 else run.process_transport)
    if run.ranks == 1 and STRATEGIES[run.strategy].kind == "cut":
        # One rank has nothing to cut and nothing to delay.
        run = dataclasses.replace(run, strategy="broadcast")
    if run.batches == "auto" and (run.ranks == 1 or not config.sample.batch):
        run = dataclasses.replace(run, batches="independent")  # there is nothing to share
    return with_ahead(dataclasses.replace(config, train=train, run=run))


def with_ahead(config: Config) -> Config:
    """Return the configuration with the batches that threads make beside the step, if it leaves their number open."""
    if config.sample.ahead >= 0 or not config.sample.batch:
        return config
    # Beside a GPU the host's cores have nothing else to do. 16 of them, an H200's, took 536 ms for an epoch with 8 threads
    # that draw and 8 that help to gather, and 546 with 12 alone when each batch still took a quarter longer.
    ahead = min(max(2, 3 * threads_of(config.run) // 4), 12) if pads_batches(config) else 2
    return dataclasses.replace(config, sample=dataclasses.replace(config.sample, ahead=ahead))


def threads_per_rank(config: Config) -> int:
    """Return the threads of one rank: as set, or an equal share of the cores that this process may use."""
    return threads_of(config.run)


def host_of(config: Config) -> Host:
    """Return this machine, or its first GPU, as the key under which variants of sparse products are recorded."""
    if config.run.device == "cuda":
        from mggcn.backend.cuda.presence import gpu_host

        return gpu_host()
    return this_host(threads_per_rank(config))


def figures_here(config: Config) -> Figures:
    """Return a rank's share of the figures of all threads of this machine; measure them if they are not cached.

    Cost: at most 0.3 s once, for each number of threads and set of cores. Without compiled kernels: assumed figures.
    """
    if config.run.device == "cuda":
        return ASSUMED
    try:
        # More threads than cores take turns: what they would measure is the scheduler.
        threads = min(threads_per_rank(config) * config.run.ranks, usable_cores())
        return figures_of(this_host(threads), free_bytes()).shared(config.run.ranks)
    except BackendError:
        return ASSUMED


def check_available(config: Config) -> None:
    """Refuse a run that can be planned but not run on this machine, before anything is written.

    Raises: BackendError, ConfigError.
    """
    if config.run.log == "tensorboard":
        require_tensorboard()
    if config.run.device == "cuda":
        from mggcn.backend.cuda.presence import check_cuda

        check_cuda(config.run.precision)


def this_machine(config: Config) -> Machine:
    """Return this machine, for which seconds are predicted by default: as tuned, shipped or assumed.

    Of a CPU that was not tuned the messages are assumed, the rest are the figures by which kernels are chosen. A tuned
    file has gathers of float32; those of bfloat16 are the figures', too.

    Raises: ConfigError if the tuned file cannot be read.
    """
    gpu = ""
    if config.run.device == "cuda":
        from mggcn.backend.cuda.presence import fuses_products, gpu_name

        gpu = gpu_name()
    machine = default_machine(config.run.device, tuned_path(), gpu)
    if config.run.device == "cuda" and gpu and not fuses_products():
        machine = dataclasses.replace(machine, device=machine.device.unfused)
    item = ITEM_BYTES[OPERAND[config.run.precision]]
    if config.run.device == "cuda" or machine.origin == "described" or (machine.origin == "measured" and item != 2):
        return machine
    # The device of a machine is all of its cores, which the ranks share.
    threads = threads_per_rank(config) * config.run.ranks
    run = dataclasses.replace(config.run, ranks=1, threads=threads, transport="auto")
    figures = figures_here(dataclasses.replace(config, run=run))
    found = with_figures(machine, figures, threads, config.run.ranks, item)
    if machine.origin == "assumed":
        return found
    device = dataclasses.replace(machine.device, gather=found.device.gather, row_s=found.device.row_s)
    return dataclasses.replace(machine, device=device)


def in_float32(config: Config) -> Config:
    """Return the configuration of the same run in float32."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision="fp32"))


def memory_limit(config: Config) -> int:
    """Return the bytes that one rank may use: as set, or an equal share of the free memory, or on a GPU its free
    memory.
    """
    if config.run.memory_limit:
        return config.run.memory_limit
    if config.run.device == "cuda":
        run = config.run
        sharing = run.ranks if run.transport == "threads" else 1
        return gpu_free_bytes(num_gpus_used(run.ranks, run.transport)) // sharing
    return free_bytes() // config.run.ranks


def room_of(config: Config, machine: Machine | None = None) -> Room:
    """Return the alternatives for a run on this machine, or on `machine`: other numbers of ranks and other strategies."""

    def per_rank(ranks: int) -> int:
        run = config.run
        cores = len(os.sched_getaffinity(0))
        try:
            if machine is not None:
                return run.memory_limit or machine.memory_per_rank(ranks)
            if run.device == "cpu" and not run.memory_limit and ranks > max(cores, run.ranks):
                return 0  # ranks that share a core gain no memory
            return memory_limit(
                dataclasses.replace(config, run=dataclasses.replace(run, ranks=ranks, transport="auto"))
            )
        except MggcnError:
            return 0

    return Room(per_rank, {name: one for name, one in STRATEGIES.items() if one.kind == "rows"})


def check_ranks(config: Config, num_vertices: int, name: str, room: Room) -> None:
    """Raise PlanError for numbers of ranks that cannot fit, before anything is planned."""
    ranks, device = config.run.ranks, config.run.device
    if ranks > num_vertices:
        raise PlanError(
            f"{ranks:,} ranks cannot share the {num_vertices:,} vertices of {name}: a rank without any has nothing to do; "
            f"use at most {num_vertices:,} ranks"
        )
    need, limit = DEVICES[device].process_bytes, room.per_rank(ranks)
    if ranks == 1 or config.run.memory_limit or not 0 < limit < need:
        return
    most = bisect.bisect_left(range(1, ranks), True, key=lambda p: room.per_rank(p) < need)
    raise PlanError(
        f"{ranks:,} ranks would have {human(limit)} each, and a process takes {human(need)} before it holds anything; "
        f"use at most {most:,} ranks on this machine, or name a larger one with mggcn plan --machine"
    )


def partition_graph(config: Config, graph: Graph) -> Partition:
    """Return the partition of a run. Cost: O(N), or a vertex cut, which is saved for a store's graph."""
    run = config.run
    kind = STRATEGIES[run.strategy].kind
    if kind == "cut":
        need = sum(libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, run.ranks).values())
        if need > (free := free_bytes()) and not is_cached(graph, ranks=run.ranks, seed=config.train.seed):
            raise PlanError(
                f"Libra needs {human(need)} to cut the graph, but {human(free)} are free; cut it on a larger machine with "
                f"mggcn partition --parts {run.ranks} --seed {config.train.seed}, or choose another strategy"
            )
    return make_partition(kind, graph, ranks=run.ranks, order=run.order, seed=config.train.seed, bins=run.cut_bins)


def nccl_memory(config: Config, machine: Machine | None = None) -> NcclMemory:
    """Return NCCL's memory: estimated from its settings, and as measured on a machine, by default this one.

    Raises: ConfigError if this machine's file cannot be read.
    """
    if not runs_nccl(config.run):
        return UNMEASURED
    machine = machine or default_machine(config.run.device, tuned_path())
    return NcclMemory(sizes_of(user_settings(os.environ)), machine.nccl)


def plan_graph(
    config: Config,
    graph: Graph,
    machine: Machine | None = None,
    network: Network | None = None,
    shared: Shared | None = None,
    stack: Stack | None = None,
    limit: int | None = None,
    space: Space | None = None,
) -> tuple[RunPlan, Partition]:
    """Divide the vertices among ranks and plan every rank of a run on `graph`.

    machine: the one on which NCCL's memory may have been measured, by default this one. network: the model, by default
    that of model.kind. shared: data that successive runs on this graph share. stack: the blocks of a step, by default the
    whole graph. limit, space: as of `fitted`.

    Cost: a few sweeps over the edges, unless shared. Raises: ConfigError, GraphError, StoreError, PlanError.
    """
    config = with_ahead(config)
    shape, strategy = graph_shape(graph, config), STRATEGIES[config.run.strategy]
    shared = shared or Shared()
    partition = shared.found("partition", partition_key(config), lambda: partition_graph(config, graph))
    stats = partition_stats(config, graph, shape, partition, network, shared)
    nccl, figures = nccl_memory(config, machine), figures_here(config)
    if stack is None and config.sample.batch:
        stack = stack_for(config, graph, shape, row_owners(partition).owner_of(slice(None)))

    def planned(of: Config, most: int = 0) -> RunPlan:
        sizes = in_blocks(shape, graph, of) if of.evaluates_by_blocks else shape
        return plan_run(of, sizes, stats, strategy, nccl, network, figures, stack, most)

    return fitted(config, planned, limit, space), partition


def fitted(config: Config, planned: Callable[..., RunPlan], limit: int | None, space: Space | None = None) -> RunPlan:
    """Return the plan with the rung of run.capacity that fits, and the evaluation that train.evaluate names.

    planned: plans a configuration, for so many bytes of a rank where rows are on disk or on the host. limit: bytes that a
    rank may use; None: memory_limit, but run.capacity auto then leaves everything in memory. space: for rows on disk, by
    default `space_of`. Raises: as `climb`, `with_evaluation`.
    """
    if config.run.capacity not in ("host", "disk") and (limit is None or not config.climbs):
        return with_evaluation(config, planned, limit)
    most = memory_limit(config) if limit is None else limit

    def evaluating(of: Config, nbytes: int) -> RunPlan:
        return with_evaluation(of, functools.partial(planned, most=nbytes), most)

    return climb(config, evaluating, most, space or space_of(config))


def with_evaluation(config: Config, planned: Callable[[Config], RunPlan], limit: int | None) -> RunPlan:
    """Return the plan with the evaluation that train.evaluate names; auto: over the whole graph, unless it does not fit.

    Its configuration is `config`: what auto chose is the plan's alone, so that it is decided anew for every graph.
    Raises: ConfigError for blocks in a run without batches, or whose ranks share no memory.
    """
    ranks, asked = config.run.ranks, config.sample.batch and config.train.evaluate != "whole"
    apart = bool(asked) and ranks > 1 and ranks_here(ranks) < ranks
    if config.evaluates_by_blocks and apart:
        raise ConfigError(
            f"train.evaluate {config.train.evaluate} keeps rows in memory that all ranks share, and these are on several "
            "machines; set train.evaluate=whole"
        )
    if config.evaluates_by_blocks and not config.sample.batch:
        raise ConfigError(
            f"train.evaluate {config.train.evaluate} is for steps on batches, and one over the whole graph has the memory "
            "of an exact evaluation already; set sample.batch, such as 1024, or leave train.evaluate out"
        )
    if config.train.evaluate != "auto" or not config.sample.batch:
        return planned(config)
    if config.data.learned:  # blocks read features from the store
        return dataclasses.replace(planned(config.evaluating("whole")), config=config)

    def by(how: Literal["whole", "blocks"]) -> RunPlan:
        return dataclasses.replace(planned(config.evaluating(how)), config=config)

    plan = by("whole")
    # Before the limit, which asks a GPU that another machine may have.
    fetches = config.sample.rows != "mapped"
    if config.run.device != "cpu" or config.sample.compare_gradient or fetches or apart:
        return plan
    if plan.largest.total_bytes <= (memory_limit(config) if limit is None else limit):
        return plan
    return min(plan, by("blocks"), key=lambda one: one.largest.total_bytes)


def plan_shape(
    config: Config,
    shape: GraphShape,
    replication: float = 0.0,
    machine: Machine | None = None,
    limit: int | None = None,
    space: Space | None = None,
) -> RunPlan:
    """Plan a run on a graph of which only the shape is known, from expectations over random assignments.

    replication: average copies of a vertex, which a strategy that cuts vertices needs. machine, limit, space: as for
    plan_graph.
    Raises: ConfigError.
    """
    check_batches(config)
    config = with_ahead(config)
    strategy, run, loops = STRATEGIES[config.run.strategy], config.run, config.model.self_loops
    nccl = nccl_memory(config, machine)
    if run.ranks == 1 and strategy.kind == "cut":
        replication = 1.0
    if run.order in ("ranges", "metis", "metis-balanced", "stream", "locality") and strategy.kind == "rows":
        raise ConfigError(
            f"the order {run.order} depends on the edges, which a shape does not have; plan it on a store"
        )
    sizes = (shape.num_vertices, shape.num_edges, run.ranks)
    stats: PartitionStats
    if strategy.kind == "rows":
        depth = len(config.model.hidden) + 1
        share = (shape.num_training or 0) / max(shape.num_vertices, 1)
        shares = expected_shares(share, shape.num_edges / max(shape.num_vertices, 1), depth) if share else []
        stats = RowStats.expected(*sizes, self_loops=loops, shares=shares)
    else:
        if not replication:
            raise ConfigError(
                f"the replication of a vertex cut is not known from a shape; give it (--replication), for example "
                f"{run.ranks**0.5:.2f} for {run.ranks} ranks, or plan the strategy {strategy.name} on a store"
            )
        stats = CutStats.expected(*sizes, replication, bins=run.cut_bins, self_loops=loops)
    figures = figures_here(config)

    def planned(of: Config, most: int = 0) -> RunPlan:
        return plan_run(of, shape, stats, strategy, nccl, figures=figures, limit=most)

    return fitted(config, planned, limit, space)


def plan_recorded(config: Config, content: Mapping[str, Any]) -> RunPlan:
    """Rebuild the plan of a run folder from the statistics that its plan.json records."""
    return plan_from_dict(config, content, STRATEGIES[config.run.strategy])


def plan_again(config: Config, content: Mapping[str, Any], limit: int, space: Space) -> RunPlan:
    """Plan the run of a run folder on the first rung of run.capacity that fits now, from the statistics and rates that its
    plan.json records: partition, kernels and bits stay. limit, space: as of `climb`. Raises: as `climb`.
    """
    strategy = STRATEGIES[config.run.strategy]
    # Neither its rung nor its panels, nor what was on the host.
    shared = {**content, "capacity": "memory", "per_rank": (), "hosted_steps": 0}

    def planned(of: Config, most: int) -> RunPlan:
        return plan_from_dict(of, {**shared, "limit": most}, strategy)

    return climb(config, planned, limit, space)


def bind_process(config: Config, rank: int) -> None:
    """Bind this process, which is one rank, to cores of one memory node, with a GPU to those beside it (debug.bind = auto).

    Call it before threads are started. If anything is wrong with the GPU, `gpu_of_rank` reports it later.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The resources of one trial of a sweep: cores, or GPUs as CUDA_VISIBLE_DEVICES names them; empty: all."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


def groups_of(config: Config, at_once: int = 0) -> tuple[list[Group], Config]:
    """Divide this machine among trials of a configuration; return the configuration with the threads that each trial
    gets.

    at_once: trials at the same time; 0: as many as there are cores, by run.threads (0: one) and ranks, or GPUs.
    Raises: ConfigError; BackendError if the machine lacks a GPU that the configuration needs.
    """
    run = config.run
    cores = sorted(os.sched_getaffinity(0))
    if run.device == "cuda":
        number, each = len(visible_gpus()), num_gpus_used(run.ranks, run.transport)
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = shown.split(",")[:number] if shown else [str(k) for k in range(number)]
        groups = [Group(gpus=tuple(names[first : first + each])) for first in range(0, number - each + 1, each)]
        count = at_once or len(groups)
        return [groups[k % len(groups)] for k in range(count)] if groups else [Group()], config
    count = at_once or max(1, len(cores) // (run.ranks * (run.threads or 1)))
    size = max(1, len(cores) // count)
    threads = run.threads or max(1, size // run.ranks)
    shared_out = dataclasses.replace(config, run=dataclasses.replace(run, threads=threads))
    if run.bind == "off" or count > len(cores):
        return [Group()] * count, shared_out
    if threads > 1:
        shared_out = config  # a trial sees its own cores alone, and may take fewer of them
    return [Group(cores=tuple(cores[k * size : (k + 1) * size])) for k in range(count)], shared_out


def dense_products(config: Config) -> AbstractContextManager[None]:
    """Return the context in which a process trains: inside it, torch multiplies on GPUs as run.precision says."""
    if config.run.device == "cpu":
        return nullcontext()
    from mggcn.backend.cuda.products import float32_products

    return float32_products(tf32=config.run.precision == "tf32")
