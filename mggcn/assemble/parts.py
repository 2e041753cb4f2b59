"""Builds what draws a rank's batches with the other ranks, where each holds the edges of its own vertices alone.

What all ranks need of every vertex, scales and how often it is read, they tell each other once. N vertices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mggcn.assemble.batches import edge_values, norm_of
from mggcn.assemble.stack import draws_of_links, most_read, seeds_of
from mggcn.blocks.drawn_rows import Numbering, ReadyEdges, RowDraws, row_slots
from mggcn.blocks.macrobatch import Macrobatches
from mggcn.blocks.sampler import Sampler
from mggcn.comm.base import Communicator
from mggcn.config import Config
from mggcn.feed.features import VertexFeatures
from mggcn.feed.fetched import OwnerRows
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.owner_draws import OwnerDraws
from mggcn.feed.seeds import RankSeeds
from mggcn.feed.waves import Waves
from mggcn.graph.csr import Graph
from mggcn.memory.device import STORAGE
from mggcn.partition.order import Owners
from mggcn.planning.batch_rows import fetch_plan
from mggcn.planning.batches import answer_plan, draws_of
from mggcn.planning.drawn_edges import edge_rooms, vertex_room
from mggcn.planning.run import RunPlan
from mggcn.train.runtime import DTYPES


def scales_of_all(config: Config, graph: Graph, owners: Owners, comm: Communicator) -> NormScales | None:
    """Return the scales of the run's model, of which each rank computes those of its own vertices. Collective.

    Bits are those of `norm_of`: nothing but zeros is added to a number.
    """
    norm = norm_of(config, graph)
    if norm is None or norm.norm == "none":
        return norm
    own = np.sort(owners.owned(comm.rank))
    found, _ = norm.of(own)
    assert found is not None  # as there is a norm
    every = torch.zeros(graph.num_vertices, dtype=torch.from_numpy(found).dtype)
    every[torch.from_numpy(own)] = torch.from_numpy(found)
    comm.all_reduce(every).wait()
    return norm_of(config, graph, every.numpy())


def waves_of(
    config: Config, graph: Graph, plan: RunPlan, owner: Any, reader: VertexFeatures, comm: Communicator
) -> Waves:
    """Return what has batches drawn by the owners of their vertices. Collective. Arguments: as for `relays_of`."""
    stack, sample, rank, size = plan.stack, config.sample, comm.rank, graph.num_vertices
    assert stack is not None
    storage, draws = DTYPES[STORAGE[config.run.precision]], draws_of(sample, plan.shape.num_relations)
    owned = plan.ranks[rank].sizes.owned
    cached = _cached_rows(graph, owner, comm, sample.cache_rows)
    sampler = Sampler(graph.adj_t, draws, self_loops=config.model.self_loops)
    places = plan.shape.weighted or config.model.typed
    drawing = OwnerDraws(
        draws=RowDraws(sampler, row_slots(draws, size, places=places)),
        numbering=Numbering(size, vertex_room(config, plan.shape)),
        values=edge_values(config, graph, plan, rank),
        plan=answer_plan(config, plan.shape),
        seeds=RankSeeds(seeds_of(config, graph, owner), rank, links=draws_of_links(config, graph)),
        owner=owner,
        rank=rank,
        ranks=comm.size,
        room=edge_rooms(config, plan.shape, stack),
        rows=OwnerRows(fetch_plan(config, plan.shape, owned), owner, reader, storage, comm, cached),
        ready=ReadyEdges(),
    )
    steps = drawing.seeds.num_steps
    return Waves(Macrobatches(steps, sample.macro), drawing, comm, sample.ahead, config.train.epochs * steps)


def _cached_rows(graph: Graph, owner: Any, comm: Communicator, count: int) -> npt.NDArray[np.int64]:
    """Return the vertices whose rows are cached, as `cached_rows`; ranks tell each other how often theirs are read."""
    if not count:
        return np.zeros(0, np.int64)
    own, indptr = np.flatnonzero(owner == comm.rank), graph.adj.indptr.array()
    reads = torch.zeros(graph.num_vertices, dtype=torch.int32)
    reads[torch.from_numpy(own)] = torch.from_numpy((indptr[own + 1] - indptr[own]).astype(np.int32))
    comm.all_reduce(reads).wait()
    return most_read(reads.numpy(), owner, comm.rank, count)
