"""A batch as it lies on a GPU, in one piece of pinned memory: the thread that draws it fills it up, and one copy sends it.

Every array that is copied by itself costs the thread of the steps some 10 us, and a batch has 30. Pairs of links lie there
likewise, with those of a batch or, of the whole graph, by themselves. V rows of a row set, T of the seeds, M pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.padded import DRAWN, PaddedLayout, PairRoom, Place, placed
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges, Pairs
from mggcn.feed.labels import SeedLabels

if TYPE_CHECKING:
    from torch import Tensor

Vector = npt.NDArray[Any]
ReadLabels: TypeAlias = Callable[[Vector, Vector], SeedLabels]
"""Returns the labels of a rank's seeds, of all ranks' seeds. Raises: GraphError for a seed without a label."""


class _Memory:
    """Arrays in one piece of memory, with what is to be copied and filled up there in one native call."""

    def __init__(self, memory: Tensor, places: Mapping[str, Place]) -> None:
        flat = memory.numpy()
        self.arrays: Mapping[str, Vector] = {
            name: flat[place.offset : place.end].view(place.dtype) for name, place in places.items()
        }
        self._at = {name: array.ctypes.data for name, array in self.arrays.items()}
        self._pieces = list[tuple[int, int, int, int, int]]()
        self._read = list[Vector]()

    def clear(self) -> None:
        """Forget what was to be copied."""
        self._pieces.clear()
        self._read.clear()

    def put(self, name: str, array: Vector) -> None:
        """Have the first elements of an array copied, unless they are here."""
        array = np.ascontiguousarray(array, self.arrays[name].dtype)
        if (address := array.ctypes.data) != self._at[name]:
            self._read.append(array)
            self._pieces.append((self._at[name], address, array.size, array.itemsize, 0))

    def fill(self, name: str, first: int, last: int, value: int) -> None:
        """Have elements [first, last) of an array of bytes, or of 64-bit numbers, set to a value."""
        item = self.arrays[name].itemsize
        self._pieces.append((self._at[name] + item * first, 0, last - first, item, value))

    def put_pairs(self, pairs: Pairs, room: PairRoom) -> None:
        """Have pairs and the target of their scores copied, and filled up; pairs that fill up are of no row, and count
        nowhere. Raises: PlanError for more of them than there is room for.
        """
        count, size = pairs.heads.size, pairs.indptr.size
        if count > room.pairs or size > room.rows + 1:
            raise PlanError(
                f"a step has {count} pairs of {size - 1} rows, but at most {room.pairs} of {room.rows} were planned"
            )
        self.put("labels", np.arange(count) < pairs.links)
        self.fill("mask", 0, count, 1)
        self.fill("mask", count, room.pairs, 0)
        self.arrays["scale"][0] = 1.0 / max(pairs.total, 1)
        self.put("heads", pairs.heads)
        self.put("tails", pairs.tails)
        self.put("pair_indptr", pairs.indptr)
        self.fill("pair_indptr", size, room.rows + 1, 2 * count)
        is_tail = pairs.ends >= count
        self.put("pair_of", pairs.ends - is_tail * np.int32(count))
        if room.dot:
            self.put("pair_indices", np.concatenate([pairs.tails, pairs.heads])[pairs.ends])
        else:  # places among heads and then tails, which begin behind those that fill up
            self.put("pair_indices", pairs.ends + is_tail * np.int32(room.pairs - count))

    def pack(self) -> None:
        """Copy and fill up."""
        table = np.array(self._pieces, np.int64)
        native.kernel("mggcn_pack")(table.ctypes.data, len(table))
        self.clear()


class PackedPairs:
    """The pairs of a step over the whole graph on their way. memory: uint8, of the room's bytes, zero at first."""

    def __init__(self, room: PairRoom, memory: Tensor) -> None:
        self.memory: Tensor = memory
        self._room, self._arrays = room, _Memory(memory, placed(room.arrays()))

    def write(self, pairs: Pairs) -> None:
        """Write the pairs of a step. Raises: PlanError for more than there is room for."""
        self._arrays.clear()  # what an error left
        self._arrays.put_pairs(pairs, self._room)
        self._arrays.pack()


