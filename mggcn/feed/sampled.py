"""The feed of sampled training: seeds of a step, what is drawn around them, what that counts, and the rows that it reads.

T targets, S sources, E edges of a block; D features. Batches are drawn and gathered by threads beside the step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import RowSet, Stack
from mggcn.blocks.drawn_rows import ReadyEdges
from mggcn.blocks.relation_order import RelationEdges
from mggcn.blocks.sampler import BatchTooLargeError, Drawn, Sampler
from mggcn.blocks.shared import Share
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges, Scales
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.gather import StoredFeatures
from mggcn.feed.history import RemoteRows
from mggcn.feed.memory import BatchMemory, BatchMemoryPlan
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.relays import Relays
from mggcn.feed.seeds import RankSeeds, Step
from mggcn.feed.shared import in_order, part_of, types_in_order
from mggcn.feed.waves import Waves
from mggcn.partition.rows.tiles import scales

Vector = npt.NDArray[Any]


class SampledFeed:
    """Batches of training vertices with what is drawn of their neighbourhoods, of one rank.

    ahead: batches that are made beside the step, also the first ones of the next epoch: whatever runs between two epochs,
    these wait. epochs: how many there are, None if that is not known. keep: whether batches stay valid, for which the
    threads copy them. relays: has the rows of other ranks here that batches read, and edges, where owners draw
    these, ready for `sampler`; None: all rows are read where they lie.
    Memory: ahead + 1 places, and the order of two epochs, as planning/batches.py counts them.
    """

    def __init__(
        self,
        sampler: Sampler | ReadyEdges,
        seeds: RankSeeds,
        plan: BatchMemoryPlan,
        ahead: int,
        *,
        epochs: int | None = None,
        keep: bool = False,
        relays: Relays | Waves | None = None,
    ) -> None:
        self.stack: Stack = plan.stack
        self.num_steps: int = seeds.num_steps
        self._sampler, self._seeds, self._ahead, self._keep = sampler, seeds, ahead, keep
        self._relays = relays
        self._values: EdgeValues = plan.values
        self._norm: NormScales | None = plan.norm
        self._remote: RemoteRows | None = plan.remote
        self._stored: StoredFeatures | None = plan.stored
        self._threads = ThreadPoolExecutor(ahead, "mggcn-feed") if ahead else None
        self._waiting: deque[tuple[tuple[int, int], Future[Batch | None]]] = deque()
        """Batches on their way, by seed and number of the step, in the order of the steps."""
        self._end = None if epochs is None else epochs * self.num_steps
        self._places = [plan.make(seeds.rank) for _ in range(ahead + 1)]

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
                    whole = self._seeds.step(seed, step)
                    yield from self._halves(whole, self._seeds.own(whole), last=True)
                else:
                    yield batch
        finally:
            if at + 1 < self.num_steps:  # the loop was left, so that another step than the next one follows
                self._drop()

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return {} if self._relays is None else self._relays.counts(seed, number)

    def halt(self) -> None:
        self._drop()
        if self._relays is not None:
            self._relays.halt()

    def _next(self, seed: int, step: int) -> Batch | None:
        """Return the batch of a step, None if it is too large, and have those behind it drawn."""
        end = step + self._ahead + 1
        end = end if self._end is None else max(min(end, self._end), step + 1)
        if self._waiting and self._waiting[0][0] != (seed, step):
            self._drop()
        if self._relays is not None:
            self._relays.fetch(seed, step, end)
        if self._threads is None:
            return self._made(seed, step)
        for further in range(step + len(self._waiting), end):
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

    def _made(self, seed: int, number: int) -> Batch | None:
        step = self._seeds.step(seed, number)
        return self._drawn(step, self._seeds.own(step))

    def _halves(self, step: Step, seeds: Vector, *, last: bool) -> Iterator[Batch]:
        """Yield the parts of a step whose seeds on this rank are too many for what was planned."""
        first, second = self._seeds.halves(seeds)
        for part, ends in ((first, False), (second, last)):
            batch = self._drawn(step, part)
            if batch is None:
                yield from self._halves(step, part, last=ends)
            else:
                yield dataclasses.replace(batch, last=ends)

    def _drawn(self, step: Step, seeds: Vector) -> Batch | None:
        """Draw and gather the batch of some seeds in the place that this step alone uses; None if it is too large."""
        place = self._places[step.number % len(self._places)]
        while place.reads:
            place.reads.pop().synchronize()
        try:
            batch = self._gathered(step, self._blocks(step, seeds, place), place)
        except BatchTooLargeError:
            return None
        if self._keep:
            return batch.copy()
        return batch if place.packed is None else place.packed.write(batch, drawn_here=True)

    def _blocks(self, step: Step, seeds: Vector, place: BatchMemory) -> Batch:
        """Return rows and edges of a batch, of this rank's part where ranks share it. Raises: BatchTooLargeError."""
        seeds, pairs, left_out = self._seeds.around(step, seeds)
        drawn = self._sampler.draw(place.slot, seeds, step.seed, step.number % 2**32, left_out)
        edges = {block: self._edges(drawn, hop, place) for hop, block in enumerate(reversed(self.stack.blocks))}
        rows = {name: drawn.ids[:size] for name, size in zip(self._row_sets, drawn.sizes, strict=True)}
        scales: Mapping[RowSet, Scales] | None = None
        norm = "none" if self._norm is None else self._norm.norm
        if self._values.sample.weights == "block" and norm != "none":
            scales = {name: self._of_block(name, edges, ids.size, norm) for name, ids in rows.items()}
        batch = Batch(rows=rows, edges=edges, seeds=step.seeds, scales=scales, pairs=pairs, reads=place.reads)
        if place.share is None:
            return batch
        return part_of(place.share, batch, self._ranks_of(place.share, drawn.ids, seeds), self.stack, place.parts)

    def _gathered(self, step: Step, batch: Batch, place: BatchMemory) -> Batch:
        """Return a batch with the features of its rows, and what these are scaled by. Raises: BatchTooLargeError."""
        inputs = self.stack.blocks[0].sources
        ids = read = batch.rows[inputs]
        if self._remote is not None and place.remote is not None:
            sources = [batch.rows[block.sources].size for block in self.stack.blocks]
            halo = self._remote.of(ids, batch.rows[self.stack.seeds].size, step, sources, place.remote)
            batch = dataclasses.replace(batch, halo=halo)
            read = self._remote.gathered(ids, halo[self.stack.blocks[0]], place.remote)
        normed = batch.scales or self._scales(batch.rows, ids, place)
        features, sums = (None if m is None else m.gather(read) for m in (place.features, place.sums))
        sparse = {} if place.sparse is None else place.sparse.gather(batch.rows, normed[inputs][1])
        if self._stored is not None:
            self._stored.prepare(ids, batch.edges[self.stack.blocks[0]].indices)
            batch = dataclasses.replace(batch, stored=self._stored.rows.shape[0])
        return dataclasses.replace(batch, features=features, sparse=sparse, sums=sums, scales=normed)

    def _ranks_of(self, share: Share, ids: Vector, seeds: Vector) -> Vector:
        """Return the rank of each row of a batch that ranks share: its owner, of a seed the one to which it is dealt."""
        dealt = self._seeds.all
        if dealt.owner is None:
            raise PlanError("ranks share a batch, and nothing says whose its rows are")
        of_row = np.take(dealt.owner, ids, out=share.arrays["of_row"][: ids.size], mode="clip")
        of_row[: seeds.size] = dealt.ranks_of(seeds)
        return of_row

    @property
    def _row_sets(self) -> list[RowSet]:
        """The row sets, that of the seeds first."""
        return [*(block.targets for block in reversed(self.stack.blocks)), self.stack.blocks[0].sources]

    def _edges(self, drawn: Drawn, number: int, place: BatchMemory) -> BlockEdges:
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
                types = place.types[number][: values.size]
                self._values.relations.write(targets, hop, values, types, place.by_type)
                # Of a shared batch, edges are dealt first.
                if place.share is None:
                    ordered = place.orders[number].of(hop.indptr, hop.indices, values)
        if hop.transposed is not None:
            indptr_t, indices_t, order = hop.transposed
            values_t = None
            if values is not None:
                values_t = place.values_t[number][: order.size]
                if not plain:
                    in_order(values, order, values_t)
            if types is not None:
                types_t = types_in_order(types, order, place.types_t[number][: order.size])
                if place.share is None:
                    ordered_t = place.orders_t[number].of(indptr_t, indices_t, values_t)
            back = BlockEdges(indptr_t, indices_t, values_t, types=types_t, relations=ordered_t)
        return BlockEdges(hop.indptr, hop.indices, values, back, types, relations=ordered)

    def _scales(self, rows: Mapping[RowSet, Vector], ids: Vector, place: BatchMemory) -> dict[RowSet, Scales]:
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
