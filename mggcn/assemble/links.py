"""Builds what a rank needs to predict links: the feed of its pairs, what loads them, what scores the others. N vertices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mggcn.assemble.stack import draws_of_links
from mggcn.blocks.padded import PairRoom
from mggcn.comm.base import Communicator
from mggcn.config import Config
from mggcn.feed.batch import Batch
from mggcn.feed.pairs import LinkFeed
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.partition.order import Owners, Ranges
from mggcn.planning.run import RankPlan
from mggcn.train.link_scores import EveryEmbedding, LinkScores, PairDecoder, decoder_layers
from mggcn.train.pairs import PairLoader
from mggcn.train.runtime import RankRuntime


def link_feed(config: Config, graph: Graph, local: Owners, rank: int) -> LinkFeed | None:
    """Return the feed of whole-graph training on links; None for a graph without."""
    draws, ranks = draws_of_links(config, graph), config.run.ranks
    return None if draws is None else LinkFeed(draws, rank, ranks, _rows_of(local) if ranks == 1 else None)


def pair_loader(
    config: Config, graph: Graph, runtime: RankRuntime, load: Callable[[Batch], None], room: PairRoom | None
) -> PairLoader:
    """Return what loads the pairs of a run's steps behind `load`. room: as of PairLoader."""
    gathers = config.run.ranks > 1 and not config.sample.batch
    everyone = graph.num_vertices if gathers else 0
    return PairLoader(runtime, load, dot=not config.links.decoder, num_vertices=everyone, room=room)


def link_scores(
    config: Config, graph: Graph, plan: RankPlan, runtime: RankRuntime, local: Owners, comm: Communicator
) -> LinkScores:
    """Return what scores the validation and test links of a run."""
    metric, backend = config.train.metric, runtime.backend
    decoder = PairDecoder(decoder_layers(runtime.weights.views, config.links.decoder), backend.upload)
    if comm.size == 1:
        return LinkScores(metric, graph.links, decoder, comm, backend, None, _rows_of(local))
    shape = BufferSpec("", graph.num_vertices, config.links.embedding, plan.sizes.dtype)
    return LinkScores(metric, graph.links, decoder, comm, backend, EveryEmbedding(runtime.inputs, shape, comm, backend))


def _rows_of(owners: Owners) -> npt.NDArray[np.int32] | None:
    """Return the row of each vertex on a rank that has all, None if that is its id."""
    return None if isinstance(owners, Ranges) else owners.local_of(slice(None))
