"""The blocks of a step of a run on batches, as large as drawn batches are. N vertices. Needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from mggcn.blocks.block import Stack
from mggcn.blocks.capacities import with_extents
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import Slot
from mggcn.config import Config
from mggcn.feed.seeds import Seeds
from mggcn.graph.csr import Graph
from mggcn.graph.splits import training_rows
from mggcn.memory.units import MIB
from mggcn.planning.batches import feed_bytes, one_vertex, slot_plan, stack_of
from mggcn.planning.shape import GraphShape

DRAWN = 24
"""Batches that are drawn to plan by: some seconds at most."""
LITTLE_BYTES = 256 * MIB
"""Batches on their way that take no more are planned by their bounds."""


def stack_for(config: Config, graph: Graph, shape: GraphShape, owner: Any) -> Stack | None:
    """Return the blocks of a step: within the bounds of its fan-outs, or with the extents that drawn batches have.

    owner uint16 (N,): the rank of each vertex. Cost: DRAWN batches are drawn, of which no features are read.
    """
    bound = stack_of(config, shape)
    plan = config.sample.plan
    if bound is None or plan == "bound":
        return bound
    if plan == "auto" and (
        config.reads_whole_batches or feed_bytes(config, shape, bound, len(bound.blocks)) <= LITTLE_BYTES
    ):
        return bound
    slots = dataclasses.replace(slot_plan(config, shape, bound, 0), places=False)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    slot, seeds, run = Slot(slots), seeds_of(config, graph, owner), config.run
    most = [(0, 0)] * len(bound.blocks)
    for number in range(DRAWN):
        epoch, step = divmod(number, seeds.num_steps)
        together = seeds.of_step(seeds.order(config.train.seed, epoch), step)
        drawn = sampler.draw(slot, seeds.of_rank(together, number % run.ranks), config.train.seed, number)
        found = [(size, hop.indices.size) for size, hop in zip(drawn.sizes[1:], drawn.hops, strict=True)]
        most = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(most, found, strict=True)]
    # A step is cut down to a single vertex, and no further: where fan-outs bound what one draws, there is room for it.
    bounded = itertools.takewhile(lambda hop: slots.draws.most(hop) is not None, range(len(most)))
    least = one_vertex(config, shape)[: len(list(bounded))]
    return with_extents(bound, most, least)


def seeds_of(config: Config, graph: Graph, owner: Any) -> Seeds:
    """Return the steps of a run's training vertices."""
    training = training_rows(graph, config.data.splits, config.data.split)
    train = np.flatnonzero(training) if training is not None else np.zeros(0, np.int64)
    return Seeds(train, config.sample.batch, config.sample.drop_last, owner, config.run.ranks)
