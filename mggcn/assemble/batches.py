"""Builds the feed of a rank that trains on batches, as planned. N vertices."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.assemble.stack import draws_of_links, seeds_of
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.memory import allocate
from mggcn.blocks.sampler import Sampler
from mggcn.config import Config
from mggcn.feed.batch import Scales
from mggcn.feed.features import FeatureReader
from mggcn.feed.gather import GatheredRows
from mggcn.feed.sampled import EdgeValues, SampledFeed
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import STORAGE, scale_dtype
from mggcn.partition.order import Assignment
from mggcn.partition.rows.tiles import degrees, scales
from mggcn.planning.batches import hops_back, is_corrected, pads_batches, reads_weights, share_plan, slot_plan
from mggcn.planning.run import RunPlan
from mggcn.train.runtime import DTYPES


def whole_graph(num_vertices: int) -> Assignment:
    """Return the assignment of all vertices to one rank, in their order."""
    owner, local = np.zeros(num_vertices, np.uint16), np.arange(num_vertices, dtype=np.int32)
    return Assignment(owner, local, (num_vertices,))


def mapped_once(graph: Graph) -> Graph:
    """Return the graph with one map of each file that batches read: a page counts once for each map that reads it."""

    def once(found: Any) -> Any:
        if found is None:
            return None
        if isinstance(found, CSR):
            files = ("indptr", "indices", "values", "types", "type_degrees")
            return dataclasses.replace(found, **{name: once(getattr(found, name)) for name in files})
        return ArrayRows(found.array())

    adj_t = once(graph.adj_t)
    return dataclasses.replace(
        graph,
        adj=adj_t if graph.adj is graph.adj_t else graph.adj,
        adj_t=adj_t,
        features=once(graph.features),
        labels=once(graph.labels),
    )


def norm_of(config: Config, graph: Graph, threads: int) -> Scales:
    """Return S_r and S_c of a run's model, as `norm_scales`."""
    model, real = config.model, scale_dtype(config.run.precision)
    return norm_scales(graph, model.norm, self_loops=model.self_loops, threads=threads, real=real)


def norm_scales(graph: Graph, norm: str, *, self_loops: bool, threads: int, real: npt.DTypeLike) -> Scales:
    """Return S_r and S_c of the whole graph, (N,), None for ones.

    Cost: a sweep over its edges, unless the norm is none. Raises: GraphError for negative degrees.
    """
    if norm == "none":
        return None, None
    whole = whole_graph(graph.num_vertices)
    degree = degrees(graph.untyped().adj_t, whole, 0, self_loops=self_loops, threads=threads)
    row, col = scales(degree, norm)
    kept = row.astype(real)
    return kept, kept if col is row else col


def sampled_feed(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    owner: Any,
    rank: int,
    reader: FeatureReader,
    norm: Scales,
    backend: KernelBackend,
) -> SampledFeed:
    """Return the feed of one rank. owner uint16 (N,): the rank of each vertex. norm: norm_of.

    backend: on a GPU batches lie in memory that it reads by itself.
    """
    model, sample, stack, run = config.model, config.sample, plan.stack, config.run
    assert stack is not None
    adj_t, dtype = graph.adj_t, STORAGE[run.precision]
    values = EdgeValues(
        adj_t,
        sample,
        self_loops=model.self_loops,
        corrected=is_corrected(config),
        stored=reads_weights(config, adj_t.values is not None, graph.repeats),
        real=np.dtype(scale_dtype(run.precision)),
        typed=plan.ranks[rank].values.typed,
    )
    spec = BufferSpec("", stack.capacities[0].sources, reader.num_features, dtype)
    back = hops_back(plan.ranks[rank].values.training, stack)
    slots = slot_plan(config, plan.shape, stack, back)
    pinned = pads_batches(config, graph.task)

    def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = backend.pinned(count * np.dtype(dtype).itemsize).numpy().view(dtype)
        return found

    return SampledFeed(
        stack,
        Sampler(adj_t, slots.draws, self_loops=model.self_loops),
        slots,
        seeds_of(config, graph, owner),
        rank,
        values,
        lambda: GatheredRows(reader, spec, DTYPES[dtype], backend.pinned if pinned else allocate),
        norm,
        sample.ahead,
        owner=owner,
        share=share_plan(config, plan.shape, stack, back) if config.shares_batches else None,
        links=draws_of_links(config, graph),
        empty=empty if pinned else np.empty,
    )
