"""The blocks of a step of a run on batches, as large as drawn batches are. N vertices, T training vertices.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Capacity, Stack
from mggcn.blocks.capacities import SPARE, hops_of, shared_hops, with_extents, with_shared_extents
from mggcn.blocks.draws import Draws
from mggcn.blocks.sampler import Drawn, Sampler
from mggcn.blocks.shared import Counts, Share
from mggcn.blocks.slot import Slot
from mggcn.blocks.sparse_rows import most_nonzeros, with_nonzeros
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError
from mggcn.feed.labels import class_weights, rows_of_labels
from mggcn.feed.pairs import LinkDraws
from mggcn.feed.seeds import RankSeeds, Seeds, ranges_of
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.nonzeros import RowLengths
from mggcn.graph.splits import count_labels, training_rows
from mggcn.memory.units import MIB
from mggcn.planning.batch_rows import ReadRows, relay_slots
from mggcn.planning.batch_sharing import BatchSizes, mean_stack_of, with_batches
from mggcn.planning.batches import bound_stack, feed_bytes, one_vertex, own_entries, pads_batches, share_plan, slot_plan
from mggcn.planning.shape import GraphShape
from mggcn.planning.sparse_rows import expected_nonzeros, most_sparse_rows, rows_stay_dense

DRAWN = 24
"""Batches that are drawn to plan by: some seconds at most."""
COUNTED = ("inner", "read", "remote", "entries", "last", "served")
"""What is counted of drawn batches, as in ReadRows."""
ENOUGH, STEADY = 8, 0.6 * SPARE
"""Batches, and one of each rank, after which no more are drawn if the largest exceed their mean by no more than a share of
STEADY in any hop. Of 8 normal ones the largest is expected 1.4 deviations above the mean: STEADY is then 1.4 of them, and
what a batch must exceed to be cut, SPARE more, 3.8, as one of 14,000 does."""
SWEPT = 1 << 18
"""Vertices whose ranks are counted at once: NumPy makes eight bytes of each."""
COMPARED = 2
"""Steps that are drawn to tell how many more rows ranks would compute with batches of their own, and what a batch has on
average where its bounds are planned."""
LITTLE_BYTES = 16 * MIB
"""Batches on their way that take no more are planned by their bounds: a tenth of what a process takes before it has any.
With 256 MiB, five of forty plans were 8 to 20 % above what runs took (bench.cpu.predictions); now they are within 5 %."""
LITTLE_SENT = MIB
"""A batch that is filled up to its bounds takes no more: what fills it up is computed, and much of it sent, as all else.
A MiB is sent in 21 us and passed over in less (cost/machines/hgx-h200.toml), beside the millisecond for which the host is
busy with any batch (LOCK_S of cost/batches.py): bounds as small as that cost nothing, and no batch is drawn to plan by."""


def stack_for(config: Config, graph: Graph, shape: GraphShape, owner: Any) -> Stack | None:
    """Return the blocks of a step: within the bounds of its fan-outs, or with the extents that drawn batches have.

    owner uint16 (N,): the rank of each vertex. Cost: at most DRAWN batches are drawn, without features, COMPARED of them
    for the mean alone where bounds are planned. Raises: as `seeds_of`.
    """
    if not config.sample.batch:
        return None
    bound = bound_stack(config, shape, _most_owned(owner))
    if config.sample.deal == "by-class":
        seeds_of(config, graph, owner)  # refused, if it must be, before anything is written
    plan = config.sample.plan
    lengths = _row_lengths(config, graph)
    bound = dataclasses.replace(bound, nonzeros=most_nonzeros(bound, lengths))
    if plan == "bound" and not config.shares_batches:
        return bound
    inputs = 1 + (config.sample.first == "full")
    sparse = most_sparse_rows(config, shape, bound)
    taken = feed_bytes(config, shape, bound, len(bound.blocks), inputs, sparse)
    is_small = config.plans_bounds or taken <= LITTLE_BYTES
    if pads_batches(config) and not config.reads_whole_batches:
        sent = 4 * shape.num_features * inputs * bound.capacities[0].sources + 16 * sum(
            c.edges for c in bound.capacities
        )
        is_small = is_small and sent <= LITTLE_SENT
    by_bounds = plan == "bound" or (plan == "auto" and is_small)
    if config.shares_batches:
        return _shared(config, graph, shape, owner, bound, by_bounds=by_bounds)
    if by_bounds and (config.plans_bounds or pads_batches(config)):
        return bound
    slots = dataclasses.replace(slot_plan(config, shape, bound, 0), places=False)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    slot, seeds, run, links = Slot(slots), seeds_of(config, graph, owner), config.run, draws_of_links(config, graph)
    most, sums, drawn = [(0, 0)] * len(bound.blocks), np.zeros((len(bound.blocks), 2), np.int64), 0
    nonzeros, looked = np.zeros(len(bound.nonzeros), np.int64), 0
    for number, together in enumerate(_steps(config, seeds, COMPARED if by_bounds else DRAWN)):
        own, left_out = seeds.of_rank(together, number % run.ranks), None
        if links is not None:
            own, left_out = links.of_seeds(config.train.seed, number, together, own)[0], links.left_out(together)
        batch = sampler.draw(slot, own, config.train.seed, number, left_out)
        found, looked = _sizes(batch), looked + sampler.looked_at(batch)
        if lengths is not None:
            nonzeros = np.maximum(nonzeros, lengths.of(batch.ids, batch.sizes))
        most, sums, drawn = _larger(most, found), sums + found, number + 1
        if drawn >= max(ENOUGH, run.ranks) and (np.array(most) * drawn <= (1 + STEADY) * sums).all():
            break
    least = _least(config, shape, slots.draws)
    mean = tuple((int(sources), int(edges)) for sources, edges in np.rint(sums[::-1] / max(drawn, 1)))
    bound = dataclasses.replace(bound, mean=mean, looked=looked // max(drawn, 1))
    if by_bounds:
        return bound
    stack = dataclasses.replace(with_extents(bound, most, least), mean=mean, looked=bound.looked)
    return stack if lengths is None else with_nonzeros(stack, nonzeros.tolist(), least, lengths)


def _most_owned(owner: npt.NDArray[np.uint16]) -> int:
    """Return the most rows that a rank has. owner: as of `stack_for`. Cost: a sweep, and two MiB of memory whatever N."""
    counts = np.zeros(int(owner.max(initial=0)) + 1, np.int64)
    for first in range(0, owner.size, SWEPT):
        counts += np.bincount(owner[first : first + SWEPT], minlength=counts.size)
    return int(counts.max())


def _row_lengths(config: Config, graph: Graph) -> RowLengths | None:
    """Return how many nonzeros rows of features have; None where batches have dense rows of them."""
    features = graph.features
    return RowLengths(features) if isinstance(features, CSR) and not rows_stay_dense(config) else None


def _least(config: Config, shape: GraphShape, draws: Draws) -> tuple[Capacity, ...]:
    """Return the bounds of a single vertex, of the hops that must have room for it.

    A step is cut down to a single vertex, and no further: where fan-outs bound what one draws, there is room for it.
    """
    bounded = itertools.takewhile(lambda hop: draws.most(hop) is not None, range(len(draws.fanouts)))
    return one_vertex(config, shape)[: len(list(bounded))]


def _steps(config: Config, seeds: Seeds, count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the vertices of the first steps of a run on all ranks. Cost: the order of each epoch once."""
    order = seeds.train
    for number in range(count):
        epoch, step = divmod(number, seeds.num_steps)
        if step == 0:
            order = seeds.order(config.train.seed, epoch)
        yield seeds.of_step(order, step)


