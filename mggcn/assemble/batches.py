"""Builds the feed of a rank that trains on batches, as planned. N vertices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.assemble.stack import seeds_of
from mggcn.blocks.sampler import Sampler
from mggcn.config import Config
from mggcn.feed.batch import Scales
from mggcn.feed.features import FeatureReader
from mggcn.feed.gather import GatheredRows
from mggcn.feed.sampled import EdgeValues, SampledFeed
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import STORAGE, scale_dtype
from mggcn.partition.order import Assignment
from mggcn.partition.rows.tiles import degrees, scales
from mggcn.planning.batches import hops_back, slot_plan
from mggcn.planning.run import RunPlan
from mggcn.train.runtime import DTYPES


def whole_graph(num_vertices: int) -> Assignment:
    """Return the assignment of all vertices to one rank, in their order."""
    owner, local = np.zeros(num_vertices, np.uint16), np.arange(num_vertices, dtype=np.int32)
    return Assignment(owner, local, (num_vertices,))


def reads_weights(config: Config, graph: Graph) -> bool:
    """Return whether sums over neighbours read values of edges: attention does if they are numbers of parallel edges."""
    return graph.adj_t.values is not None and (not config.model.attends or graph.repeats == "counted")


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
    return row.astype(real), None if col is None else col.astype(real)


def sampled_feed(config: Config, graph: Graph, plan: RunPlan, owner: Any, rank: int, threads: int) -> SampledFeed:
    """Return the feed of one rank. owner uint16 (N,): the rank of each vertex. Cost: a sweep over the edges for degrees."""
    model, sample, stack, run = config.model, config.sample, plan.stack, config.run
    assert stack is not None
    adj_t, dtype = graph.adj_t, STORAGE[run.precision]
    real = np.dtype(scale_dtype(run.precision))
    values = EdgeValues(
        adj_t,
        sample,
        self_loops=model.self_loops,
        corrected=not model.attends and not (model.kind == "sage" and model.aggregator == "max"),
        stored=reads_weights(config, graph),
        real=real,
        typed=plan.ranks[rank].values.typed,
    )
    reader = FeatureReader(graph, whole_graph(graph.num_vertices), 0, config.data.row_normalize)
    spec = BufferSpec("", stack.capacities[0].sources, reader.num_features, dtype)
    slots = slot_plan(config, plan.shape, stack, hops_back(plan.ranks[rank].values.training, stack))
    return SampledFeed(
        stack,
        Sampler(adj_t, slots.draws, self_loops=model.self_loops),
        slots,
        seeds_of(config, graph, owner),
        rank,
        values,
        lambda: GatheredRows(reader, spec, DTYPES[dtype]),
        norm_of(config, graph, threads),
        sample.ahead,
    )
