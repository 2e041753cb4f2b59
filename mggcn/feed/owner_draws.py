"""What ranks that hold the edges of their own vertices alone ask each other for batches, and answer: two letters a hop, ids
and drawn edges, then two for features, ids and rows.

T targets, E edges of a hop; P ranks, B batches of a macrobatch. Source: DistDGL (Zheng et al., IA3 2020), figure 6; without
servers, because all ranks take every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn.blocks.drawn_rows import REMEDY, HopEdges, Numbering, ReadyEdges, RowDraws, StepEdges, merged
from mggcn.blocks.letters import AnswerPlan, Letter, Words, num_stages, packed
from mggcn.blocks.macrobatch import COUNTS, PART_COUNTS
from mggcn.blocks.sampler import DrawnHop
from mggcn.errors import PlanError
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.fetched import REMOTE, OwnerRows
from mggcn.feed.seeds import RankSeeds, Step

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Letters: TypeAlias = Generator[list[Words], list[Words], npt.NDArray[np.int64]]
"""Gives the letters of a rank to each other one and takes theirs, in turn; returns counts of all ranks."""


class _Told(NamedTuple):
    """What an owner tells of some vertices: edges of each, other ends, degrees; what edges count, and their types."""

    lengths: Array
    columns: Array
    degrees: Array | None
    values: Array | None
    types: Array | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerDraws:
    """Draws the batches of a rank with all others. Of one thread.

    draws: around own vertices, whose edges the rank holds; values: what edges of these count; seeds: of this object alone;
    owner uint16 (N,): the rank of each vertex; room: the most edges that a step may have in each hop on a rank; rows:
    features; ready: takes the edges of the steps.
    """

    draws: RowDraws
    numbering: Numbering
    values: EdgeValues
    plan: AnswerPlan
    seeds: RankSeeds
    owner: npt.NDArray[np.uint16]
    rank: int
    ranks: int
    room: tuple[int, ...]
    rows: OwnerRows
    ready: ReadyEdges

    @property
    def stages(self) -> int:
        """Letters that follow each other."""
        return num_stages(len(self.room))

    def letters(self, seed: int, number: int, span: range) -> Letters:
        """Draw the batches of the steps in `span`, macrobatch `number`, and fetch the rows of their inputs.

        Edges are ready, and rows kept, when it ends. Collective.
        """
        steps = [self.seeds.step(seed, at) for at in span]
        around = [self.seeds.around(step, self.seeds.own(step)) for step in steps]
        edges = [StepEdges(ids=vertices, num_seeds=vertices.size) for vertices, _, _ in around]
        left_out = [keys for _, _, keys in around]
        counts = np.zeros(PART_COUNTS, np.int64)
        for hop, room in enumerate(self.room):
            orders = [self._order(step.ids) for step in edges]
            requests = yield [self._request(edges, orders, rank) for rank in range(self.ranks)]
            answers = yield [self._answer(hop, steps, left_out, letter) for letter in requests]
            read = [Letter(answer) for answer in answers]
            for step, order in zip(edges, orders, strict=True):
                self._extend(step, order, read, counts, room)
        total = yield from self._fetch(number, edges, counts)
        for named, drawn in zip(steps, edges, strict=True):
            self.ready.put(named.seed, named.number % 2**32, drawn)
        return total

    def _order(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return places of vertices by owner, and how many each has (P,)."""
        owners = self.owner[ids]
        return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self.ranks)

    def _request(self, edges: Sequence[StepEdges], orders: Sequence[tuple[Ids, Ids]], rank: int) -> Words:
        """Return how many vertices of a rank each step asks for, and which."""
        counts, ids = [], []
        for step, (order, by_rank) in zip(edges, orders, strict=True):
            first = int(by_rank[:rank].sum())
            counts.append(int(by_rank[rank]))
            ids.append(step.ids[order[first : first + counts[-1]]])
        return packed(np.concatenate([counts, *ids]).astype(np.int32))

    def _answer(self, hop: int, steps: Sequence[Step], left_out: Sequence[Ids | None], request: Words) -> Words:
        """Return what is drawn around the vertices of a request."""
        asked, at, parts = request.view(np.int32), len(steps), list[Array]()
        for step, keys, count in zip(steps, left_out, asked[: len(steps)].tolist(), strict=True):
            ids = asked[at : at + count].astype(np.int64)
            at += count
            found = [self._piece(*piece) for piece in self.draws.pieces(hop, ids, step.seed, step.number % 2**32, keys)]
            # Nothing was asked for: nothing is told, and that takes no words.
            parts += [np.concatenate(of) for of in zip(*found, strict=True)]
        return packed(*parts)

    def _piece(self, ids: Ids, hop: DrawnHop) -> Iterator[Array]:
        """Return, in memory of its own, what an answer says of some vertices: counts and ids of edges, and what else is
        planned.
        """
        counts = np.diff(hop.indptr).astype(np.int32)
        parts = [counts, hop.indices.copy()]
        if self.plan.degrees:
            parts.append(hop.degrees.copy())
        if self.plan.value_bytes:
            parts += self._counted(ids, hop, counts)
        return iter(parts)

    def _counted(self, ids: Ids, hop: DrawnHop, counts: Array) -> list[Array]:
        """Return what edges count, and their types where these are told."""
        # A vertex's own entry is known by its number: a target's is its place.
        targets = np.repeat(np.arange(ids.size, dtype=np.int32), counts)
        numbered = np.where(hop.indices == ids[targets], targets, np.int32(-1))
        hop = dataclasses.replace(hop, indices=numbered)
        values = np.empty(hop.indices.size, self.values.real)
        self.values.write(ids, hop, values)
        means = self.values.relations
        if means is None:
            return [values]
        types = np.empty(values.size, means.dtype)
        means.write(ids, hop, values, types, np.zeros(means.num_relations))
        return [values, types]

    def _extend(
        self, step: StepEdges, order: tuple[Ids, Ids], answers: Sequence[Letter], counts: Ids, room: int
    ) -> None:
        """Add a hop to a step's edges, in the order of its targets."""
        places, by_rank = order
        parts = [self._told(letter, int(count)) for letter, count in zip(answers, by_rank, strict=True)]
        own = self.rank
        told = [part.columns.size for part in parts]
        counts[COUNTS:] += np.array([by_rank[own], by_rank.sum() - by_rank[own], sum(told) - told[own]])
        if sum(told) > room:
            raise PlanError(f"a step draws more than the {room:,} edges of a hop on a rank that were planned; {REMEDY}")
        indptr, take = merged(places, np.concatenate([part.lengths for part in parts]))
        indices = np.concatenate([part.columns for part in parts])[take]
        degrees = _joined([part.degrees for part in parts])
        values, types = _joined([part.values for part in parts]), _joined([part.types for part in parts])
        if degrees is not None:
            degrees[places] = degrees.copy()
        counted, kinds = (None if part is None else part[take] for part in (values, types))
        step.ids = self.numbering.extend(np.ascontiguousarray(step.ids), indices)
        step.hops.append(HopEdges(indptr=indptr, indices=indices, degrees=degrees, values=counted, types=kinds))

    def _told(self, letter: Letter, count: int) -> _Told:
        """Return what an owner tells of so many vertices."""
        plan, means = self.plan, self.values.relations
        lengths = letter.take(np.int32, count)
        total = int(lengths.sum())
        columns = letter.take(np.int32, total)
        degrees = letter.take(np.int32, count) if plan.degrees else None
        values = letter.take(self.values.real, total) if plan.value_bytes else None
        types = None if means is None or not plan.type_bytes else letter.take(means.dtype, total)
        return _Told(lengths, columns, degrees, values, types)

    def _fetch(self, number: int, edges: Sequence[StepEdges], counts: Ids) -> Letters:
        """Fetch the rows of the steps' inputs, each once; return the counts of all ranks."""
        rows = self.rows
        needed = [step.ids[rows.whose[step.ids] == REMOTE] for step in edges]
        for step in edges:
            counts[: REMOTE + 1] += np.bincount(rows.whose[step.ids], minlength=REMOTE + 1)
        ids = rows.by_owner(np.unique(np.concatenate(needed)))
        counts[REMOTE + 1] = sum(some.size for some in ids)
        requests = yield [packed(counts, np.append(some.size, some).astype(np.int32)) for some in ids]
        total: Ids = np.sum([request[:PART_COUNTS] for request in requests], axis=0)
        wanted = list[Ids]()
        for request in requests:
            asked = request[PART_COUNTS:].view(np.int32)
            wanted.append(asked[1 : 1 + int(asked[0])].astype(np.int64))
        given = yield [packed(rows.give(some)) for some in wanted]
        size = rows.plan.row_bytes
        keep = [letter.view(np.uint8)[: size * some.size] for letter, some in zip(given, ids, strict=True)]
        rows.keep(number % rows.plan.at_once, ids, keep)
        return total


def _joined(parts: Sequence[Array | None]) -> Array | None:
    """Return what all owners tell, one behind the other; None if they do not."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None
