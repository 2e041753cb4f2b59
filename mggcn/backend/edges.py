"""Passes over edges at kernel level: messages of operands reduced at their destinations, and their gradients.

Shapes: N vertices, E edges, D columns. A message is op(lhs, rhs) of the rows that an edge reads from its operands.
Source: DistGNN, section 4.1, Algorithm 1 and Table 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from mggcn.backend.sparse import Sparse

if TYPE_CHECKING:
    from torch import Tensor

Op = Literal["add", "sub", "mul", "div", "copy"]
Reducer = Literal["sum", "max", "min"]
Of = Literal["source", "destination", "edge"]
Partial = Literal["one", "times", "over", "ratio"]
"""Factor of the gradient g of a message: 1, g * a, g / a, or g * (a / b) / b."""
OPS: tuple[Op, ...] = get_args(Op)
REDUCERS: tuple[Reducer, ...] = get_args(Reducer)
OFS: tuple[Of, ...] = get_args(Of)
PARTIALS: tuple[Partial, ...] = get_args(Partial)


@dataclass(frozen=True, slots=True)
class EdgeRows:
    """Edges on the device, grouped by one of their ends.

    By destination: matrix is A^T, a row per destination with its sources; place and starts are None; edge k is entry k.
    By source: matrix is A, a row per source with its destinations; place int32 (E,) is where in its destination's row
    each entry lies, starts int64 (N + 1,) the row pointers of the destinations. Repeated edges are edges of their own.
    edge_ids int32 (E,) or None: the row of the edge operands that belongs to each edge in order of destinations.
    """

    matrix: Sparse
    place: Tensor | None = None
    starts: Tensor | None = None
    edge_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """Rows of the storage type, unit column stride: (N, D) of a source or destination, or (E, D); width 1 is for all D."""

    rows: Tensor
    of: Of


@dataclass(frozen=True, slots=True)
class Reduction:
    """Messages op(lhs, rhs), reduced at their destinations."""

    op: Op
    reducer: Reducer
    lhs: Operand
    rhs: Operand | None = None


@dataclass(frozen=True, slots=True)
class EdgeGradient:
    """The summand of an edge in the gradient by an operand of `of`: scale times `partial` of the rows of a and b."""

    of: Of
    partial: Partial
    scale: float = 1.0
    a: Operand | None = None
    b: Operand | None = None


class EdgeKernels(Protocol):
    """Kernels of one device for one storage type. Outputs are written in place; sums repeat bit for bit."""

    def reduce(self, edges: EdgeRows, messages: Reduction, out: Tensor, winners: Tensor | None) -> None:
        """Out (N, D) = reduction of the messages of each destination, 0 without any; `edges` by destination.

        winners int32 (N, D), contiguous: place in its row of the edge that a maximum or minimum is from, the first of
        equal ones, -1 without any. NaN: the first of a column is its maximum and minimum.
        """
        ...

    def gradient(self, edges: EdgeRows, by: EdgeGradient, g: Tensor, winners: Tensor | None, out: Tensor) -> None:
        """Gradient with respect to one operand: (N, D), (E, D), or one column, the sum over D, from g (N, D).

        It is the sum over the edges that read a row; with `winners`, only the winning edges contribute. `edges` by source
        for an operand of the source, else by destination.
        """
        ...
