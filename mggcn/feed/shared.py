"""One batch for all ranks: the part of one of them, in planned memory.

A row's place is that among the rows of all ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.block import Block, RowSet, Stack
from mggcn.blocks.shared import Part, Share
from mggcn.feed.batch import Batch, BlockEdges, RemoteEdges, Scales

Vector = npt.NDArray[Any]


def part_of(share: Share, batch: Batch, of_row: Vector, stack: Stack) -> Batch:
    """Return a rank's part of the batch of all ranks, which has no features yet, in the memory of `share`.

    of_row uint16: the rank of each row of the input. Raises: BatchTooLargeError, on every rank, if the part of any is
    larger than was planned.
    """
    edges, counts = dict[Block, BlockEdges](), dict[RowSet, int]()
    # The input's block first: the rows of every set are the first of the next one's, and so are their places.
    for hop, block in zip(reversed(range(len(stack.blocks))), stack.blocks, strict=True):
        whole = batch.edges[block]
        targets, sources = (of_row[: batch.rows[name].size] for name in (block.targets, block.sources))
        forth = share.cut(hop, "", whole.indptr, whole.indices, targets, sources)
        counts[block.targets] = forth.near.size - 1
        counts.setdefault(block.sources, forth.num_columns)
        edges[block] = _edges(share, hop, "", forth, whole)
        if whole.transposed is not None and "_t" in share.plan.directions(hop):
            whole = whole.transposed
            back = share.cut(hop, "_t", whole.indptr, whole.indices, sources, targets)
            edges[block] = dataclasses.replace(edges[block], transposed=_edges(share, hop, "_t", back, whole))
    most = max(counts.values())
    places, ids = (share.arrays[name][:most] for name in ("places", "ids"))
    np.take(batch.rows[stack.blocks[0].sources], places, out=ids, mode="clip")
    scales = None
    if batch.scales is not None:
        scales = {name: _taken(of, places[: counts[name]]) for name, of in batch.scales.items()}
    return dataclasses.replace(batch, rows={name: ids[:n] for name, n in counts.items()}, edges=edges, scales=scales)


def _edges(share: Share, hop: int, way: str, part: Part, whole: BlockEdges) -> BlockEdges:
    """Return a part's edges with what they count."""
    near, values, types = int(part.near[-1]), None, None
    if whole.values is not None:
        memory = share.arrays[f"values{way}{hop}"].view(whole.values.dtype)
        values = in_order(whole.values, part.entries, memory[: part.entries.size])
    if whole.types is not None:
        types = whole.types[part.entries]

    def some(indptr: Vector, at: slice) -> BlockEdges:
        count, kind = (None if of is None else of[at] for of in (values, types))
        return BlockEdges(indptr, part.indices[at], count, types=kind)

    own = some(part.near, slice(near))
    if not share.plan.exchanged[hop]:
        return own
    remote = RemoteEdges(some(part.far, slice(near, None)), part.received_from, part.sent, part.sent_to)
    return dataclasses.replace(own, remote=remote)


def _taken(scales: Scales, places: Vector) -> Scales:
    row, col = (None if scale is None else scale[places] for scale in scales)
    return row, col


def in_order(values: Vector, order: Vector, out: Vector) -> Vector:
    """Write values[order], order int32, which NumPy would convert to int64 first."""
    kernel = native.kernel("mggcn_gather_rows_", "f64" if out.dtype == np.float64 else "f32")
    kernel(values.ctypes.data, 1, order.ctypes.data, out.ctypes.data, 1, out.size, 1, 1)
    return out
