"""One batch for all ranks: the part of one of them, in planned memory.

A row's place is that among the rows of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.block import Block, RowSet, Stack
from mggcn.blocks.relation_order import RelationOrder
from mggcn.blocks.shared import Part, Share
from mggcn.feed.batch import Batch, BlockEdges, RemoteEdges, Scales, transposed

Vector = npt.NDArray[Any]
PartOrders: TypeAlias = Mapping[tuple[int, str], Sequence[RelationOrder]]
"""The memory of a part's edges by relation, by hop and way as in `SharePlan.edges_by_relation`: of those from own rows, and
of those from received ones."""
TAKEN = 1 << 12
"""Types that are taken at a time, so that their places need 32 KiB."""


def part_of(share: Share, batch: Batch, of_row: Vector, stack: Stack, orders: PartOrders) -> Batch:
    """Return a rank's part of the batch of all ranks, which has no features yet, in the memory of `share`.

    of_row uint16: the rank of each row of the input. orders: the memory of the part's edges by relation, {} without types.
    Raises: BatchTooLargeError, on every rank, if the part of any is larger than was planned.
    """
    edges, counts = dict[Block, BlockEdges](), dict[RowSet, int]()
    # The input's block first: the rows of every set are the first of the next one's, and so are their places.
    for hop, block in zip(reversed(range(len(stack.blocks))), stack.blocks, strict=True):
        whole = batch.edges[block]
        targets, sources = (of_row[: batch.rows[name].size] for name in (block.targets, block.sources))
        forth = share.cut(hop, "", whole.indptr, whole.indices, targets, sources)
        counts[block.targets] = forth.near.size - 1
        counts.setdefault(block.sources, forth.num_columns)
        edges[block] = _edges(share, hop, "", forth, whole, orders)
        if whole.transposed is None:
            continue
        if "_t" in share.plan.directions(hop):
            back = share.cut(hop, "_t", whole.transposed.indptr, whole.transposed.indices, sources, targets)
            own = _edges(share, hop, "_t", back, whole.transposed, orders)
        else:  # all of its sources are this rank's, so the way back needs no other rank's edges
            own = transposed(edges[block], counts[block.sources])
            if own.types is not None:
                (order,) = orders[hop, "_t"]
                order.types[: own.types.size] = own.types
                own = dataclasses.replace(own, relations=order.of(own.indptr, own.indices, own.values))
        edges[block] = dataclasses.replace(edges[block], transposed=own)
    most = max(counts.values())
    places, ids = (share.arrays[name][:most] for name in ("places", "ids"))
    np.take(batch.rows[stack.blocks[0].sources], places, out=ids, mode="clip")
    scales = None
    if batch.scales is not None:
        scales = {name: _taken(of, places[: counts[name]]) for name, of in batch.scales.items()}
    return dataclasses.replace(batch, rows={name: ids[:n] for name, n in counts.items()}, edges=edges, scales=scales)


def _edges(share: Share, hop: int, way: str, part: Part, whole: BlockEdges, orders: PartOrders) -> BlockEdges:
    """Return a part's edges with what they count, by relation too if they have types."""
    near, values, types = int(part.near[-1]), None, whole.types
    if whole.values is not None:
        memory = share.arrays[f"values{way}{hop}"].view(whole.values.dtype)
        values = in_order(whole.values, part.entries, memory[: part.entries.size])

    def some(indptr: Vector, at: slice, far: int) -> BlockEdges:
        indices, count = part.indices[at], None if values is None else values[at]
        if types is None:
            return BlockEdges(indptr, indices, count)
        order = orders[hop, way][far]
        kinds = types_in_order(types, part.entries[at], order.types[: indices.size])
        return BlockEdges(indptr, indices, count, types=kinds, relations=order.of(indptr, indices, count))

    own = some(part.near, slice(near), 0)
    if not share.plan.exchanged[hop]:
        return own
    remote = RemoteEdges(some(part.far, slice(near, None), 1), part.received_from, part.sent, part.sent_to)
    return dataclasses.replace(own, remote=remote)


def _taken(scales: Scales, places: Vector) -> Scales:
    row, col = (None if scale is None else scale[places] for scale in scales)
    return row, col


def in_order(values: Vector, order: Vector, out: Vector) -> Vector:
    """Write values[order], order int32, which NumPy would convert to int64 first."""
    kernel = native.kernel("mggcn_gather_rows_", "f64" if out.dtype == np.float64 else "f32")
    kernel(values.ctypes.data, 1, order.ctypes.data, out.ctypes.data, 1, out.size, 1, 1)
    return out


def types_in_order(types: Vector, order: Vector, out: Vector) -> Vector:
    """Write types[order], order int32."""
    for start in range(0, order.size, TAKEN):  # NumPy converts places to 64 bits
        some = slice(start, start + TAKEN)
        np.take(types, order[some], out=out[some], mode="clip")
    return out
