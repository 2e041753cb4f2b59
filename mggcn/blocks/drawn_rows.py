"""Batches whose edges several ranks have drawn, each around the vertices that it owns: drawn by row, put together, read.

Draws are named by (seed, step, hop, vertex), so the edges of a vertex are the same whoever draws them, and a batch that is
put together from them in the order of its targets is that of a rank which draws it alone. T targets, S sources, E edges of
a hop. Hops count from the seeds outwards. Source: DistDGL's samplers (Zheng et al., IA3 2020), which answer for the
vertices of their machine.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.block import Capacity
from mggcn.blocks.draws import ALL, Draws
from mggcn.blocks.sampler import (
    BatchTooLargeError,
    Drawn,
    DrawnHop,
    Sampler,
    Status,
    hop_views,
    refuse_size,
    run_hops,
)
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.errors import GraphError, PlanError

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
REMEDY: Final = "set sample.plan = bound, smaller fan-outs or a smaller sample.batch"
ROWS_AT_ONCE: Final = 512
"""Vertices around which edges are drawn at a time: what lies between memory takes some hundred KiB."""


def row_slots(draws: Draws, num_vertices: int, *, places: bool) -> SlotPlan:
    """Return what drawing around ROWS_AT_ONCE vertices takes, and their fan-outs name, or 16 edges of each."""
    most = [draws.most(hop) or 0 for hop in range(len(draws.fanouts))]
    room = Capacity(ROWS_AT_ONCE, ROWS_AT_ONCE, ROWS_AT_ONCE * (1 + max(*most, 16)))
    return SlotPlan(
        draws=draws,
        capacities=(room,) * len(most),
        num_vertices=num_vertices,
        places=places,
        transposed=0,
        table="hashed",
    )


class RowDraws:
    """Draws around any vertices whose in-edges the sampler's graph has, one hop at a time, in memory of its own.

    Memory: `row_slots`; where fan-outs do not bound a row, as much as the longest ones that were asked for take.
    """

    def __init__(self, sampler: Sampler, plan: SlotPlan) -> None:
        self._sampler, self._slot = sampler, Slot(plan)

    def pieces(self, hop: int, ids: Ids, seed: int, step: int, left_out: Ids | None) -> Iterator[tuple[Ids, DrawnHop]]:
        """Yield some vertices at a time and their drawn in-edges, whose columns are ids, each valid until the next one.

        Raises: as Sampler.draw.
        """
        for start in range(0, ids.size, ROWS_AT_ONCE):
            some = ids[start : start + ROWS_AT_ONCE]
            yield some, self._drawn(hop, some, seed, step, left_out)

    def _drawn(self, hop: int, ids: Ids, seed: int, step: int, left_out: Ids | None) -> DrawnHop:
        while True:
            try:
                return self._sampler.draw_rows(self._slot, hop, ids, seed, step, left_out)
            except BatchTooLargeError as error:  # of edges alone: draws without a bound, or repeated self-loops
                more = dataclasses.replace(self._slot.plan.capacities[0], edges=2 * error.capacity)
                plan = self._slot.plan
                self._slot = Slot(dataclasses.replace(plan, capacities=(more,) * len(plan.capacities)))


@dataclass(frozen=True, kw_only=True, slots=True)
class HopEdges:
    """A hop's drawn edges: indptr int64 (T + 1,), indices int32 (E,), numbers of sources; and what their owners have told:
    degrees int32 (T,), values (E,), what each counts, and its type (E,); None of each that nobody reads.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    degrees: Array | None = None
    values: Array | None = None
    types: Array | None = None


@dataclass(slots=True)
class StepEdges:
    """The edges of a step on one rank, hop after hop. ids int64: its vertices in order of first occurrence, the num_seeds
    seeds, ascending, first.
    """

    ids: Ids
    num_seeds: int
    hops: list[HopEdges] = field(default_factory=list)


