"""The neighbour sampler: from seeds to the rows and edges of a batch, on one thread of the host.

Every draw is named by (seed, step, hop, vertex): neither other seeds, nor threads or ranks change what a vertex draws.
N vertices of the graph, T targets, S sources, E edges of a hop. Hops count from the seeds outwards.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.draws import Draws
from mggcn.blocks.slot import SampleArgs, Slot
from mggcn.errors import ConfigError, GraphError, PlanError
from mggcn.graph.csr import CSR

DAMAGED: Final = "the matrix is damaged: copy or prepare it again"


class BatchTooLargeError(PlanError):
    """A batch has more rows or edges than its slot has room for: half of its seeds may fit.

    hop: of which hop; what: "seeds", "sources" or "edges"; capacity: how many were planned.
    """

    def __init__(self, hop: int, what: str, capacity: int) -> None:
        super().__init__(hop, what, capacity)
        self.hop: int = hop
        self.what: str = what
        self.capacity: int = capacity

    def __str__(self) -> str:
        return (
            f"hop {self.hop} of a batch has more than the {self.capacity} {self.what} that were planned; "
            "draw half of its seeds at a time or plan more"
        )


class _Mode(IntEnum):
    """`Mode` of cpu/sample_rows.h."""

    UNIFORM, REPLACE, WEIGHT, LABOR, LABOR_ONE = range(5)


class Status(IntEnum):
    """`Status` of cpu/frontier.h."""

    DONE, SOURCES, EDGES, SEED, TWICE, POINTERS, COLUMN, WEIGHT, TYPE = range(9)


class Transposed(NamedTuple):
    """The out-edges of each source: indptr_t int64 (S + 1,), indices_t int32 (E,), targets, ascending in a row.

    order int32 (E,): the place of each entry among those of the hop.
    """

    indptr_t: npt.NDArray[np.int64]
    indices_t: npt.NDArray[np.int32]
    order: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnHop:
    """The drawn in-edges of each target, in the order of the graph's: views of the slot.

    indptr int64 (T + 1,); indices int32 (E,), places among the sources; values float32 (E,): counts with replacement; for
    LABOR one over the chance to be drawn, times the row's edges over those that were not left out; drawn by weight, the
    weight of an edge where all of its row (and type) were taken, else 1; None for uniform draws;
    places int64 (E,): of the edge among the graph's, -1 for an own entry that the graph lacks; None unless the slot's plan
    asks for it. transposed: None unless the plan asks for it.
    degrees int32 (T,): in-edges of each target in the graph, without its own entries where every row has one.
    counted, types (E,): what each edge counts, and its type, where ranks that hold the edges have said so; else None.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32] | None
    places: npt.NDArray[np.int64] | None
    transposed: Transposed | None
    degrees: npt.NDArray[np.int32]
    counted: npt.NDArray[Any] | None = None
    types: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch, in the memory of its slot. The rows of every level are the first of `ids`, int64.

    sizes: number of seeds, then of the sources of each hop; hops: the one at the seeds first.
    """

    ids: npt.NDArray[np.int64]
    sizes: tuple[int, ...]
    hops: tuple[DrawnHop, ...]


def edge_keys(targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return pairs of vertices as `Sampler.draw` takes edges to be left out: target 2^32 + source, ascending."""
    return np.sort(targets.astype(np.int64) << 32 | sources.astype(np.int64))


