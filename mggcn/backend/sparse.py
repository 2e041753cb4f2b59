"""A sparse matrix on the device. V rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sparse:
    """A CSR matrix on the device: indptr int64 (V + 1,), indices int32 (nnz,), values (nnz,) or None for ones.

    Values are of the accumulation type: float32, or float64 for float64 storage.
    schedule: how the backend that made it divides the rows among threads; the type is the backend's own.
    relations: the entries by relation, where a model reads types; no other field then holds them, and the schedule is that
    of one of them.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor | None
    schedule: Any
    relations: tuple[RelationRows, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def nnz(self) -> int:
        return self.indices.shape[0] + sum(part.matrix.nnz for part in self.relations)


@dataclass(frozen=True, slots=True)
class RelationRows:
    """Some rows of a matrix with their entries of one relation, or of several relations one after the other.

    spans: a relation, its first row and the row behind its last, for each. rows int32, those of `matrix` in order, without
    repeats within a relation. group: where there are several, what kernels read of them.
    """

    spans: tuple[tuple[int, int, int], ...]
    rows: Tensor
    matrix: Sparse
    group: RelationGroup | None = None


@dataclass(frozen=True, slots=True)
class RelationGroup:
    """Several relations on the device. spans int32 (relations, 3); longest: most rows of one; chain int32 (rows,): the next
    place of the same row (backend/relations.py).
    """

    spans: Tensor
    longest: int
    chain: Tensor
