"""The edges of a drawn block in the order of their relations, in memory that is planned with the batch's.

T targets, E edges of a block, R relations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mggcn import native

Vector = npt.NDArray[Any]


class RelationEdges(NamedTuple):
    """Some targets, int32 (rows,), and their edges of one relation: indptr int64 (rows + 1,), indices int32, values."""

    relation: int
    rows: Vector
    indptr: Vector
    indices: Vector
    values: Vector | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationPlan:
    """What the memory of a block's edges by relation depends on: the most edges, R, rows of a part, type of values."""

    edges: int
    relations: int
    block_rows: int
    real: npt.DTypeLike

    def arrays(self) -> Iterator[tuple[str, npt.DTypeLike, int]]:
        """Yield the name, type and length of every array."""
        parts = min(self.relations, self.edges) + self.edges // self.block_rows
        yield "types", np.uint16, self.edges
        yield "rows", np.int32, self.edges
        yield "indices", np.int32, self.edges
        yield "values", self.real, self.edges
        yield "pointers", np.int64, self.edges + parts
        yield "parts", np.int64, 5 * parts
        yield "work", np.int64, 6 * self.relations

    @property
    def nbytes(self) -> int:
        """The bytes of a `RelationOrder`. Cost: none of memory."""
        return sum(np.dtype(dtype).itemsize * count for _, dtype, count in self.arrays())


class RelationOrder:
    """The memory of one block's edges by relation, which the next batch in it overwrites.

    dtype: of types, uint8 or uint16. types (E,): to be filled.
    """

    def __init__(self, plan: RelationPlan, dtype: npt.DTypeLike) -> None:
        self._plan = plan
        self._arrays = {name: np.empty(count, dtype) for name, dtype, count in plan.arrays()}
        self.types: Vector = self._arrays["types"].view(dtype)[: plan.edges]

    def of(self, indptr: Vector, indices: Vector, values: Vector | None) -> tuple[RelationEdges, ...]:
        """Return the edges whose types were filled in, relation by relation, at most block_rows rows at a time.

        Cost: two passes over the edges, and over the relations; nothing is allocated but views.
        """
        arrays, rows = self._arrays, indptr.size - 1
        address = {name: array.ctypes.data for name, array in arrays.items()}
        arguments = native.RelationOrderArgs(
            indptr=indptr.ctypes.data,
            indices=indices.ctypes.data,
            types=address["types"],
            work=address["work"],
            rows_out=address["rows"],
            indices_out=address["indices"],
            pointers=address["pointers"],
            parts=address["parts"],
            rows=rows,
            block_rows=self._plan.block_rows,
            relations=self._plan.relations,
            wide=int(self.types.itemsize == 2),
        )
        kernel = native.kernel("mggcn_relation_order_", "f64" if arrays["values"].dtype == np.float64 else "f32")
        kernel(ctypes.byref(arguments), None if values is None else values.ctypes.data, address["values"])
        found = arrays["parts"][: 5 * arguments.num_parts].reshape(-1, 5).tolist()
        return tuple(self._part(part, values is not None) for part in found)

    def _part(self, part: list[int], valued: bool) -> RelationEdges:
        relation, first, rows, entry, pointer = part
        arrays = self._arrays
        indptr = arrays["pointers"][pointer : pointer + rows + 1]
        entries = slice(entry, entry + int(indptr[-1]))
        values = arrays["values"][entries] if valued else None
        return RelationEdges(relation, arrays["rows"][first : first + rows], indptr, arrays["indices"][entries], values)
