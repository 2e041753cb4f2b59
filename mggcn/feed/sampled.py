"""The feed of sampled training: seeds of a step, what is drawn around them, what that counts, and the rows that it reads.

T targets, S sources, E edges of a block; D features. Batches are drawn and gathered by threads beside the step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.aggregate.relations import BLOCK_ROWS
from mggcn.backend.cpu.memory import allocate
from mggcn.backend.events import Mark
from mggcn.blocks.block import RowSet, Stack
from mggcn.blocks.relation_order import RelationEdges, RelationOrder, RelationPlan
from mggcn.blocks.sampler import BatchTooLargeError, Drawn, DrawnHop, Sampler
from mggcn.blocks.shared import Share, SharePlan
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.config import SampleConfig
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges, Scales
from mggcn.feed.gather import GatheredRows
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.packed import PackedBatch
from mggcn.feed.pairs import LinkDraws
from mggcn.feed.relation_means import RelationMeans
from mggcn.feed.seeds import Seeds
from mggcn.feed.shared import in_order, part_of
from mggcn.graph.csr import CSR
from mggcn.partition.rows.tiles import scales

if TYPE_CHECKING:
    from torch import Tensor

Vector = npt.NDArray[Any]
GatheredIn: TypeAlias = Callable[[Callable[[int], "Tensor"]], GatheredRows]
"""Makes the memory of a batch's features from what gives so many bytes."""
TAKEN = 1 << 12
"""Types that are taken at a time, so that their places need 32 KiB."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step: its number in the run, by which draws are named, and its seeds on all ranks."""

    seed: int
    number: int
    seeds: Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The memory of a batch on its way: what is drawn, its values and their transpose, features, scales of its rows; and
    this rank's part, if ranks share it.
    """

    slot: Slot
    values: tuple[Vector, ...]
    values_t: tuple[Vector, ...]
    features: GatheredRows | None
    sums: GatheredRows | None
    scales: Vector
    relations: tuple[RelationOrder, ...]
    relations_t: tuple[RelationOrder, ...]
    by_type: Vector
    reads: list[Mark]
    """As of a batch."""
    share: Share | None
    packed: PackedBatch | None


class EdgeValues:
    """What drawn edges count. real: the type of values.

    corrected: whether sums over neighbours read values, which then stand for the edges that were not drawn; stored: whether
    they read the weights of edges; num_relations: of means over the neighbours of each relation, 0 of others.
    """

    def __init__(
        self,
        adj_t: CSR,
        sample: SampleConfig,
        *,
        self_loops: bool,
        corrected: bool,
        stored: bool,
        real: npt.DTypeLike,
        num_relations: int = 0,
    ) -> None:
        self.sample: SampleConfig = sample
        self.real: npt.DTypeLike = real
        typed = num_relations > 0
        self.relations: RelationMeans | None = RelationMeans(adj_t, sample, num_relations) if typed else None
        self.needed: bool = stored or typed or (corrected and sample.weights != "block")
        """Whether edges of a batch have values at all."""
        by_weight = sample.draw == "weight"
        weights = adj_t.values if stored or by_weight else None
        self._arrays = adj_t.indptr.array(), adj_t.indices.array(), None if weights is None else weights.array()
        self._store_at = [None if of is None else of.ctypes.data for of in self._arrays]
        whole = sample.weights == "mean" or (sample.weights == "unbiased" and not sample.draw.startswith("labor"))
        self._drawn = corrected
        self._flags = int(self_loops), int(corrected and whole and not (typed and sample.by_type)), int(by_weight)

    def write(self, ids: Vector, hop: DrawnHop, out: Vector, out_t: Vector | None = None) -> None:
        """Write the values (E,) of a hop's edges, and those of its transpose if asked for; ids (T,): its targets."""
        indptr, indices, weights = self._store_at
        loops, normalised, by_weight = self._flags
        draw = hop.values if self._drawn else None
        arguments = native.BlockValuesArgs(
            store_indptr=indptr,
            ids=ids.ctypes.data,
            indptr=hop.indptr.ctypes.data,
            place=None if hop.places is None else hop.places.ctypes.data,
            store_indices=indices,
            indices=hop.indices.ctypes.data,
            weights=weights,
            draw=None if draw is None else draw.ctypes.data,
            degrees=hop.degrees.ctypes.data,
            order=None if out_t is None or hop.transposed is None else hop.transposed.order.ctypes.data,
            values_t=None if out_t is None else out_t.ctypes.data,
            rows=ids.size,
            self_loops=loops,
            normalised=normalised,
            by_weight=by_weight,
        )
        kernel = native.kernel("mggcn_block_values_", "f64" if out.dtype == np.float64 else "f32")
        kernel(ctypes.byref(arguments), out.ctypes.data)


