"""A batch as it lies on a GPU, in one piece of pinned memory: the thread that draws it fills it up, and one copy sends it.

Every array that is copied by itself costs the thread of the steps some 10 us, and a batch has 30. V rows of a row set, T of
the seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.padded import DRAWN, PaddedLayout
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges
from mggcn.feed.labels import SeedLabels

if TYPE_CHECKING:
    from torch import Tensor

Vector = npt.NDArray[Any]
ReadLabels: TypeAlias = Callable[[Vector, Vector], SeedLabels]
"""Returns the labels of a rank's seeds, of all ranks' seeds. Raises: GraphError for a seed without a label."""


class PackedBatch:
    """The memory of a batch on its way. memory: uint8, of the layout's bytes, zero at first; labels: read by the thread."""

    def __init__(self, layout: PaddedLayout, memory: Tensor, labels: ReadLabels) -> None:
        self.layout: PaddedLayout = layout
        self.memory: Tensor = memory
        self.rows: int = 0
        """Rows of the input that the batch has."""
        flat = memory.numpy()
        self.arrays: Mapping[str, Vector] = {
            name: flat[place.offset : place.end].view(place.dtype) for name, place in layout.places().items()
        }
        self._at = {name: array.ctypes.data for name, array in self.arrays.items()}
        self._labels, self._drawn_here = labels, False
        self._pieces = list[tuple[int, int, int, int, int]]()
        self._read = list[Vector]()

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
        Raises: GraphError for a seed without a label; PlanError for edges that count other than one, without room for it.
        """
        self._drawn_here = drawn_here
        self._pieces.clear()  # what an error left
        self._read.clear()
        stack, seeds = self.layout.stack, batch.rows[self.layout.stack.seeds]
        found, most = self._labels(seeds, batch.seeds), stack.capacities[-1].targets
        self._put("labels", found.labels.reshape(-1))
        self._put("mask", found.mask)
        self._fill("mask", seeds.size, most, 0)
        self.arrays["scale"][0] = found.inv_count
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
        self._pack()
        self.rows = ids.size
        return dataclasses.replace(batch, packed=self)

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
        if self._drawn_here and name.startswith(DRAWN):
            return
        array = np.ascontiguousarray(array, self.arrays[name].dtype)
        if (address := array.ctypes.data) != self._at[name]:
            self._read.append(array)
            self._pieces.append((self._at[name], address, array.size, array.itemsize, 0))

    def _fill(self, name: str, first: int, last: int, value: int) -> None:
        item = self.arrays[name].itemsize
        self._pieces.append((self._at[name] + item * first, 0, last - first, item, value))

    def _pack(self) -> None:
        table = np.array(self._pieces, np.int64)
        native.kernel("mggcn_pack")(table.ctypes.data, len(table))
        self._pieces.clear()
        self._read.clear()
