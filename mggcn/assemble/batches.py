"""Builds the feed of a rank that trains on batches, as planned. N vertices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.assemble.stack import cached_rows, draws_of_links, seeds_of
from mggcn.backend.base import KernelBackend
from mggcn.blocks.block import Stack
from mggcn.blocks.macrobatch import Macrobatches
from mggcn.blocks.padded import PaddedLayout
from mggcn.blocks.sampler import Sampler
from mggcn.comm.base import Communicator
from mggcn.config import Config, SampleConfig
from mggcn.errors import GraphError, PlanError
from mggcn.feed.drawn_tiles import DrawnTiles
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.features import VertexFeatures
from mggcn.feed.fetched import FetchedRows, OwnerRows
from mggcn.feed.gather import GatheredRows, GatheredSparse, StoredFeatures, stored_rows
from mggcn.feed.history import RemoteRows
from mggcn.feed.memory import BatchMemoryPlan, GatheredIn
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.packed import PackedBatch, ReadLabels
from mggcn.feed.relays import Relays
from mggcn.feed.sampled import SampledFeed
from mggcn.feed.seeds import RankSeeds
from mggcn.feed.waves import Waves
from mggcn.graph.csr import Graph, Rows
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import STORAGE, scale_dtype, threads_of
from mggcn.model.network import Values
from mggcn.partition.order import Owners
from mggcn.partition.rows.halo import halo_ids
from mggcn.partition.rows.shard import ShardOptions
from mggcn.planning.batch_rows import fetch_plan, relay_slots
from mggcn.planning.batches import (
    feed_slots,
    gather_threads,
    hops_back,
    is_corrected,
    padded_layout,
    pads_batches,
    reads_weights,
    share_plan,
)
from mggcn.planning.block_evaluation import evaluated_sample
from mggcn.planning.run import RunPlan
from mggcn.planning.sparse_rows import sparse_rows
from mggcn.train.runtime import DTYPES


def mapped_once(graph: Graph) -> Graph:
    """Return the graph as all that draws or scores batches reads it: files in place, by one map of each.

    Where features or labels are converted or joined, rows are as they are taken; matrices of joined graphs are read, as
    a plan counts them (`CSR.copied_bytes`).
    """
    adj_t, features = graph.adj_t.in_place(), graph.features
    return dataclasses.replace(
        graph,
        adj=adj_t if graph.adj is graph.adj_t else graph.adj,
        adj_t=adj_t,
        features=None if features is None else features.in_place(),
        labels=None if graph.labels is None else graph.labels.in_place(),
    )


def norm_of(config: Config, graph: Graph, every: Any = None) -> NormScales | None:
    """Return the scales of a run's model; None if it has none. every: as for NormScales."""
    model, real = config.model, scale_dtype(config.run.precision)
    if not model.aggregates:
        return None
    return NormScales(graph.adj_t.untyped(), model.norm, self_loops=model.self_loops, real=real, every=every)


def shard_options(config: Config) -> ShardOptions:
    """Return how a run's ranks read the graph."""
    model = config.model
    return ShardOptions(
        aggregates=model.aggregates,
        norm=model.norm,
        self_loops=model.self_loops,
        dtype=scale_dtype(config.run.precision),
        threads=threads_of(config.run),
    )


def edge_values(
    config: Config, graph: Graph, plan: RunPlan, rank: int, sample: SampleConfig | None = None
) -> EdgeValues:
    """Return what finds what drawn edges count. graph: `mapped_once`; sample: how they are drawn, as the run says."""
    adj_t = graph.adj_t
    return EdgeValues(
        adj_t,
        sample or config.sample,
        self_loops=config.model.self_loops,
        corrected=is_corrected(config),
        stored=reads_weights(config, adj_t.values is not None, graph.repeats),
        real=np.dtype(scale_dtype(config.run.precision)),
        num_relations=plan.shape.num_relations if plan.ranks[rank].values.typed else 0,
    )


def drawn_tiles(config: Config, graph: Graph, plan: RunPlan, rank: int) -> DrawnTiles | None:
    """Return what draws the in-edges of an evaluation; None where all are read. graph: `mapped_once`."""
    blocks = plan.ranks[rank].by_blocks
    if blocks is None or blocks.drawn is None:
        return None
    sampler = Sampler(graph.adj_t, blocks.drawn.draws, self_loops=config.model.self_loops)
    values = edge_values(config, graph, plan, rank, evaluated_sample(config))
    return DrawnTiles(sampler, blocks.drawn, values)