class Numbering:
    """Numbers the vertices of hops as the sampler does. Memory: ids and a table, of a step with at most `room` vertices."""

    def __init__(self, num_vertices: int, room: int) -> None:
        self._slot = Slot(numbering_slots(num_vertices, room))
        self._room = room

    def extend(self, targets: Ids, columns: npt.NDArray[np.int32]) -> Ids:
        """Turn the ids of a hop's edges into numbers, in place; return the vertices, targets first, new ones behind them.

        Raises: PlanError for more than there is room for; GraphError for an id that is no vertex.
        """
        frontier = self._slot.frontier
        if targets.size > self._room:
            self._refuse()
        native.kernel("mggcn_number_columns")(
            ctypes.addressof(frontier), targets.ctypes.data, targets.size, columns.ctypes.data, columns.size, self._room
        )
        if frontier.status == Status.SOURCES:
            self._refuse()
        if frontier.status != Status.DONE:
            raise GraphError(
                f"vertex ids of drawn edges must lie in [0, {frontier.num_vertices}), one is {frontier.at}; the store of "
                "another rank is damaged: copy or prepare it again"
            )
        return self._slot.arrays["ids"][: frontier.rows].copy()

    def _refuse(self) -> NoReturn:
        raise PlanError(f"a step draws more than the {self._room:,} vertices on a rank that were planned; {REMEDY}")


def numbering_slots(num_vertices: int, room: int) -> SlotPlan:
    """Return what numbering takes."""
    size = Capacity(room, room, 0)
    return SlotPlan(draws=Draws(fanouts=(ALL,)), capacities=(size,), num_vertices=num_vertices, transposed=0)


def merged(order: Ids, counts: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], Ids]:
    """Return row pointers (T + 1,) of rows that came in another order, and where each of their edges is (E,) among those
    that came.

    order (T,): the target that each row is of; counts (T,): its edges. Cost: two passes over the edges.
    """
    of_target, first = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    of_target[order], first[order] = counts, np.cumsum(counts, dtype=np.int64) - counts
    indptr = np.zeros(order.size + 1, np.int64)
    np.cumsum(of_target, out=indptr[1:])
    take = np.repeat(first - indptr[:-1], of_target)
    take += np.arange(take.size)
    return indptr, take


def read_slots(plan: SlotPlan, *, places: bool) -> SlotPlan:
    """Return what the memory of a batch depends on whose edges lie ready: all of them are taken. places: whether owners
    have told more of an edge than where it ends.
    """
    draws = Draws(fanouts=(ALL,) * len(plan.draws.fanouts))
    return dataclasses.replace(plan, draws=draws, places=places)


class ReadyEdges:
    """The drawn edges of steps to come, from which threads read batches as a Sampler draws them.

    A batch of some of a step's seeds has the edges that a sampler would draw around them, in its order.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], StepEdges] = {}

    def put(self, seed: int, step: int, edges: StepEdges) -> None:
        """Have the edges of a step ready, which is named as for `draw`."""
        self._steps[seed, step] = edges

    def forget(self, seed: int, first: int) -> None:
        """Forget the steps before `first`, and those of other seeds."""
        for key in list(self._steps):
            if key[0] != seed or key[1] < first:
                del self._steps[key]

    def draw(self, slot: Slot, seeds: Ids, seed: int, step: int, left_out: Ids | None = None) -> Drawn:
        """Read the batch of seeds of a step into a slot of `read_slots`, as Sampler.draw; left_out was heeded by owners.

        Raises: BatchTooLargeError.
        """
        edges = self._steps[seed, step]
        if seeds.size > slot.plan.capacities[0].targets:
            raise BatchTooLargeError(0, "seeds", slot.plan.capacities[0].targets)
        numbers = np.searchsorted(edges.ids[: edges.num_seeds], seeds)
        for args, hop in zip(slot.hops, edges.hops, strict=True):
            args.indptr, args.indices = hop.indptr.ctypes.data, hop.indices.ctypes.data
            args.num_edges = hop.indices.size
        run_hops(slot, numbers)
        for at, args in enumerate(slot.hops):
            refuse_size(at, args)
        sizes = (seeds.size, *(args.sources for args in slot.hops))
        of = slot.arrays["ids"][: sizes[-1]]
        hops = [self._told(hop_views(slot, at, slot.hops[at]), hop, of) for at, hop in enumerate(edges.hops)]
        of[:] = edges.ids[of]
        return Drawn(of, sizes, tuple(hops))

    def _told(self, hop: DrawnHop, edges: HopEdges, numbers: Ids) -> DrawnHop:
        """Return a hop with what its owners have told. numbers: of the batch's vertices."""
        if edges.degrees is not None:
            np.take(edges.degrees, numbers[: hop.degrees.size], out=hop.degrees, mode="clip")
        values, types = (None if told is None else told[hop.places] for told in (edges.values, edges.types))
        return dataclasses.replace(hop, counted=values, types=types)