class SampledFeed:
    """Batches of training vertices with what is drawn of their neighbourhoods, of one rank.

    memory, sums: make that of a batch's features, and of its rows of A X, of given bytes; a batch may have either or both.
    ahead: batches
    that are made beside the step, also the first ones of the next epoch: whatever runs between two epochs, these wait.
    epochs: how many there are, None if that is not known. norm: the scales of the whole graph, None if rows have none.
    keep: whether batches stay valid, for which the threads copy them. owner uint16 (N,): the rank of each vertex; share:
    plans the part of a rank where ranks share batches, of which each draws all, and takes its part. links: where links are
    predicted, seeds are numbers of training links, and the vertices of their pairs take their place when a batch is drawn,
    from which the step's links are left out. pack: makes the memory of a batch that goes to a GPU. Memory: ahead + 1
    batches, and the order of two epochs, as planning/batches.py counts them.
    """

    def __init__(
        self,
        stack: Stack,
        sampler: Sampler,
        plan: SlotPlan,
        seeds: Seeds,
        rank: int,
        values: EdgeValues,
        memory: GatheredIn | None,
        norm: NormScales | None,
        ahead: int,
        keep: bool = False,
        owner: Vector | None = None,
        links: LinkDraws | None = None,
        share: SharePlan | None = None,
        pack: Callable[[], PackedBatch] | None = None,
        epochs: int | None = None,
        sums: GatheredIn | None = None,
    ) -> None:
        self._links: LinkDraws | None = links
        self.stack: Stack = stack
        self.num_steps: int = seeds.num_steps
        self._sampler, self._seeds, self._rank = sampler, seeds, rank
        self._values, self._ahead, self._keep, self._owner = values, ahead, keep, owner
        self._threads = ThreadPoolExecutor(ahead, "mggcn-feed") if ahead else None
        self._waiting: deque[tuple[tuple[int, int], Future[Batch | None]]] = deque()
        """Batches on their way, by seed and number of the step, in the order of the steps."""
        self._end = None if epochs is None else epochs * self.num_steps
        self._orders: dict[tuple[int, int], Vector] = {}
        self._ordering = threading.Lock()
        real = values.real
        self._norm: NormScales | None = norm
        drawn = stack.together or stack.capacities
        edges = [c.edges * values.needed for c in reversed(drawn)]
        edges_t = [count * plan.is_transposed(hop) for hop, count in enumerate(edges)]
        most = stack.capacities[0].sources

        def by_relation(counts: list[int]) -> tuple[RelationOrder, ...]:
            means = values.relations
            if means is None:
                return ()
            of: dict[str, Any] = {"relations": means.num_relations, "block_rows": BLOCK_ROWS, "real": real}
            return tuple(RelationOrder(RelationPlan(edges=count, **of), means.dtype) for count in counts)

        def vectors(counts: list[int], name: str, packed: PackedBatch | None) -> tuple[Vector, ...]:
            given = [None if packed is None else packed.of_hop(name, hop) for hop in range(len(counts))]
            return tuple(np.empty(n, real) if one is None else one for n, one in zip(counts, given, strict=True))

        def gathered(make: GatheredIn | None, name: str, packed: PackedBatch | None) -> GatheredRows | None:
            if make is None:
                return None
            return make(allocate if packed is None else lambda nbytes: packed.bytes_of(name)[:nbytes])

        normed = most if norm is not None and norm.norm != "none" else 0
        packs = [None if pack is None else pack() for _ in range(ahead + 1)]
        self._places = [
            _Place(
                slot=Slot(plan) if packed is None else Slot(plan, packed.of_slot()),
                values=vectors(edges, "values", packed),
                values_t=vectors(edges_t, "values_t", packed),
                features=gathered(memory, "features", packed),
                sums=gathered(sums, "sums", packed),
                scales=np.empty(normed, real) if packed is None or not normed else packed.arrays["row_scale0"],
                relations=by_relation(edges),
                relations_t=by_relation(edges_t),
                by_type=np.zeros(0 if values.relations is None else values.relations.num_relations),
                reads=[],
                share=None if share is None else Share(share, rank),
                packed=packed,
            )
            for packed in packs
        ]

    def epoch(self, seed: int, number: int, first: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from step `first` on; each is valid until the next one is asked for, if not kept.

        A step that is larger than was planned comes in halves of its seeds, or theirs. Raises: PlanError for a single seed
        that is too large.
        """
        at = first
        try:
            for at in range(first, self.num_steps):
                step = number * self.num_steps + at
                batch = self._next(seed, step)
                if batch is None:
                    whole = self._step(seed, step)
                    yield from self._halves(whole, self._seeds_of(whole), last=True)
                else:
                    yield batch
        finally:
            if at + 1 < self.num_steps:  # the loop was left, so that another step than the next one follows
                self._drop()

    def _next(self, seed: int, step: int) -> Batch | None:
        """Return the batch of a step, None if it is too large, and have those behind it drawn."""
        if self._threads is None:
            return self._made(seed, step)
        if self._waiting and self._waiting[0][0] != (seed, step):
            self._drop()
        end = step + self._ahead + 1
        for further in range(
            step + len(self._waiting), end if self._end is None else max(min(end, self._end), step + 1)
        ):
            self._waiting.append(((seed, further), self._threads.submit(self._made, seed, further)))
        try:
            batch = self._waiting[0][1].result()
        except BaseException:  # also Ctrl-C, while a thread still writes this batch
            self._drop()
            raise
        self._waiting.popleft()
        return batch

    def _drop(self) -> None:
        """Forget the batches on their way; their places are free once the threads have left them."""
        # All are cancelled before any is waited for, so that no thread begins another one meanwhile.
        wait([future for _, future in self._waiting if not future.cancel()])
        self._waiting.clear()

    def _step(self, seed: int, number: int) -> _Step:
        epoch, at = divmod(number, self.num_steps)
        with self._ordering:  # threads that draw over the end of an epoch make the order of the next one once
            order = self._orders.get((seed, epoch))
            if order is None:
                self._orders = dict([*self._orders.items()][-1:])
                order = self._orders[seed, epoch] = self._seeds.order(seed, epoch)
            # Within the lock: no thread has an order that the next one's has already replaced.
            return _Step(seed, number, self._seeds.of_step(order, at))

    def _made(self, seed: int, number: int) -> Batch | None:
        step = self._step(seed, number)
        return self._drawn(step, self._seeds_of(step))

    def _seeds_of(self, step: _Step) -> Vector:
        """Return the seeds around which this rank draws."""
        return step.seeds if self._places[0].share is not None else self._seeds.of_rank(step.seeds, self._rank)

    def _halves(self, step: _Step, seeds: Vector, *, last: bool) -> Iterator[Batch]:
        """Yield the parts of a step whose seeds on this rank are too many for what was planned."""
        if seeds.size < 2:
            what = "vertex" if self._links is None else "link"
            raise PlanError(
                f"the neighbourhood of {what} {seeds[0]} alone is larger than a batch was planned to be; set smaller "
                "fan-outs or sample.plan = bound"
            )
        middle = seeds.size // 2
        for part, ends in ((seeds[:middle], False), (seeds[middle:], last)):
            batch = self._drawn(step, part)
            if batch is None:
                yield from self._halves(step, part, last=ends)
            else:
                yield dataclasses.replace(batch, last=ends)

    def _drawn(self, step: _Step, seeds: Vector) -> Batch | None:
        """Draw and gather the batch of some seeds in the place that this step alone uses; None if it is too large."""
        place = self._places[step.number % len(self._places)]
        while place.reads:
            place.reads.pop().synchronize()
        pairs = left_out = None
        if self._links is not None:
            seeds, pairs = self._links.of_seeds(step.seed, step.number, step.seeds, seeds)
            left_out = self._links.left_out(step.seeds)
        try:
            drawn = self._sampler.draw(place.slot, seeds, step.seed, step.number % 2**32, left_out)
        except BatchTooLargeError:
            return None
        edges = {block: self._edges(drawn, hop, place) for hop, block in enumerate(reversed(self.stack.blocks))}
        rows = {name: drawn.ids[:size] for name, size in zip(self._row_sets, drawn.sizes, strict=True)}
        scales: Mapping[RowSet, Scales] | None = None
        norm = "none" if self._norm is None else self._norm.norm
        if self._values.sample.weights == "block" and norm != "none":
            scales = {name: self._of_block(name, edges, ids.size, norm) for name, ids in rows.items()}
        batch = Batch(rows=rows, edges=edges, seeds=step.seeds, scales=scales, pairs=pairs, reads=place.reads)
        if place.share is not None:
            try:
                batch = part_of(place.share, batch, self._ranks_of(place.share, drawn.ids, seeds), self.stack)
            except BatchTooLargeError:
                return None
        ids = batch.rows[self.stack.blocks[0].sources]
        features, sums = (None if m is None else m.gather(ids) for m in (place.features, place.sums))
        normed = batch.scales or self._scales(batch.rows, ids, place)
        batch = dataclasses.replace(batch, features=features, sums=sums, scales=normed)
        if self._keep:
            return batch.copy()
        return batch if place.packed is None else place.packed.write(batch, drawn_here=True)

    def _ranks_of(self, share: Share, ids: Vector, seeds: Vector) -> Vector:
        """Return the rank of each row of a batch that ranks share: its owner, of a seed the one to which it is dealt."""
        assert self._owner is not None
        of_row = np.take(self._owner, ids, out=share.arrays["of_row"][: ids.size], mode="clip")
        of_row[: seeds.size] = self._seeds.ranks_of(seeds)
        return of_row

    @property
    def _row_sets(self) -> list[RowSet]:
        """The row sets, that of the seeds first."""
        return [*(block.targets for block in reversed(self.stack.blocks)), self.stack.blocks[0].sources]

    def _edges(self, drawn: Drawn, number: int, place: _Place) -> BlockEdges:
        hop, back = drawn.hops[number], None
        types = types_t = None
        ordered: tuple[RelationEdges, ...] = ()
        ordered_t: tuple[RelationEdges, ...] = ()
        values = place.values[number][: hop.indices.size] if self._values.needed else None
        plain = self._values.relations is None and hop.transposed is not None
        if values is not None:
            targets = drawn.ids[: drawn.sizes[number]]
            self._values.write(targets, hop, values, place.values_t[number] if plain else None)
            if self._values.relations is not None:
                types = place.relations[number].types[: values.size]
                self._values.relations.write(targets, hop, values, types, place.by_type)
                # Of a shared batch, edges are dealt first.
                if place.share is None:
                    ordered = place.relations[number].of(hop.indptr, hop.indices, values)
        if hop.transposed is not None:
            indptr_t, indices_t, order = hop.transposed
            values_t = None
            if values is not None:
                values_t = place.values_t[number][: order.size]
                if not plain:
                    in_order(values, order, values_t)
            if types is not None:
                types_t = place.relations_t[number].types[: order.size]
                for start in range(0, order.size, TAKEN):  # NumPy converts places to 64 bits
                    some = slice(start, start + TAKEN)
                    np.take(types, order[some], out=types_t[some], mode="clip")
                if place.share is None:
                    ordered_t = place.relations_t[number].of(indptr_t, indices_t, values_t)
            back = BlockEdges(indptr_t, indices_t, values_t, types=types_t, relations=ordered_t)
        return BlockEdges(hop.indptr, hop.indices, values, back, types, relations=ordered)

    def _scales(self, rows: Mapping[RowSet, Vector], ids: Vector, place: _Place) -> dict[RowSet, Scales]:
        """Return S_r and S_c of the whole graph for every row set; ids: of the input's rows, with which they all begin."""
        if self._norm is None:
            return dict.fromkeys(rows, (None, None))
        both = self._norm.of(ids, place.scales)
        row, col = ({name: None if s is None else s[: mine.size] for name, mine in rows.items()} for s in both)
        return {name: (row[name], col[name]) for name in rows}

    def _of_block(self, name: RowSet, edges: Any, size: int, norm: str) -> Scales:
        """S_r by the in-degrees of a block's targets, S_c by the out-degrees of its sources."""
        ones = np.ones(size)
        into = next((np.diff(e.indptr) for block, e in edges.items() if block.targets == name), ones)
        counts = (np.bincount(e.indices, minlength=size) for block, e in edges.items() if block.sources == name)
        out_of = next(counts, ones)
        row, col = scales(into.astype(np.float64), norm)[0], scales(out_of.astype(np.float64), norm)[1]
        return row.astype(self._values.real), None if col is None else col.astype(self._values.real)