def sampled_feed(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    owners: Owners,
    owner: npt.NDArray[np.uint16],
    rank: int,
    reader: VertexFeatures,
    norm: NormScales | None,
    backend: KernelBackend,
    sums: Rows | None = None,
    labels: ReadLabels | None = None,
    relays: Relays | Waves | None = None,
) -> SampledFeed:
    """Return the feed of one rank.

    graph: `mapped_once`. owner uint16 (N,): as owners say. norm: norm_of. sums (N, D): A X, where the model reads the first
    layer's sums. backend, labels: on a GPU batches lie in memory that it reads by itself, with their labels.
    relays: where rows of other ranks are asked of their owners, what does.
    """
    model, sample, stack, run = config.model, config.sample, plan.stack, config.run
    if stack is None:
        raise PlanError("a feed of batches needs a plan that has some")
    adj_t, dtype = graph.adj_t, STORAGE[run.precision]
    values = edge_values(config, graph, plan, rank)
    spec = BufferSpec("", stack.capacities[0].sources, plan.shape.num_features, dtype)
    back = hops_back(plan.ranks[rank].values.training, stack)
    slots = feed_slots(config, plan.shape, stack, back)
    pack: Callable[[], PackedBatch] | None = None
    if pads_batches(config):
        layout = padded_layout(config, plan.shape, stack, plan.ranks[rank].values)
        pack = functools.partial(packed, layout, backend, labels)
    stored = stored_features(plan.ranks[rank].values, reader, DTYPES[dtype])

    def memory(source: VertexFeatures) -> GatheredIn:
        return functools.partial(GatheredRows, source, spec, DTYPES[dtype], threads=gather_threads(config))

    gathered = memory(reader)
    if relays is not None:
        gathered = functools.partial(FetchedRows, relays.rows, spec, DTYPES[dtype])
    sparse = sparse_rows(config, plan.shape, stack, plan.ranks[rank].values)
    batch_memory = BatchMemoryPlan(
        stack=stack,
        slots=slots,
        values=values,
        features=gathered if sparse is None and plan.ranks[rank].values.gathers else None,
        sparse=None if sparse is None else functools.partial(GatheredSparse, reader, sparse),
        stored=None if stored is None else StoredFeatures(stored),
        sums=None if sums is None else memory(VertexFeatures(dataclasses.replace(graph, features=sums), False)),
        norm=norm,
        share=share_plan(config, plan.shape, stack, back) if config.shares_batches else None,
        remote=remote_rows(config, graph, stack, owners, owner, rank) if config.reads_history else None,
        pack=pack,
    )
    links = draws_of_links(config, graph)
    seeds = RankSeeds(seeds_of(config, graph, owner), rank, together=config.shares_batches, links=links)
    leaves: dict[str, Any] = {"owner": owner, "rank": rank} if config.reads_history else {}
    # Edges that their owners draw lie ready.
    ready = relays.ready if isinstance(relays, Waves) else None
    drawn = ready or Sampler(adj_t, slots.draws, self_loops=model.self_loops, **leaves)
    return SampledFeed(drawn, seeds, batch_memory, sample.ahead, epochs=config.train.epochs, relays=relays)


def stored_features(values: Values, reader: VertexFeatures, dtype: torch.dtype) -> Tensor | None:
    """Return the features (N, D) that steps read where they are stored; None if batches bring theirs.

    Raises: GraphError if they are stored otherwise than was planned.
    """
    if not values.reads_stored:
        return None
    found = stored_rows(reader, dtype)
    if found is None:
        raise GraphError(
            f"the features of {reader.graph.name} were to be read where they are stored, and are not stored as float32 in "
            "one file or array; plan the run again"
        )
    return found


def relays_of(
    config: Config, graph: Graph, plan: RunPlan, owner: Any, reader: VertexFeatures, comm: Communicator
) -> Relays:
    """Return what fetches the rows of other ranks. graph: as for `sampled_feed`. owner uint16 (N,): of each vertex.

    Collective.
    """
    stack, sample, owned = plan.stack, config.sample, plan.ranks[comm.rank].sizes.owned
    if stack is None:
        raise PlanError("rows are fetched for batches, and the plan has none")
    cached = cached_rows(graph, owner, comm.rank, sample.cache_rows)
    storage = DTYPES[STORAGE[config.run.precision]]
    rows = OwnerRows(fetch_plan(config, plan.shape, owned), owner, reader, storage, comm, cached)
    slots = relay_slots(config, plan.shape, stack)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    seeds = RankSeeds(seeds_of(config, graph, owner), comm.rank, links=draws_of_links(config, graph))
    macros = Macrobatches(seeds.num_steps, sample.macro)
    return Relays(macros, rows, sampler, seeds, slots, sample.ahead, config.train.epochs * seeds.num_steps)


def remote_rows(config: Config, graph: Graph, stack: Stack, owners: Owners, owner: Any, rank: int) -> RemoteRows:
    """Return what finds the rows of a batch that other ranks own, as the array `owner` says.

    Cost: a sweep over the edges, of a directed graph two.
    """
    ids, indptr = halo_ids(graph, owners, rank), graph.adj_t.indptr.array()
    return RemoteRows(ids, owner, rank, indptr, stack.blocks, config.sample.history_rows)


def packed(layout: PaddedLayout, backend: KernelBackend, labels: ReadLabels | None) -> PackedBatch:
    """Return the memory of a batch on its way to a GPU."""
    return PackedBatch(layout, backend.pinned(layout.nbytes), labels)
