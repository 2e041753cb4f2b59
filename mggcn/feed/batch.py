"""Batches: the rows and edges of the blocks of one step on one rank, on the host; and the feeds that make them.

T targets, S sources, E edges of a block. Needs no torch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.backend.events import Mark
from mggcn.blocks.block import Block, Capacity, HaloRows, RowSet, Stack
from mggcn.blocks.relation_order import RelationEdges
from mggcn.errors import PlanError
from mggcn.partition.rows.tiles import Tile

if TYPE_CHECKING:
    from torch import Tensor

Scales: TypeAlias = tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]


@dataclass(frozen=True, slots=True)
class BlockEdges:
    """The in-edges of each target: indptr int64 (T + 1,), indices int32 (E,), places among the sources; values (E,), None
    if all are one. transposed: the out-edges of each source, in the order of targets; None: whoever needs them makes them.
    types: uint8 or uint16 (E,), the relation of each edge; None: the model reads none. remote: edges from rows of other
    ranks, where ranks share a batch; None: all sources are this rank's. relations: the same edges in the order of their
    types; (): whoever needs that order makes it.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    values: npt.NDArray[Any] | None = None
    transposed: BlockEdges | None = None
    types: npt.NDArray[Any] | None = None
    remote: RemoteEdges | None = field(default=None, kw_only=True)
    relations: tuple[RelationEdges, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class RemoteEdges:
    """The in-edges of each target from rows that this rank receives, whose places are in order of their ranks.

    received, sent: how many rows from and to each rank. rows int32: the own sources that are sent, in order of receivers.
    """

    edges: BlockEdges
    received: tuple[int, ...]
    rows: npt.NDArray[np.int32]
    sent: tuple[int, ...]


def transposed(edges: BlockEdges, num_sources: int) -> BlockEdges:
    """Return the out-edges of each of so many sources, in the order of targets."""
    places = np.arange(1, edges.indices.size + 1)
    shape = edges.indptr.size - 1, num_sources
    found = sp.csr_array((places, edges.indices, edges.indptr), shape).tocsc()
    values, types = (None if of is None else of[found.data - 1] for of in (edges.values, edges.types))
    return BlockEdges(found.indptr.astype(np.int64), found.indices.astype(np.int32), values, types=types)


@dataclass(frozen=True, slots=True)
class SparseFeatures:
    """Features of V rows as CSR (V, D), columns as they are stored, and their transpose (D, V), in the order of rows.

    order int32 (nnz,): the entry of `rows` for each of the transpose's; None where nothing rewrites values.
    """

    rows: Tile
    rows_t: Tile
    order: npt.NDArray[np.int32] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs of rows that a step scores on one rank, links first: heads and tails int32 (M,), of S rows.

    links: how many are links; total: pairs of the step on all ranks. indptr int64 (S + 1,), ends int32 (2 M,): which ends
    of pairs each row is, as places among heads and then tails.
    """

    heads: npt.NDArray[np.int32]
    tails: npt.NDArray[np.int32]
    links: int
    total: int
    indptr: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int32]


class Packed(Protocol):
    """A batch in one piece of pinned memory, as it lies on a GPU: uint8, and how many rows of the input it has."""

    memory: Tensor
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step on one rank. rows: ids of the vertices of each row set; edges: of each block.

    seeds: the last row sets of all ranks, over which the loss is a mean. What a feed need not give, and the device's side
    finds else: features (S, D) of the first block's sources, as the arena keeps rows, on the host; scales: S_r and S_c of
    each row set. sparse: X, or as planned S_c X, of the row sets whose sparse rows products read, instead of features.
    sums (S, D): A X of the same rows, where a model reads the first layer's sums. pairs: of the seeds, or of
    all rows, that are scored where links are predicted; seeds are then numbers of training links. last: whether the step
    ends with it; a step that is larger than was planned comes in several parts, whose gradients are added. reads: points up
    to which a device reads the arrays, which whoever loads the batch adds: the feed waits for them before it writes to
    their memory again. halo: of each block, the rows that other ranks own, where these come from a cache. packed: the same,
    filled up, as it lies on a GPU; None: whoever loads the batch makes it. stored: how many vertices the graph has, where
    edges of the first block name these, not places among its sources, and features are read where they are stored; else 0.
    """

    rows: Mapping[RowSet, npt.NDArray[np.int64]] = field(default_factory=dict)
    edges: Mapping[Block, BlockEdges] = field(default_factory=dict)
    seeds: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    features: Tensor | None = None
    sparse: Mapping[RowSet, SparseFeatures] = field(default_factory=dict)
    sums: Tensor | None = None
    scales: Mapping[RowSet, Scales] | None = None
    pairs: Pairs | None = None
    last: bool = True
    reads: list[Mark] = field(default_factory=list)
    halo: Mapping[Block, HaloRows] = field(default_factory=dict)
    packed: Packed | None = None
    stored: int = 0

    def copy(self) -> Batch:
        """Return the batch with rows, edges and scales in memory of their own; features stay where they are."""
        return dataclasses.replace(
            copy.deepcopy(dataclasses.replace(self, features=None, sums=None, reads=[], packed=None)),
            features=self.features,
            sums=self.sums,
        )

    def check(self, stack: Stack) -> None:
        """Compare the batch with the planned stack. Raises: PlanError for too many rows or edges, or wrong ones."""
        if self.rows.keys() != stack.rows.keys() or self.edges.keys() != set(stack.blocks):
            raise PlanError(f"a batch needs the rows and edges of the blocks {', '.join(b.name for b in stack.blocks)}")
        for block, size in zip(stack.blocks, stack.capacities, strict=True):
            targets, sources, edges = self.rows[block.targets], self.rows[block.sources], self.edges[block]
            for what, count, most in (
                ("targets", targets.size, size.targets),
                ("sources", sources.size, size.sources),
                ("edges", _num_edges(edges), size.edges),
                *_exchanged(edges, size),
            ):
                if count > most:
                    raise PlanError(f"block {block.name!r} has {count} {what}, but at most {most} were planned")
            if not all(np.array_equal(sources[at], targets[at]) for at in _slices(targets.size)):
                raise PlanError(f"the sources of block {block.name!r} must begin with its targets")
            ends, count = edges.indptr, edges.indices.size
            ascending = ends.shape == (targets.size + 1,) and ends[0] == 0 and ends[-1] == count
            if not ascending or any((np.diff(ends[at.start : at.stop + 1]) < 0).any() for at in _slices(targets.size)):
                raise PlanError(
                    f"block {block.name!r} needs {targets.size + 1} row pointers, ascending from 0 to {count}"
                )
            if edges.values is not None and edges.values.shape != (count,):
                raise PlanError(f"block {block.name!r} has {count} edges and {edges.values.size} values")
            if edges.types is not None and edges.types.shape != (count,):
                raise PlanError(f"block {block.name!r} has {count} edges and {edges.types.size} types")
            most = self.stored if self.stored and block == stack.blocks[0] else sources.size
            if edges.indices.size and not 0 <= edges.indices.min() <= edges.indices.max() < most:
                raise PlanError(f"block {block.name!r} has an edge from outside its {most} sources")


def _num_edges(edges: BlockEdges) -> int:
    return edges.indices.size + (0 if edges.remote is None else edges.remote.edges.indices.size)


def _exchanged(edges: BlockEdges, size: Capacity) -> Iterator[tuple[str, int, int]]:
    """Yield the rows that are received and sent, each with the most that were planned."""
    if edges.remote is not None:
        yield "rows from other ranks", sum(edges.remote.received), size.received
        yield "rows for other ranks", sum(edges.remote.sent), size.sent
    back = None if edges.transposed is None else edges.transposed.remote
    if back is not None:
        yield "gradients from other ranks", sum(back.received), size.received_back
        yield "gradients for other ranks", sum(back.sent), size.sent_back


def _slices(count: int) -> Iterator[slice]:
    """Yield slices that cover so many rows, of at most 4,096: what looks at one takes little memory."""
    return (slice(start, min(start + 4096, count)) for start in range(0, count, 4096))


class Feed(Protocol):
    """Gives a rank the batches of an epoch: equally many on every rank and in every epoch."""

    @property
    def stack(self) -> Stack | None:
        """The blocks of every batch; None: the whole graph, which needs no batches to be loaded."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        ...

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `first` on, both from 0; the same ones for the same seed each time."""
        ...

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        """Return, for the history, what all ranks' batches of an epoch have read since this was last asked, by name."""
        ...

    def halt(self) -> None:
        """Leave what threads make ahead: nobody waits for it. An epoch that is asked for after that begins anew."""
        ...


class WholeGraph:
    """The feed of whole-graph training: one step an epoch, over everything."""

    stack: Stack | None = None
    num_steps = 1

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield one empty batch: the whole graph is loaded already."""
        yield Batch()

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return {}

    def halt(self) -> None:
        return
