"""The memory of a batch on its way: what is drawn, what it counts, features, scales, and its edges by relation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.relations import BLOCK_ROWS
from mggcn.backend.cpu.memory import allocate
from mggcn.backend.events import Mark
from mggcn.blocks.block import Stack
from mggcn.blocks.relation_order import RelationOrder, RelationPlan
from mggcn.blocks.shared import Share, SharePlan
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.fetched import FetchedRows
from mggcn.feed.gather import GatheredRows, GatheredSparse, StoredFeatures
from mggcn.feed.history import HistoryMemory, RemoteRows
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.packed import PackedBatch
from mggcn.feed.shared import PartOrders

if TYPE_CHECKING:
    from torch import Tensor

Vector = npt.NDArray[Any]
Gathered: TypeAlias = GatheredRows | FetchedRows
GatheredIn: TypeAlias = Callable[[Callable[[int], "Tensor"]], Gathered]
"""Makes the memory of a batch's features from what gives so many bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMemory:
    """The memory of one batch, which the next one in it overwrites."""

    slot: Slot
    values: tuple[Vector, ...]
    values_t: tuple[Vector, ...]
    features: Gathered | None
    sparse: GatheredSparse | None
    sums: Gathered | None
    scales: Vector
    types: tuple[Vector, ...]
    """The relation of each edge, by hop, and of the transpose's; () without relations."""
    types_t: tuple[Vector, ...]
    orders: tuple[RelationOrder, ...]
    """Edges by relation, by hop, and of the transpose's; () without relations, or where ranks share batches."""
    orders_t: tuple[RelationOrder, ...]
    parts: PartOrders
    """Edges of this rank's part by relation, where ranks share batches."""
    by_type: Vector
    reads: list[Mark]
    """As of a batch."""
    share: Share | None
    packed: PackedBatch | None
    remote: HistoryMemory | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMemoryPlan:
    """What the memory of a batch depends on.

    stack: the blocks of a step on a rank; slots: of what is drawn. features, sums: make the memory of a batch's features,
    and of its rows of A X, of given bytes; a batch may have either or both. sparse: makes that of sparse features, which a
    batch has instead of features. norm: the scales of the whole graph, None if
    rows have none. share: of the part of a rank where ranks share batches, of which each draws all, and takes its part.
    stored: features that a step reads where they are, instead of all these. remote: finds rows of other ranks, where these
    come from a cache. pack: makes the memory of a batch that goes to a GPU.
    """

    stack: Stack
    slots: SlotPlan
    values: EdgeValues
    features: GatheredIn | None = None
    sparse: Callable[[], GatheredSparse] | None = None
    sums: GatheredIn | None = None
    stored: StoredFeatures | None = None
    norm: NormScales | None = None
    share: SharePlan | None = None
    remote: RemoteRows | None = None
    pack: Callable[[], PackedBatch] | None = None

    def make(self, rank: int) -> BatchMemory:
        """Return the memory of a batch, as planning/batches.py counts it."""
        packed = None if self.pack is None else self.pack()
        stack, real, means = self.stack, self.values.real, self.values.relations
        drawn = stack.together or stack.capacities
        edges = [size.edges for size in reversed(drawn)]
        edges_t = [count * self.slots.is_transposed(hop) for hop, count in enumerate(edges)]
        valued = [[count * self.values.needed for count in counts] for counts in (edges, edges_t)]
        share = None if self.share is None else Share(self.share, rank)
        orders, orders_t = (self._orders(counts) if share is None else () for counts in (edges, edges_t))
        normed = stack.capacities[0].sources if self.norm is not None and self.norm.norm != "none" else 0
        return BatchMemory(
            slot=Slot(self.slots) if packed is None else Slot(self.slots, packed.of_slot()),
            values=_vectors(valued[0], "values", real, packed),
            values_t=_vectors(valued[1], "values_t", real, packed),
            features=_gathered(self.features, "features", packed),
            sparse=None if self.sparse is None else self.sparse(),
            sums=_gathered(self.sums, "sums", packed),
            scales=np.empty(normed, real) if packed is None or not normed else packed.arrays["row_scale0"],
            types=self._types(edges, orders),
            types_t=self._types(edges_t, orders_t),
            orders=orders,
            orders_t=orders_t,
            parts={} if self.share is None else self._parts(self.share),
            by_type=np.zeros(0 if means is None else means.num_relations),
            reads=[],
            share=share,
            packed=packed,
            remote=None if self.remote is None else self.remote.memory(stack.capacities[0].sources),
        )

    def _orders(self, counts: Sequence[int]) -> tuple[RelationOrder, ...]:
        """Return memory for the edges of each hop by relation, so many each."""
        means = self.values.relations
        if means is None:
            return ()
        of: dict[str, Any] = {"relations": means.num_relations, "block_rows": BLOCK_ROWS, "real": self.values.real}
        return tuple(RelationOrder(RelationPlan(edges=count, **of), means.dtype) for count in counts)

    def _types(self, counts: Sequence[int], orders: Sequence[RelationOrder]) -> tuple[Vector, ...]:
        means = self.values.relations
        if means is None:
            return ()
        return tuple(order.types for order in orders) or tuple(np.empty(count, means.dtype) for count in counts)

    def _parts(self, share: SharePlan) -> PartOrders:
        if self.values.relations is None:
            return {}
        return {(hop, way): self._orders([count] * orders) for hop, way, count, orders in share.edges_by_relation()}


def _vectors(counts: Sequence[int], name: str, real: npt.DTypeLike, packed: PackedBatch | None) -> tuple[Vector, ...]:
    given = [None if packed is None else packed.of_hop(name, hop) for hop in range(len(counts))]
    return tuple(np.empty(n, real) if one is None else one for n, one in zip(counts, given, strict=True))


def _gathered(make: GatheredIn | None, name: str, packed: PackedBatch | None) -> Gathered | None:
    if make is None:
        return None
    return make(allocate if packed is None else lambda nbytes: packed.bytes_of(name)[:nbytes])