def _sizes(drawn: Drawn) -> list[tuple[int, int]]:
    """Return sources and edges of each hop."""
    return [(size, hop.indices.size) for size, hop in zip(drawn.sizes[1:], drawn.hops, strict=True)]


def _larger(most: list[tuple[int, int]], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the most sources and edges of each hop, with those of another batch."""
    return [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(most, found, strict=True)]


def _shared(config: Config, graph: Graph, shape: GraphShape, owner: Any, bound: Stack, *, by_bounds: bool) -> Stack:
    """Return the blocks of a step that ranks share, and how many more rows they would compute with batches of their own."""
    slots = dataclasses.replace(slot_plan(config, shape, bound, len(bound.blocks)), places=False)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    slot, seeds, run = Slot(slots), seeds_of(config, graph, owner), config.run
    whole, most = [(0, 0)] * len(bound.blocks), np.zeros((len(bound.blocks), 7), np.int64)
    share, alone, together = Share(share_plan(config, shape, bound, len(bound.blocks)), 0), 0, 0
    sums, steps, looked = np.zeros_like(most), 0, 0
    for number, step in enumerate(_steps(config, seeds, COMPARED if by_bounds else DRAWN)):
        if number < COMPARED:
            shares = (seeds.of_rank(step, rank) for rank in range(run.ranks))
            alone += sum(sum(sampler.draw(slot, share, config.train.seed, number).sizes) for share in shares)
        drawn = sampler.draw(slot, step, config.train.seed, number)
        together += sum(drawn.sizes) if number < COMPARED else 0
        sizes = _sizes_on_ranks(drawn, seeds, share, owner[drawn.ids], step).max(2)
        whole, most = _larger(whole, _sizes(drawn)), np.maximum(most, sizes)
        sums, steps, looked = sums + sizes, number + 1, looked + sampler.looked_at(drawn)
    overlap = alone / max(together, 1)
    mean = tuple(tuple(map(int, sizes)) for sizes in np.rint(sums[::-1] / max(steps, 1)))
    bound = dataclasses.replace(bound, mean=mean, looked=looked // max(steps, 1))
    if by_bounds:
        return dataclasses.replace(bound, overlap=overlap)
    least = _least(config, shape, slots.draws)
    extents = with_extents(hops_of(tuple(reversed(bound.together))), whole, least)
    owned = int(np.bincount(owner).max(initial=0))
    loops = own_entries(config, shape)
    alone_on_ranks = shared_hops(least, slots.draws, run.ranks, owned, loops).capacities if least else ()
    stack = with_shared_extents(bound, extents, most.tolist(), alone_on_ranks[::-1], overlap)
    return dataclasses.replace(stack, mean=mean, looked=bound.looked)


def _sizes_on_ranks(
    drawn: Drawn, seeds: Seeds, share: Share, of_row: Any, step: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return what each rank has of a shared batch, (hops, 7, P): the fields of a Capacity after targets, hop 0 first.

    of_row: owners of its rows.
    """
    of_row[: step.size] = seeds.ranks_of(step)
    found = list[list[npt.NDArray[np.int64]]]()
    for targets, sources, hop in zip(drawn.sizes, drawn.sizes[1:], drawn.hops, strict=False):
        if hop.transposed is None:
            raise PlanError("a batch that ranks share needs the transpose of every hop")
        there = share.count(hop.indptr, hop.indices, of_row[:targets], of_row[:sources])
        forth = [there.columns.copy(), there.edges.copy(), *_exchanged(there)]
        back = share.count(hop.transposed.indptr_t, hop.transposed.indices_t, of_row[:sources], of_row[:targets])
        found.append([*forth, *_exchanged(back), back.edges.copy()])
    return np.array(found)


def _exchanged(counts: Counts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows that each rank receives, and sends."""
    return counts.exchanged.sum(1), counts.exchanged.sum(0)


def drawn_sizes(config: Config, graph: Graph, shape: GraphShape, owner: Any) -> dict[str, BatchSizes]:
    """Return the sizes of the first batches, as they are in both ways, by the value of run.batches.

    owner: as for `stack_for`. Cost: DRAWN batches are drawn, that of all ranks and each rank's own, without features.
    """
    config = with_batches(config, "cooperative")
    bound = bound_stack(config, shape, _most_owned(owner))
    depth, ranks = len(bound.blocks), config.run.ranks
    slots = dataclasses.replace(slot_plan(config, shape, bound, depth), places=False)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    slot, seeds = Slot(slots), seeds_of(config, graph, owner)
    share = Share(share_plan(config, shape, bound, depth), 0)
    own, shared, whole = (np.zeros((depth, count), np.int64) for count in (2, 7, 2))
    rows, distinct, sent = 0, 0, np.zeros((depth, 2), np.int64)
    passed = {"independent": 0, "cooperative": 0}
    for number, step in enumerate(_steps(config, seeds, DRAWN)):
        most, passes = [(0, 0)] * depth, list[int]()
        for rank in range(ranks):
            drawn = sampler.draw(slot, seeds.of_rank(step, rank), config.train.seed, number)
            most, rows = _larger(most, _sizes(drawn)), rows + sum(drawn.sizes)
            passes.append(sampler.looked_at(drawn))
        passed["independent"] += max(passes)
        drawn = sampler.draw(slot, step, config.train.seed, number)
        found = _sizes_on_ranks(drawn, seeds, share, owner[drawn.ids], step)
        own, shared, whole = own + most, shared + found.max(2), whole + _sizes(drawn)
        distinct, sent = distinct + sum(drawn.sizes), sent + found[:, (3, 5)].sum(2)
        passed["cooperative"] += sampler.looked_at(drawn)
    own, shared, whole = (-(-sums // DRAWN) for sums in (own, shared, whole))
    together = mean_stack_of(bound.together[-1].targets, whole.tolist()).capacities
    apart, joint = (mean_stack_of(bound.capacities[-1].targets, sums.tolist()) for sums in (own, shared))
    if _row_lengths(with_batches(config, "independent"), graph) is not None:
        apart = expected_nonzeros(shape, apart)
    apart = dataclasses.replace(apart, looked=passed["independent"] // DRAWN)
    joint = dataclasses.replace(joint, together=together, exchanged=joint.blocks, looked=passed["cooperative"] // DRAWN)
    exchanged = {
        block: (int(forth), int(back)) for block, (forth, back) in zip(reversed(joint.blocks), sent, strict=True)
    }
    once = distinct / DRAWN
    return {
        "independent": BatchSizes(stack=apart, rows=rows / DRAWN, distinct=once),
        "cooperative": BatchSizes(stack=joint, rows=once, distinct=once, exchanged=exchanged, steps=DRAWN),
    }


def read_rows(
    config: Config, graph: Graph, shape: GraphShape, owner: Any, macros: tuple[int, ...] = (0,), most: int = DRAWN
) -> ReadRows:
    """Draw the first steps of a run on every rank, without features, and count what their batches read of which ranks.

    owner: as for `stack_for`. macros: sizes of macrobatches to count beside single batches, 0 for all that are drawn; most:
    steps, at most those of an epoch. Cost: P draws a step, and 3 N bytes for each size. Raises: as `seeds_of`.
    """
    config = with_batches(config, "independent")
    bound, ranks = bound_stack(config, shape), config.run.ranks
    slots = relay_slots(config, shape, bound)
    sampler = Sampler(graph.adj_t, slots.draws, self_loops=config.model.self_loops)
    slot, seeds = Slot(slots), RankSeeds(seeds_of(config, graph, owner), links=draws_of_links(config, graph))
    drawn = [seeds.step(config.train.seed, number) for number in range(min(most, seeds.num_steps))]
    sizes = {1, *(min(size or len(drawn), len(drawn)) for size in macros)}
    found = {name: np.zeros((len(drawn), ranks), np.int64) for name in COUNTED}
    by_owner = (len(drawn), ranks, len(slots.capacities), ranks)
    asked, told = (np.zeros(by_owner, np.int64) for _ in range(2))
    fetched = {size: np.zeros((-(-len(drawn) // size), ranks, ranks), np.int64) for size in sizes}
    for rank in range(ranks):
        far, seen = owner != rank, {size: np.zeros(shape.num_vertices, np.bool_) for size in sizes}
        far[cached_rows(graph, owner, rank, config.sample.cache_rows)] = False
        for at, step in enumerate(drawn):
            vertices, _, left_out = seeds.around(step, seeds.all.of_rank(step.seeds, rank))
            batch = sampler.draw(slot, vertices, step.seed, step.number, left_out)
            remote = batch.ids[far[batch.ids]]
            counts = batch.sizes[-2], batch.sizes[-1], remote.size, sum(hop.indices.size for hop in batch.hops)
            for name, count in zip(COUNTED, (*counts, batch.hops[-1].indices.size), strict=False):
                found[name][at, rank] = count
            found["served"][at] += np.bincount(owner[remote], minlength=ranks)
            for hop, edges in enumerate(batch.hops):
                whose = owner[batch.ids[: edges.indptr.size - 1]]
                asked[at, rank, hop] = np.bincount(whose, minlength=ranks)
                told[at, rank, hop] = np.bincount(whose, np.diff(edges.indptr), minlength=ranks)
            for size, union in seen.items():
                union[remote] = True
                if (at + 1) % size == 0 or at + 1 == len(drawn):
                    fetched[size][at // size, rank] = np.bincount(owner[union], minlength=ranks)
                    union[:] = False
    return ReadRows(
        num_vertices=shape.num_vertices,
        steps=seeds.num_steps,
        fetched={size: counts.sum(2) for size, counts in fetched.items()},
        fetched_from=fetched,
        asked=asked,
        told=told,
        **found,
    )


def cached_rows(graph: Graph, owner: Any, rank: int, count: int) -> npt.NDArray[np.int64]:
    """Return so many vertices of other ranks, ascending, that most have as an in-neighbour, of equal ones the first."""
    if not count:
        return np.zeros(0, np.int64)
    reads = np.diff(graph.adj.read_pointers(0, graph.num_vertices + 1)).astype(np.int32)
    return most_read(reads, owner, rank, count)


def most_read(reads: npt.NDArray[np.int32], owner: Any, rank: int, count: int) -> npt.NDArray[np.int64]:
    """Return them as `cached_rows`; reads (N,): how many vertices have each as an in-neighbour, which is overwritten."""
    reads[owner == rank] = -1
    count = min(count, int(np.count_nonzero(reads >= 0)))
    if not count:
        return np.zeros(0, np.int64)
    least = int(np.partition(reads, -count)[-count])
    above = np.flatnonzero(reads > least)
    return np.sort(np.concatenate([above, np.flatnonzero(reads == least)[: count - above.size]]))


def draws_of_links(config: Config, graph: Graph) -> LinkDraws | None:
    """Return how a run draws the pairs of its training links; None for a graph without."""
    if not graph.links:
        return None
    links = config.links
    return LinkDraws(graph.links["train"], graph.num_vertices, links.negatives, links.negatives_from == "in-batch")


def seeds_of(config: Config, graph: Graph, owner: Any) -> Seeds:
    """Return the steps of a run's training vertices, or links, which belong to the owners of their sources.

    Raises: ConfigError for batches too large to be drawn by class.
    """
    if graph.links:
        links, sample = graph.links["train"].array(), config.sample
        of_source = owner[links[:, 0]] if config.run.ranks > 1 else None
        return Seeds(np.arange(links.shape[0]), sample.batch, sample.drop_last, of_source, config.run.ranks)
    training = training_rows(graph, config.data.splits, config.data.split)
    train = np.flatnonzero(training) if training is not None else np.zeros(0, np.int64)
    sample, ranks = config.sample, config.run.ranks
    dealt = ranges_of(train, owner, ranks) if sample.deal == "ranges" and ranks > 1 else None
    weights = _weights(config, graph, train) if sample.deal == "by-class" else None
    owner = owner if ranks > 1 else None  # an array of all vertices, for one rank to be let go
    return Seeds(train, sample.batch, sample.drop_last, owner, ranks, dealt=dealt, weights=weights)


def _weights(config: Config, graph: Graph, train: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the weight (T,) of each training vertex's class, 0 if it is ignored."""
    labels = rows_of_labels(graph, train, "float32")
    counts = count_labels(graph, config.data.splits, config.data.split)[0]
    ignored = [label for label in config.train.ignored_labels if label < counts.size]
    counts[ignored] = 0
    by_class = class_weights(config.train, counts)
    if by_class is None:
        raise ConfigError(
            "sample.deal by-class needs train.class_weights, which is none; set it to balanced, or to numbers"
        )
    by_class[ignored] = 0
    weights: npt.NDArray[np.float64] = by_class[labels]
    most, total = int(labels[weights.argmax()]) if train.size else 0, float(weights.sum())
    # Of a class that weighs more, a step would read a vertex twice.
    room = int(total / by_class[most] * (1 + 1e-9)) if total else 0
    if min(config.sample.batch, train.size) > room:
        raise ConfigError(
            f"sample.deal by-class would read vertices of class {most}, whose weight is {by_class[most]:.3g}, more than "
            f"once in a batch of {config.sample.batch}; set sample.batch to at most {room}, or other train.class_weights"
        )
    return weights
