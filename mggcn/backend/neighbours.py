"""Edge operations other than sums at kernel level: the maximum of neighbours, and attention over them.

Shapes: V rows of this rank, N rows of the operand, some of them from other ranks, D columns, H heads of C columns, D =
H C. Rows are of the storage type, float32 or float64; numbers of vertices travel as integers of its size in a column of
their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mggcn.backend.dropout import Dropout
from mggcn.backend.sparse import Sparse

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """How scores are computed from rows. a: weights (H, C) of GATv2's scores, None for GAT's; slope: LeakyReLU's.

    dropout: of weights, counted by head, source, destination and layer; ids int64 (V,): numbers of this rank's vertices.
    first: number of the first of these heads among those of the model, by which masks are counted. counted: values of a
    matrix are numbers of parallel edges; otherwise they are not read.
    """

    heads: int
    cols: int
    slope: float
    a: Tensor | None
    dropout: Dropout | None
    ids: Tensor
    first: int = 0
    counted: bool = False

    def counts(self, matrix: Sparse | None) -> Tensor | None:
        """Return the number of parallel edges of each entry (nnz,), None for one each."""
        return matrix.values if self.counted and matrix is not None else None


class NeighbourKernels(Protocol):
    """Kernels of one device for one storage type. Outputs are written in place, whatever lay there if `begins`.

    Results repeat bit for bit. cpu/attention.h says what the rows of attention are made of.
    """

    def maximum(
        self, matrix: Sparse | None, rows: Tensor, out: Tensor, winners: Tensor, *, begins: bool, ends: bool
    ) -> None:
        """Take the maxima of a tile's rows (N, D + 1) and of `out` (V, D) into `out`, and their vertices into `winners`
        (V, D).

        matrix: None for no entries. ends: rows without any become 0.
        """
        ...

    def maximum_combine(self, message: Tensor, index: Tensor, out: Tensor, winners: Tensor) -> None:
        """Do the same with other ranks' partial results, rows with their winners (len(index), 2 D); index int32 without
        repeats.
        """
        ...

    def maximum_grad(self, matrix: Sparse, rows: Tensor, ids: Tensor, out: Tensor, *, begins: bool) -> None:
        """Out (V, D) += g of the rows [g | winners] (N, 2 D) that name this row as their winner."""
        ...

    def attend(
        self,
        heads: Heads,
        matrix: Sparse | None,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        state: Tensor,
        *,
        begins: bool,
        ends: bool,
    ) -> None:
        """Add a tile's weighted rows to `out` (V, D), not yet divided, and update maxima and sums of weights, `state`
        (V, 2 H).

        own: t (V, H) or y (V, D). matrix: None for no entries. ends: out is divided, rows without entries are 0.
        """
        ...

    def attend_combine(self, heads: Heads, message: Tensor, index: Tensor, out: Tensor, state: Tensor) -> None:
        """Merge other ranks' [z | m | l] into out and state; index int32 without repeats."""
        ...

    def attend_sources(
        self, heads: Heads, matrix: Sparse, rows: Tensor, own: Tensor, out: Tensor, *, begins: bool
    ) -> None:
        """Add to out the gradients of the rows that were sent, from rows of destinations; own: this rank's rows as sent."""
        ...

    def attend_destinations(
        self,
        heads: Heads,
        matrix: Sparse,
        rows: Tensor,
        own: Tensor,
        out: Tensor,
        beside: Tensor | None,
        *,
        begins: bool,
    ) -> None:
        """Out += the gradients of t or y, from rows of sources; beside (V, D) += those of a, by row.

        own: this rank's rows as sent in the backward pass.
        """
        ...

    def head_dots(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Out (V, H) = by head the products of x (V, D) with y (V, D), or with one row y (D,)."""
        ...