class Sampler:
    """Draws batches from a graph's in-edges, which it reads in place. Threads may draw at once, each into its own slot.

    adj_t: row v has the in-neighbours of v. self_loops: every row has an entry of its own, or all
    stored ones if there are any, which are never drawn nor counted in the fan-out. owner uint16 (N,), rank: where they are
    given, neighbours are drawn of seeds and of the rank's own vertices alone; others are leaves, in every hop.
    Raises: ConfigError if edges lack the weights or types that are drawn by.
    """

    def __init__(
        self,
        adj_t: CSR,
        draws: Draws,
        *,
        self_loops: bool = False,
        owner: npt.NDArray[np.uint16] | None = None,
        rank: int = 0,
    ) -> None:
        self.draws: Draws = draws
        self.self_loops: bool = self_loops
        self._owner, self._rank = owner, rank
        self.num_vertices: int = adj_t.num_rows
        self._indptr, self._indices = adj_t.indptr.array(), adj_t.indices.array()
        self._weights = None if adj_t.values is None or draws.by != "weight" else adj_t.values.array()
        by_type = any(isinstance(fanout, tuple) for fanout in draws.fanouts)
        self._types = None if adj_t.types is None or not by_type else adj_t.types.array()
        if draws.by == "weight" and self._weights is None:
            raise ConfigError("drawing by weight needs a graph with weights, and this one has none; draw uniformly")
        if by_type and self._types is None:
            raise ConfigError(
                "fan-outs by type need a graph with types of edges, and this one has none; give one number"
            )

    def draw(
        self,
        slot: Slot,
        seeds: npt.NDArray[np.int64],
        seed: int,
        step: int,
        left_out: npt.NDArray[np.int64] | None = None,
    ) -> Drawn:
        """Draw the batch of these seeds, distinct vertices, into a slot whose plan has the same draws; seed, step < 2^32.

        left_out: `edge_keys` of edges that are never drawn, whatever their type.
        Cost: a line or two of memory an edge, and for LABOR, weights and types a pass over the targets' rows; no allocation
        but of views. Raises: BatchTooLargeError; ConfigError for seeds that are no vertices or repeat, or keys that do not
        ascend; GraphError for a graph that is damaged, or has a weight that is negative or not finite.
        """
        plan, frontier = slot.plan, slot.frontier
        if plan.draws != self.draws or plan.num_vertices != self.num_vertices:
            raise ConfigError("the slot was planned for other draws or another graph; make one from this sampler's")
        if seeds.size > plan.capacities[0].targets:
            raise BatchTooLargeError(0, "seeds", plan.capacities[0].targets)
        if left_out is not None and (np.diff(left_out) < 0).any():
            raise ConfigError(
                "edges to be left out must ascend by target, then by source; make their keys with edge_keys"
            )
        seeds = np.ascontiguousarray(seeds, np.int64)
        keys = None if left_out is None else np.ascontiguousarray(left_out, np.int64)
        self._aim(slot, seeds.size, keys, seed, step)
        run_hops(slot, seeds)
        if frontier.status in (Status.SEED, Status.TWICE):
            self._refuse_seed(int(seeds[frontier.at]), frontier.status)
        sizes, hops = [seeds.size], list[DrawnHop]()
        for hop, args in enumerate(slot.hops):
            if args.status != Status.DONE:
                self._refuse(hop, args)
            hops.append(hop_views(slot, hop, args))
            sizes.append(args.sources)
        return Drawn(slot.arrays["ids"][: sizes[-1]], tuple(sizes), tuple(hops))

    def looked_at(self, drawn: Drawn) -> int:
        """Return over how many entries of the targets' rows drawing a batch passed, beside those that it drew."""
        if not self.draws.looks_at_rows:
            return 0
        targets = (drawn.ids[:size] for size in drawn.sizes[:-1])
        return sum(int((self._indptr[ids + 1] - self._indptr[ids]).sum()) for ids in targets)

    def draw_rows(
        self,
        slot: Slot,
        hop: int,
        rows: npt.NDArray[np.int64],
        seed: int,
        step: int,
        left_out: npt.NDArray[np.int64] | None = None,
    ) -> DrawnHop:
        """Draw the in-edges of vertices in one hop, whose columns are ids: nothing is numbered. Others as for `draw`.

        A slot has room for so many rows as its capacities have sources; nothing else of these counts but edges.
        Raises: GraphError, a column that is no vertex among its causes, which `draw` finds as it numbers them.
        """
        args = slot.hops[hop]
        slot.arrays["ids"][: rows.size] = rows
        self._aim(slot, rows.size, left_out, seed, step)
        args.rows = rows.size
        native.kernel("mggcn_sample_rows")(ctypes.addressof(args))
        if args.status != Status.DONE:
            self._refuse(hop, args)
        drawn = hop_views(slot, hop, args)
        for column in (drawn.indices.min(initial=0), drawn.indices.max(initial=0)):
            if not 0 <= column < self.num_vertices:
                raise GraphError(self._damaged(int(column)))
        return drawn

    def _damaged(self, column: int) -> str:
        return f"column ids must lie in [0, {self.num_vertices}), one is {column}; {DAMAGED}"

    def _aim(self, slot: Slot, num_seeds: int, left_out: npt.NDArray[np.int64] | None, seed: int, step: int) -> None:
        """Give the hops what they read, most of it once, and name their draws."""
        for hop, args in enumerate(slot.hops):
            args.seed, args.step = seed, step
            args.left_out = None if left_out is None else left_out.ctypes.data
            args.num_left_out = 0 if left_out is None else left_out.size
            args.first_leaf = num_seeds
            if slot.aimed_by is self:
                continue
            args.indptr, args.indices = self._indptr.ctypes.data, self._indices.ctypes.data
            args.num_edges = self._indices.shape[0]
            args.weights = None if self._weights is None else self._weights.ctypes.data
            types = self._types if isinstance(self.draws.fanouts[hop], tuple) else None
            args.types8 = None if types is None or types.itemsize != 1 else types.ctypes.data
            args.types16 = None if types is None or types.itemsize != 2 else types.ctypes.data
            args.self_loops = self.self_loops
            args.owner = None if self._owner is None else self._owner.ctypes.data
            args.rank = self._rank
            args.mode = _Mode.REPLACE if self.draws.replace else _Mode[self.draws.by.replace("-", "_").upper()]
        slot.aimed_by = self

    def _refuse_seed(self, vertex: int, status: int) -> NoReturn:
        """Say which seed cannot be."""
        if status == Status.TWICE:
            raise ConfigError(f"vertex {vertex} is twice among the seeds of a batch; give each vertex once")
        raise ConfigError(f"seeds must be vertices 0 .. {self.num_vertices - 1}, got {vertex}")

    def _refuse(self, hop: int, args: SampleArgs) -> NoReturn:
        """Say why a hop ended early."""
        refuse_size(hop, args)
        at = args.at
        match args.status:
            case Status.WEIGHT:
                raise GraphError(
                    f"weights that edges are drawn by must be finite and not negative, edge {at} of adj_t is not"
                )
            case Status.TYPE:
                raise GraphError(
                    f"edge {at} of adj_t has a type without a fan-out, of {args.num_types}; give one for each type of edge"
                )
            case Status.POINTERS:
                what = f"row pointers of vertex {at} must ascend within the {args.num_edges} stored entries and do not"
            case _:
                raise GraphError(self._damaged(ctypes.c_int32(at).value))
        raise GraphError(f"{what}; {DAMAGED}")


