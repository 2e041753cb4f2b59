"""The blocks of a step of a run on batches, as large as drawn batches are. N vertices, T training vertices.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Stack
from mggcn.blocks.capacities import with_extents
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import Slot
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.feed.labels import class_weights, rows_of_labels
from mggcn.feed.seeds import Seeds, ranges_of
from mggcn.graph.csr import Graph
from mggcn.graph.splits import count_labels, training_rows
from mggcn.memory.units import MIB
from mggcn.planning.batches import feed_bytes, one_vertex, slot_plan, stack_of
from mggcn.planning.shape import GraphShape

DRAWN = 24
"""Batches that are drawn to plan by: some seconds at most."""
LITTLE_BYTES = 256 * MIB
"""Batches on their way that take no more are planned by their bounds."""


def stack_for(config: Config, graph: Graph, shape: GraphShape, owner: Any) -> Stack | None:
    """Return the blocks of a step: within the bounds of its fan-outs, or with the extents that drawn batches have.

    owner uint16 (N,): the rank of each vertex. Cost: DRAWN batches are drawn, of which no features are read. Raises: as
    `seeds_of`.
    """
    bound = stack_of(config, shape)
    if config.sample.deal == "by-class":
        seeds_of(config, graph, owner)  # refused, if it must be, before anything is written
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
    """Return the steps of a run's training vertices. Raises: ConfigError for batches too large to be drawn by class."""
    training = training_rows(graph, config.data.splits, config.data.split)
    train = np.flatnonzero(training) if training is not None else np.zeros(0, np.int64)
    sample, ranks = config.sample, config.run.ranks
    dealt = ranges_of(train, owner, ranks) if sample.deal == "ranges" and ranks > 1 else None
    weights = _weights(config, graph, train) if sample.deal == "by-class" else None
    return Seeds(train, sample.batch, sample.drop_last, owner, ranks, dealt=dealt, weights=weights)


def _weights(config: Config, graph: Graph, train: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the weight (T,) of each training vertex's class, 0 if it is ignored."""
    labels = rows_of_labels(graph, train, "float32")
    counts = count_labels(graph, config.data.splits, config.data.split)[0]
    ignored = [label for label in config.train.ignored_labels if label < counts.size]
    counts[ignored] = 0
    by_class = class_weights(config.train, counts)
    assert by_class is not None
    by_class[ignored] = 0
    weights = by_class[labels]
    most, total = int(labels[weights.argmax()]) if train.size else 0, float(weights.sum())
    # Of a class that weighs more, a step would read a vertex twice.
    room = int(total / by_class[most] * (1 + 1e-9)) if total else 0
    if min(config.sample.batch, train.size) > room:
        raise ConfigError(
            f"sample.deal by-class would read vertices of class {most}, whose weight is {by_class[most]:.3g}, more than "
            f"once in a batch of {config.sample.batch}; set sample.batch to at most {room}, or other train.class_weights"
        )
    return weights