class PackedBatch:
    """The memory of a batch on its way. memory: uint8, of the layout's bytes, zero at first; labels: read by the thread,
    None where pairs have them.
    """

    def __init__(self, layout: PaddedLayout, memory: Tensor, labels: ReadLabels | None) -> None:
        self.layout: PaddedLayout = layout
        self.memory: Tensor = memory
        self.rows: int = 0
        """Rows of the input that the batch has."""
        self._memory = _Memory(memory, layout.places())
        self._labels, self._drawn_here = labels, False

    @property
    def arrays(self) -> Mapping[str, Vector]:
        """The arrays of the layout, by name."""
        return self._memory.arrays

    def of_slot(self) -> dict[str, Vector]:
        """Return the arrays into which a sampler may draw, by their names in a slot, whose hops count from the seeds."""
        last, found = len(self.layout.stack.blocks) - 1, {"ids": self.arrays["ids"]}
        for number in range(last + 1):
            names = [name for t in ("", "_t") for name in (f"indptr{t}", f"indices{t}")]
            found |= {
                f"{name}{last - number}": self.arrays[f"{name}{number}"] for name in names if self._has(name, number)
            }
        return found

    def of_hop(self, name: str, hop: int) -> Vector | None:
        """Return an array of a hop's block, None if the layout has none of this name."""
        return self.arrays.get(f"{name}{len(self.layout.stack.blocks) - 1 - hop}")

    def bytes_of(self, name: str) -> Tensor:
        """Return the bytes of an array."""
        place = self.layout.places()[name]
        return self.memory[place.offset : place.end]

    def _has(self, name: str, number: int) -> bool:
        return f"{name}{number}" in self.arrays

    def write(self, batch: Batch, *, drawn_here: bool = False) -> Batch:
        """Copy what does not lie here already, and fill up the rest; return the batch with this memory.

        The batch has all that the layout has but features, which are here. drawn_here: so are ids, edges and what they
        count (`of_slot`, `of_hop`). Cost: what is copied, in one native call.
        Raises: GraphError for a seed without a label; PlanError for edges that count other than one, without room for it,
        for too many pairs, or none where they are to be scored.
        """
        self._drawn_here = drawn_here
        self._memory.clear()  # what an error left
        self._put_target(batch)
        stack = self.layout.stack
        ids = batch.rows[stack.blocks[0].sources]
        self._put("ids", ids)
        for number, (name, count) in enumerate(stack.rows.items()):
            size = batch.rows[name].size
            self._fill(f"counted{number}", 0, size, 1)
            self._fill(f"counted{number}", size, count, 0)
            scales = (None, None) if batch.scales is None else batch.scales[name]
            for place, scale in zip((f"row_scale{number}", f"col_scale{number}"), scales, strict=True):
                if scale is not None:
                    self._put(place, scale)
        for number, (block, room) in enumerate(zip(stack.blocks, stack.capacities, strict=True)):
            edges = batch.edges[block]
            self._put_edges(str(number), edges, room.targets)
            if self.layout.is_transposed(number) and edges.transposed is not None:
                self._put_edges(f"_t{number}", edges.transposed, room.sources)
        self._memory.pack()
        self.rows = ids.size
        return dataclasses.replace(batch, packed=self)

    def _put_target(self, batch: Batch) -> None:
        """Have the target of the seeds' scores copied, or the pairs of the seeds with theirs."""
        if self._labels is None:
            if batch.pairs is None or self.layout.pairs is None:
                raise PlanError("a step that predicts links needs pairs, and its feed gave none")
            self._memory.put_pairs(batch.pairs, self.layout.pairs)
            return
        seeds, stack = batch.rows[self.layout.stack.seeds], self.layout.stack
        found = self._labels(seeds, batch.seeds)
        self._put("labels", found.labels.reshape(-1))
        self._put("mask", found.mask)
        self._fill("mask", seeds.size, stack.capacities[-1].targets, 0)
        self.arrays["scale"][0] = found.inv_count

    def _put_edges(self, name: str, edges: BlockEdges, rows: int) -> None:
        self._put(f"indptr{name}", edges.indptr)
        self._fill(f"indptr{name}", edges.indptr.size, rows + 1, edges.indices.size)  # rows that fill up have no edges
        self._put(f"indices{name}", edges.indices)
        if edges.values is not None:
            if not self.layout.valued:
                raise PlanError("edges of a batch count other than one, and the plan has no room for what they count")
            self._put(f"values{name}", edges.values)
        elif self.layout.valued:
            self.arrays[f"values{name}"][: edges.indices.size] = 1

    def _put(self, name: str, array: Vector) -> None:
        """Have the first elements of an array copied, unless they are here."""
        if not (self._drawn_here and name.startswith(DRAWN)):
            self._memory.put(name, array)

    def _fill(self, name: str, first: int, last: int, value: int) -> None:
        self._memory.fill(name, first, last, value)