def run_hops(slot: Slot, seeds: npt.NDArray[np.int64]) -> None:
    """Draw the hops of a batch, from the matrices that they are aimed at; each says how that ended."""
    plan = slot.plan
    native.kernel("mggcn_sample_batch")(
        ctypes.addressof(slot.frontier),
        seeds.ctypes.data,
        seeds.size,
        ctypes.addressof(slot.hops),
        len(slot.hops),
        sum(map(plan.is_transposed, range(len(slot.hops)))),
    )


def refuse_size(hop: int, args: SampleArgs) -> None:
    """Raise BatchTooLargeError if a hop ended because there was no more room."""
    if args.status == Status.SOURCES:
        raise BatchTooLargeError(hop, "sources", args.max_sources)
    if args.status == Status.EDGES:
        raise BatchTooLargeError(hop, "edges", args.max_edges)


def hop_views(slot: Slot, hop: int, args: SampleArgs) -> DrawnHop:
    """Return a hop's arrays, cut to its size."""

    def cut(name: str, count: int) -> npt.NDArray[Any]:
        return slot.arrays[f"{name}{hop}"][:count]

    edges, plan = args.edges, slot.plan
    transposed = None
    if plan.is_transposed(hop):
        transposed = Transposed(cut("indptr_t", args.sources + 1), cut("indices_t", edges), cut("order", edges))
    return DrawnHop(
        indptr=cut("indptr", args.rows + 1),
        indices=cut("indices", edges),
        values=cut("values", edges) if plan.draws.has_values else None,
        places=cut("places", edges) if plan.places else None,
        transposed=transposed,
        degrees=cut("degrees", args.rows),
    )
