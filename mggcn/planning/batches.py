"""What a run on batches adds to a plan: the blocks of a step, and the memory of batches on their way. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mggcn.aggregate.relations import BLOCK_ROWS
from mggcn.blocks.block import Block, Capacity, RowSet, Stack
from mggcn.blocks.capacities import hops_of, shared_hops
from mggcn.blocks.drawn_rows import read_slots
from mggcn.blocks.draws import ALL, By, Draws, bounds
from mggcn.blocks.letters import AnswerPlan
from mggcn.blocks.macrobatch import cache_bytes
from mggcn.blocks.padded import DRAWN, PaddedLayout
from mggcn.blocks.relation_order import RelationPlan
from mggcn.blocks.shared import SharePlan
from mggcn.blocks.slot import SlotPlan
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.config import Config, RunConfig, SampleConfig
from mggcn.config.values import ELSE, numbers_by_relation
from mggcn.errors import ConfigError
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import DEVICES, REAL, STORAGE, scale_dtype, threads_of
from mggcn.memory.units import human
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.network import Values
from mggcn.model.values import Graph
from mggcn.planning.links import pair_room, seeds_of_one
from mggcn.planning.shape import GraphShape
from mggcn.planning.sparse_rows import expected_nonzeros, rows_stay_dense

ORDER_BYTES = 64
"""Bytes a training vertex while an epoch's order is made: ids, keys, their hash and its steps, places, the order, and that
of the epoch before."""
DRAWN_BYTES = 32
"""Bytes more of vertices that are drawn by weight: the weight, the end of a piece, points and what lies at them."""
DEGREE_BYTES = 72
"""Bytes a row of a block for what its degrees are scaled by."""


def check_batches(config: Config) -> None:
    """Refuse settings that only batches read where there are none. Raises: ConfigError."""
    sample, run, rows = config.sample, config.run, config.train.row_optimizer
    if rows != "adam" and not (sample.batch and config.data.learned):
        raise ConfigError(
            f"train.row_optimizer {rows} moves learned rows that a batch reads; set data.inputs, such as learned:64, and "
            "sample.batch, or leave it out"
        )
    if sample.batch:
        return
    if sample.deal != "global":
        raise ConfigError(
            f"sample.deal is {sample.deal}, and without sample.batch nothing is dealt out; set sample.batch, such as 1024"
        )
    if sample.rows != "mapped":
        raise ConfigError(
            f"sample.rows is {sample.rows}, and without sample.batch a rank reads the rows that it owns anyway; set "
            "sample.batch, such as 1024"
        )
    if sample.halo == "history":
        raise ConfigError(
            "sample.halo is history, and without sample.batch the whole graph is one step; set sample.batch, such as 1024, "
            "or for the whole graph run.strategy delayed"
        )
    if run.batches == "cooperative":
        raise ConfigError(
            "run.batches is cooperative, and without sample.batch the whole graph is one step; set sample.batch, such as "
            "1024"
        )
    # What threads draw ahead changes no result, and every run on batches records how many it was.
    read = [one for one in dataclasses.fields(sample) if one.name != "ahead"]
    if named := [f"sample.{one.name}" for one in read if getattr(sample, one.name) != one.default]:
        several = len(named) > 1
        raise ConfigError(
            f"{', '.join(named)} belong{'s' * (not several)} to batches, and without sample.batch the whole graph is one "
            f"step; set sample.batch, such as 1024, or leave {'them' if several else 'it'} out"
        )


def without_unread(config: Config) -> Config:
    """Return a configuration without settings that only batches read, where there are none: runs that began before
    `check_batches` refused these may have some.
    """
    if config.sample.batch:
        return config
    run = dataclasses.replace(config.run, batches=RunConfig().batches)
    return dataclasses.replace(config, sample=SampleConfig(), run=run)


def batch_lines(
    config: Config,
    shape: GraphShape,
    stack: Stack,
    steps: int,
    nbytes: int,
    pinned_bytes: int,
    sparse: SparseRowsPlan | None = None,
    *,
    stored: bool = False,
) -> list[str]:
    """Describe the batches of an epoch: what each hop has at most on a rank, and the bytes of those on their way.

    pinned_bytes: of a rank on a GPU, in the host's memory; 0: nbytes are. sparse: features that are; stored:
    whether the first sums read them where they are stored.
    """
    sample, inputs = config.sample, stack.capacities[0].sources
    times = steps * config.run.ranks / shape.num_vertices
    gathered = f"at most {times * inputs:.1f}"
    if stack.mean:
        gathered = f"about {times * stack.mean[0][0]:.2f}, at most {times * inputs:.2f},"
    lines = [
        f"batches of {min(sample.batch, shape.num_training or sample.batch):,} training "
        f"{'links' if shape.task == 'links' else 'vertices'} on all ranks, "
        f"{steps:,} step{'s' * (steps > 1)} an epoch; a rank has at most"
    ]
    means = [f", on average {rows:,} and {edges:,}" for rows, edges, *_ in stack.mean] or [""] * len(stack.blocks)
    hops = zip(stack.blocks, stack.capacities, means, reversed(sample.drawn_fanout), strict=True)
    for block, size, mean, fanout in reversed(list(hops)):
        of = " of each relation" * sample.draws_by_type
        drawn = "all in-neighbours" if fanout == ALL else f"{fanout} in-neighbours{of} a row"
        lines.append(
            f"  {block.name}: {size.targets:,} rows from {size.sources:,}, {size.edges:,} edges{mean} "
            f"({drawn}, {sample.draw})"
        )
    if sample.first == "full":
        hop = last_hop(config, shape)
        item = ITEM_BYTES[REAL[config.run.precision]]
        lines.append(
            f"  hop {len(sample.fanout)}: not drawn, up to {hop.sources - inputs:,} rows and {hop.edges:,} edges fewer: "
            f"the first layer reads A X, computed once into a temporary file of "
            f"{human(item * shape.num_vertices * shape.num_features)}"
        )
    if sparse is not None:
        lines.append(
            f"  features are gathered as sparse rows: at most {sparse.nonzeros:,} nonzeros of a batch's {inputs:,} rows, "
            f"{human(sparse.nbytes)} with the transposes"
        )
    if stored:
        lines.append(
            "  the first sums read features where they are stored; a step gathers only what a layer reads by itself, up to "
            f"{stack.capacities[0].targets:,} rows"
        )
    count = f"{sample.ahead + 1} batch{'es' * (sample.ahead > 0)} on their way take{'s' * (not sample.ahead)}"
    gathered = f"an epoch {'reads' if stored else 'gathers'} {gathered} times the graph's features"
    if pinned_bytes:
        gathered = (
            f"of the host's memory for each rank, nearly all pinned, and {human(nbytes)} of its GPU's; {gathered}"
        )
    if config.data.learned:
        gathered = gathered.replace("the graph's features", "the rows of all vertices")
    return [
        *lines,
        *_shared_lines(config, stack),
        f"  {count} {human(pinned_bytes)} {gathered}" if pinned_bytes else f"  {count} {human(nbytes)}; {gathered}",
        f"  files of the graph are read in place: up to {human(_mapped_bytes(config, shape))}, which ranks share, and the "
        "system takes back as it needs: no part of the peak",
    ]


def _shared_lines(config: Config, stack: Stack) -> list[str]:
    """Say what ranks that share a batch exchange, and what they save."""
    if not stack.together:
        return []
    sizes = {
        block: size for block, size in zip(stack.blocks, stack.capacities, strict=True) if block in stack.exchanged
    }
    lines = [
        f"  {block.name}: up to {size.received:,} rows come from other ranks, and {size.sent:,} go to them; backwards "
        f"{size.received_back:,} and {size.sent_back:,}"
        for block, size in reversed(sizes.items())
    ]
    first = "" if len(sizes) == len(stack.blocks) else ", features are gathered by each rank that reads them"
    more = (
        "" if not stack.overlap else f"; with batches of their own, ranks would have {stack.overlap:.2f} times as many"
    )
    return [f"  ranks share a batch: every row is computed once{first}{more}", *lines]


def _mapped_bytes(config: Config, shape: GraphShape) -> int:
    """Bytes of the files that batches map: row pointers, columns and weights of edges, features."""
    edges = 8 * shape.num_vertices + (4 + 4 * shape.weighted) * shape.num_edges
    if config.data.learned:
        return edges
    if shape.feature_nnz is None:
        return edges + 4 * shape.num_vertices * shape.num_features
    return edges + 8 * (shape.num_vertices + shape.feature_nnz)


def stack_of(config: Config, shape: GraphShape) -> Stack | None:
    """Return the blocks of a step with their bounds on every rank; None: a step is the whole graph. Raises: ConfigError."""
    return bound_stack(config, shape) if config.sample.batch else None


def bound_stack(config: Config, shape: GraphShape, owned: int = 0) -> Stack:
    """Return the blocks of a step on a batch with their bounds on every rank. Raises: ConfigError.

    owned: the most vertices of a rank, if that is known. Nonzeros of sparse features are those that rows have on average.
    """
    sample = config.sample
    if sample.draw == "weight" and not shape.weighted:
        raise ConfigError("sample.draw weight needs a graph with weights, and this one has none; draw uniformly")
    seeds, ranks = min(sample.batch, shape.num_training or shape.num_vertices), config.run.ranks
    if not config.shares_batches:
        stack = hops_of(_bounds(config, shape, -(-seeds // ranks) * seeds_of_one(config, shape)))
        return stack if rows_stay_dense(config) else expected_nonzeros(shape, stack)
    together, draws = _bounds(config, shape, seeds), draws_of(sample, shape.num_relations)
    return shared_hops(together, draws, ranks, owned or shape.num_vertices, own_entries(config, shape))


def one_vertex(config: Config, shape: GraphShape) -> tuple[Capacity, ...]:
    """Return the bounds of what a single seed, or the pairs of a single link, draw, of the hop at the seeds first."""
    return _bounds(config, shape, seeds_of_one(config, shape))


def _bounds(config: Config, shape: GraphShape, num_seeds: int) -> tuple[Capacity, ...]:
    return _hop_bounds(config, shape, num_seeds)[: len(config.sample.drawn_fanout)]


def _hop_bounds(config: Config, shape: GraphShape, num_seeds: int) -> tuple[Capacity, ...]:
    """Return the bounds of every hop, drawn or not."""
    draws = draws_of(dataclasses.replace(config.sample, first="drawn"), shape.num_relations)
    size = {"num_vertices": shape.num_vertices, "num_edges": shape.num_edges}
    return bounds(num_seeds, draws, **size, own_entries=own_entries(config, shape))


def own_entries(config: Config, shape: GraphShape) -> int:
    """Return the most entries of its own vertex that a row of a batch has and are not drawn, as `bounds` takes them."""
    return shape.own_entries * config.model.self_loops


def gathered_first(stack: Stack, training: Graph) -> Stack:
    """Return the stack of ranks that share a batch, with all rows of the input that a rank reads gathered by itself.

    Features are mapped by every rank: to read a row again is less than to receive it. Where weights multiply the input's
    rows first, or a norm counts them, each has one rank, which sends the result.
    """
    first, size = stack.blocks[0], stack.capacities[0]
    below = [value.kind for value in training.values() if value.rows == first.sources]
    if first not in stack.exchanged or any(k.has_parameters and not isinstance(k, Aggregate) for k in below):
        return stack
    sources = min(size.sources + size.received, stack.together[0].sources)
    capacities = (Capacity(size.targets, sources, size.edges), *stack.capacities[1:])
    mean = stack.mean
    if mean:
        own, edges, received, *_ = mean[0]
        mean = ((own + received, edges), *mean[1:])
    return dataclasses.replace(stack, capacities=capacities, mean=mean, exchanged=stack.exchanged[1:])


def last_hop(config: Config, shape: GraphShape) -> Capacity:
    """Return the bounds of a rank's last hop, that of the input, drawn or not."""
    seeds = min(config.sample.batch, shape.num_training or shape.num_vertices)
    return _hop_bounds(config, shape, -(-seeds // config.run.ranks) * seeds_of_one(config, shape))[-1]


def first_block(sample: SampleConfig, stack: Stack) -> Block | None:
    """Return the block of the first layer, whose sums are read from A X; None where it is one of the stack's."""
    if sample.first == "drawn":
        return None
    number = len(sample.fanout)
    return Block(f"hop {number}", stack.blocks[0].sources, RowSet(f"{number} hops from the seeds"))


def cache_line(inner: int, new: int, edges: int, row_bytes: int) -> str:
    """Say what BatchGNN's equations 4 and 5 are, and whether a cache of sums pays; arguments as of `cache_bytes`."""
    without, cached = cache_bytes(inner, new, edges, row_bytes)
    return (
        f"BatchGNN eq. 4, without a cache of sums: {human(without)} of rows and edges; eq. 5, with it (sample.first = "
        f"full): {human(cached)}; it {'pays' if cached < without else 'does not pay'}: |V| is {inner:,} and |N(V)| {new:,}"
    )


def first_lines(config: Config, shape: GraphShape) -> list[str]:
    """Say what the cache of sums that a run has saves of a batch that is as large as it may be."""
    if config.sample.first == "drawn":
        return []
    size, row = last_hop(config, shape), ITEM_BYTES[STORAGE[config.run.precision]] * shape.num_features
    return [f"of the largest batch, {cache_line(size.targets, size.sources - size.targets, size.edges, row)}"]


def draws_of(sample: SampleConfig, num_relations: int = 0) -> Draws:
    """Return how in-neighbours are drawn. num_relations: of the edges, which may be drawn apart.

    Raises: ConfigError for numbers by relation that are not those of the graph, or a fan-out that cannot be.
    """
    by: By = "uniform" if sample.draw == "replace" else sample.draw
    apart = sample.draws_by_type and num_relations
    fanouts = tuple(
        _of_relations(numbers, num_relations) if apart or isinstance(numbers, str) else numbers
        for numbers in sample.drawn_fanout
    )
    return Draws(fanouts=fanouts, by=by, replace=sample.draw == "replace")


def _of_relations(numbers: int | str, num_relations: int) -> tuple[int, ...]:
    """Return the fan-out of each relation; numbers: of a layer, as sample.fanout has them. Raises: ConfigError."""
    if isinstance(numbers, int):
        return (numbers,) * num_relations
    if not num_relations:
        raise ConfigError(
            f"sample.fanout {numbers} has numbers by relation, and the graph's edges have no types; give a number for each "
            "layer"
        )
    named = numbers_by_relation(numbers)
    known = f"relations 0 .. {num_relations - 1}" if num_relations > 1 else "relation 0 alone"
    found = [named.get(relation, named.get(None)) for relation in range(num_relations)]
    if unknown := [name for name in named if name is not None and name >= num_relations]:
        raise ConfigError(f"sample.fanout {numbers} names relation {unknown[0]}, and the graph has {known}")
    if None in found:
        raise ConfigError(
            f"sample.fanout {numbers} names no number for relation {found.index(None)}, and the graph has {known}; name "
            f"it, or add /{ELSE}:5 for all that are not named"
        )
    return tuple(number for number in found if number is not None)


def hops_back(training: Graph, stack: Stack) -> int:
    """Return the hops, from the seeds on, through which a training step's gradients flow back."""
    kinds = (value.kind for value in training.values())
    crossed = {kind.block for kind in kinds if isinstance(kind, Aggregate) and kind.backward}
    return max((hop for hop, block in enumerate(reversed(stack.blocks), start=1) if block in crossed), default=0)


def slot_plan(config: Config, shape: GraphShape, stack: Stack, back: int) -> SlotPlan:
    """Return what the memory of a drawn batch depends on. back: hops that are transposed, as `hops_back`."""
    return SlotPlan(
        draws=draws_of(config.sample, shape.num_relations),
        capacities=tuple(reversed(stack.together or stack.capacities)),
        num_vertices=shape.num_vertices,
        places=shape.weighted or config.model.typed,
        transposed=back,
    )


def feed_slots(config: Config, shape: GraphShape, stack: Stack, back: int) -> SlotPlan:
    """Return what the memory of a batch depends on that is on its way: drawn, or read of edges that owners have drawn."""
    plan = slot_plan(config, shape, stack, back)
    return read_slots(plan, places=answer_plan(config, shape).value_bytes > 0) if config.draws_at_owners else plan


def answer_plan(config: Config, shape: GraphShape) -> AnswerPlan:
    """Return what owners tell of the edges that they draw: what they count, unless that follows from degrees."""
    typed, stored = config.model.typed, reads_weights(config, shape.weighted, shape.repeats)
    needed = stored or typed or (is_corrected(config) and config.sample.weights != "block")
    told = needed and (stored or typed or config.sample.draw != "uniform")
    return AnswerPlan(
        degrees=needed and not told,
        value_bytes=ITEM_BYTES[REAL[config.run.precision]] * told,
        type_bytes=typed * (1 if shape.num_relations <= 256 else 2),
    )


def is_corrected(config: Config) -> bool:
    """Return whether sums over neighbours read values that stand for the edges that were not drawn."""
    model = config.model
    return not model.attends and not (model.kind == "sage" and model.aggregator == "max")


def reads_weights(config: Config, weighted: bool, repeats: str) -> bool:
    """Return whether sums over neighbours read values of edges: attention does if they are numbers of parallel edges."""
    return weighted and (not config.model.attends or repeats == "counted")


def mean_stack(stack: Stack) -> Stack:
    """Return the stack with the sizes that drawn batches have on average; as it is if none were drawn."""
    if not stack.mean:
        return stack
    targets = [*(mean[0] for mean in stack.mean[1:]), stack.capacities[-1].targets]
    sizes = (Capacity.of((count, *mean)) for count, mean in zip(targets, stack.mean, strict=True))
    return Stack(stack.blocks, tuple(sizes))


def pads_batches(config: Config) -> bool:
    """Return whether batches are filled up to the most that a step may have, so that all steps have the same sizes: those
    of a GPU. Those of R-GCN are not: a relation has as many rows as a batch happens to have. Nor are those that ranks
    share, which exchange other numbers of rows in every step.
    """
    varies = config.model.typed or config.shares_batches
    return bool(config.sample.batch) and not DEVICES[config.run.device].is_host and not varies


def gather_threads(config: Config) -> int:
    """Return how many threads gather a batch's features: beside a GPU, the cores that draw no other batch share in it."""
    free = threads_of(config.run) - 2  # but for the thread of the steps and the system
    return max(1, free // max(config.sample.ahead, 1)) if pads_batches(config) else 1


def padded_layout(config: Config, shape: GraphShape, stack: Stack, values: Values) -> PaddedLayout:
    """Return what a batch takes on a GPU."""
    model, precision, first = config.model, config.run.precision, values.first
    normed = model.norm if model.aggregates else "none"
    real = scale_dtype(precision)
    return PaddedLayout(
        stack=stack,
        transposed=hops_back(values.training, stack),
        real=real,
        valued=_is_valued(config, shape),
        row_scaled=normed != "none",
        col_scaled=normed == "symmetric",
        inputs=(*["features"] * (first is None or first.itself), *["sums"] * (first is not None)),
        feature_bytes=BufferSpec("", 1, shape.num_features, STORAGE[precision]).nbytes,
        labels=("int32", 1) if shape.task == "classes" else (real, shape.num_classes),
        pairs=pair_room(config, shape, 0, stack),
    )


def _is_valued(config: Config, shape: GraphShape) -> bool:
    """Return whether edges of a batch count other than one."""
    stored = reads_weights(config, shape.weighted, shape.repeats)
    return stored or (is_corrected(config) and config.sample.weights != "block")


def device_bytes(config: Config, shape: GraphShape, stack: Stack, values: Values) -> int:
    """Return the bytes of the batches on a GPU: that of the step, and the next one, which is sent meanwhile."""
    return padded_layout(config, shape, stack, values).nbytes * (1 + (config.sample.ahead > 0))


def packed_bytes(config: Config, shape: GraphShape, stack: Stack, values: Values) -> int:
    """Return the host's bytes of what batches on their way to a GPU have beside what is drawn and gathered: labels, masks,
    and the scales of all row sets but the input's (feed/packed.py).
    """
    layout = padded_layout(config, shape, stack, values)
    drawn = (*DRAWN, "row_scale0", *layout.inputs)
    inside = sum(place.nbytes for name, place in layout.places().items() if name.startswith(drawn))
    return (config.sample.ahead + 1) * (layout.nbytes - inside)


def feed_bytes(
    config: Config, shape: GraphShape, stack: Stack, back: int, inputs: int = 1, sparse: SparseRowsPlan | None = None
) -> int:
    """Return the bytes of the batches on their way on one rank: what is drawn, what it counts, and features.

    Also the scales of vertices that are kept (feed/norm_scales.py), training vertices and their order, and matrices that no
    file holds as they are. All of it is the host's memory. back: as for `slot_plan`. sparse: features that are; inputs: of
    X and A X those that are gathered as dense rows else.
    """
    real, drawn = ITEM_BYTES[REAL[config.run.precision]], stack.together or stack.capacities
    valued = config.model.typed or _is_valued(config, shape)
    counts = [size.edges for hop, size in enumerate(reversed(drawn)) for _ in range(1 + (hop < back))]
    share = share_plan(config, shape, stack, back) if stack.together else None
    typed = _typed_bytes(config, shape, counts, share) if config.model.typed else 0
    gathered = BufferSpec("", stack.capacities[0].sources, shape.num_features, STORAGE[config.run.precision])
    one = feed_slots(config, shape, stack, back).nbytes + real * valued * sum(counts) + typed
    one += inputs * (gathered.nbytes + 4 * gathered.rows) if sparse is None else sparse.nbytes
    # Degrees of blocks are counted anew in every step, in double precision.
    one += DEGREE_BYTES * drawn[0].sources if config.sample.weights == "block" else real * gathered.rows
    one += 0 if share is None else share.nbytes
    kept = real * shape.num_vertices * (shape.weighted or config.model.self_loops)
    order = ORDER_BYTES + DRAWN_BYTES * (config.sample.deal == "by-class")
    training = order * (shape.num_training or shape.num_vertices)
    return (config.sample.ahead + 1) * one + kept + training + shape.copied_bytes


def _typed_bytes(config: Config, shape: GraphShape, counts: Sequence[int], share: SharePlan | None) -> int:
    """Return the bytes of a batch's edges in the order of their relations; counts: of each hop, both ways."""
    of: dict[str, Any] = {"relations": shape.num_relations, "block_rows": BLOCK_ROWS}
    of["real"] = scale_dtype(config.run.precision)
    types, parts = 0, counts
    if share is not None:
        # Of all ranks' edges the types alone.
        types = 2 * sum(counts)
        parts = [count for _, _, count, orders in share.edges_by_relation() for _ in range(orders)]
    return types + sum(RelationPlan(edges=count, **of).nbytes for count in parts) + 8 * shape.num_relations


def share_plan(config: Config, shape: GraphShape, stack: Stack, back: int) -> SharePlan:
    """Return what the memory of a rank's part depends on, where ranks share a batch. back: as for `slot_plan`."""
    return SharePlan(
        capacities=tuple(reversed(stack.capacities)),
        together=tuple(reversed(stack.together)),
        exchanged=tuple(block in stack.exchanged for block in reversed(stack.blocks)),
        ranks=config.run.ranks,
        transposed=back,
        value_bytes=ITEM_BYTES[REAL[config.run.precision]] * (_is_valued(config, shape) or config.model.typed),
    )


def steps_of(config: Config, shape: GraphShape) -> int:
    """Return the steps of an epoch, as far as the number of training vertices is known."""
    sample = config.sample
    whole, rest = divmod(shape.num_training or 0, sample.batch) if sample.batch else (1, 0)
    return max(whole + (rest > 0 and not sample.drop_last), 1)
