"""What an aggregation computes along edges. Strategies own movement, an EdgeOp owns arithmetic.

A strategy brings blocks of rows to a rank, in an order that its plan fixes. An EdgeOp says which columns of a row are
sent, adds the messages of one tile to a result, and finishes the result. `Sum` is the sparse product;
docs/notes/0019-edge-op.md says how attention fits. V rows of this rank, D columns of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mggcn.aggregate.steps import Multiply
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor


class Columns(NamedTuple):
    """How many columns each kind of row of an op has, for a result of a given width.

    operand: of a row that is sent. partial: of a row of the result before `end`, including what is accumulated beside it.
    shared: of a row that copies of a split vertex exchange: forwards `partial`; backwards the operand's first columns,
    which are parts of a sum over the copies; the columns after them are equal on all copies. 0: results may stay parts
    of a sum over the copies, and nothing is exchanged.
    """

    operand: int
    partial: int
    shared: int

    @property
    def result(self) -> int:
        """`partial` as a Multiply states it: 0 if it equals `operand`."""
        return 0 if self.partial == self.operand else self.partial

    def multiply(self, rows: int, columns: int, nnz: int, reuse: tuple[float, ...]) -> Multiply:
        """Return the planned step that multiplies one tile."""
        return Multiply(rows, columns, nnz, self.operand, reuse, result=self.result)


EDGE_KERNELS: Final = (
    *("gat", "gat_sources", "gat_destinations"),
    *("gatv2", "gatv2_sources", "gatv2_destinations"),
    *("maximum", "maximum_grad"),
)
"""Kernels that compute more along an edge than its row's bytes take, by the names under which machines' files time them."""


class Arithmetic(NamedTuple):
    """What a kernel computes along an edge: `kernel`, of EDGE_KERNELS, on so many heads and columns of float32.

    lanes: edges of a row for which an edge's part and its heads' are computed at once, however many there are. read: the
    part of a row that most edges read. beside: whether it computes while the next rows come.
    """

    kernel: str
    heads: float
    columns: float
    lanes: int = 1
    read: float = 1.0
    beside: bool = False


class Share(NamedTuple):
    """An op for some of its heads, and which columns of whole rows it has: of each tensor ranges, one after the other.

    operand, result: of the rows that travel and of the result. local, kept: of the tensors that it reads beside its
    operand, and of those that it keeps. numbered: whether it reads numbers of vertices, the operand's last column.
    """

    op: EdgeOp
    operand: tuple[range, ...]
    local: tuple[tuple[range, ...], ...]
    result: tuple[range, ...]
    kept: tuple[tuple[range, ...], ...]
    numbered: bool


class ByHead(Protocol):
    """An op whose heads are independent of each other."""

    @property
    def heads(self) -> int: ...

    def share(self, heads: range) -> Share:
        """Return the op for some of the heads, and its columns."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of a result: out (V, D), their epilogue, and tensors with the same rows that the op reads or keeps."""

    out: Tensor
    epilogue: Epilogue | None = None
    local: Sequence[Tensor] = ()

    def rows(self, first: int, last: int) -> Target:
        """Return the target of the rows from `first` on; the epilogue's vectors start there, too."""
        rows, epilogue = slice(first, last), self.epilogue
        if epilogue is not None:
            vectors = (epilogue.row_scale, epilogue.row_ids, epilogue.out_scale)
            row_scale, row_ids, out_scale = (None if vector is None else vector[first:] for vector in vectors)
            epilogue = dataclasses.replace(epilogue, row_scale=row_scale, row_ids=row_ids, out_scale=out_scale)
        return Target(self.out[rows], epilogue, [tensor[rows] for tensor in self.local])


class Accumulation(Protocol):
    """A range of rows of one result, from `EdgeOp.begin` to `end`. Work runs in the order of the calls, as a backend's
    does.
    """

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        """Add the messages of one tile: matrix (V, N) has an entry per edge, rows (N, operand columns) are its sources.

        Called once for each tile, in any order; `rows` may be overwritten by work that is ordered after this call.
        last: neither tiles nor partial results follow, so that `end` may be fused into this call.
        """
        ...

    def gather(self, index: Tensor, message: Tensor) -> None:
        """Write the partial result of row index[i] to message[i]; index int32, message (len(index), partial columns)."""
        ...

    def combine(self, message: Tensor, index: Tensor) -> None:
        """Add other ranks' partial results, as `gather` wrote them, to the rows `index` (int32, without repeats)."""
        ...

    def scatter(self, message: Tensor, index: Tensor) -> None:
        """Replace the partial results of the rows `index` (int32, without repeats) by those of a message."""
        ...

    def end(self) -> None:
        """Turn partial results into the result, and apply the epilogue. Called once, after everything else, if V > 0."""
        ...


class EdgeOp(Protocol):
    """One kind of arithmetic along edges, in one direction. Immutable, equal by value; only `begin` needs torch.

    Tiles and ranks' partial results may come in any order: a result may then differ in rounding, nothing else. The order is
    part of a plan, so results repeat bit for bit. A row without edges is zero before the epilogue. The defaults suit an op
    without heads that keeps nothing.
    """

    @property
    def name(self) -> str:
        """Name for messages, such as "sum"."""
        ...

    @property
    def columnwise(self) -> bool:
        """Whether each column of the result depends on the same column of the operand alone, and `local` is empty."""
        ...

    @property
    def by_head(self) -> ByHead | None:
        """The op head by head, if it has heads."""
        return None

    @property
    def additive(self) -> bool:
        """Whether partial results are rows of the result that add up: they may then be scaled, subtracted and kept."""
        ...

    @property
    def adjoint(self) -> EdgeOp:
        """The gradient with respect to the rows that were sent, computed over the transposed tiles."""
        ...

    def columns(self, cols: int) -> Columns:
        """Return how many columns each kind of row has for a result of width `cols`. No count falls as `cols` grows."""
        ...

    def arithmetic(self, cols: int) -> Arithmetic | None:
        """Return what the op computes along an edge for a result of width `cols`; None: less than its row takes to read."""
        return None

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        """Return the buffers that the op writes for its adjoint, one row per row of the result.

        Their lifetime is "kept", and their names begin with `name`.
        """
        return ()

    def begin(self, backend: KernelBackend, target: Target) -> Accumulation:
        """Begin a result: all rows of a rank, a range of them, or none. What target.out holds is overwritten.

        target.local: the tensors that the op reads beside its operand, then those that `kept` declares.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sum(EdgeOp):
    """The sparse product: out = epilogue(A^T h), or epilogue(A g), with the weights of the edges if there are any."""

    name = "sum"
    columnwise = True
    additive = True

    @property
    def adjoint(self) -> Sum:
        return self

    def columns(self, cols: int) -> Columns:
        return Columns(cols, cols, cols)

    def begin(self, backend: KernelBackend, target: Target) -> PartialSums:
        return PartialSums(backend, target)


class PartialSums:
    """Adds up the rows of a sum, tile after tile (`Sum`)."""

    def __init__(self, backend: KernelBackend, target: Target) -> None:
        self._backend = backend
        self._out = target.out
        self._epilogue = target.epilogue
        self._begun = False

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        # The first product overwrites the result, and the last applies the epilogue while a row is in the cache: neither
        # takes a pass of its own.
        epilogue = self._epilogue if last else None
        if matrix.nnz or epilogue is not None or not self._begun:
            self._backend.spmm(matrix, rows, self._out, accumulate=self._begun, epilogue=epilogue)
        self._begun = True
        if last:
            self._epilogue = None

    def gather(self, index: Tensor, message: Tensor) -> None:
        self._backend.gather_rows(self._out, index, message)

    def combine(self, message: Tensor, index: Tensor) -> None:
        self._backend.scatter_add_rows(message, index, self._out)

    def scatter(self, message: Tensor, index: Tensor) -> None:
        self._backend.scatter_rows(message, index, self._out)

    def end(self) -> None:
        if self._epilogue is not None:
            self._backend.finish(self._out, self._out, self._epilogue)


SUM: Final = Sum()


def single_tile(op: EdgeOp, backend: KernelBackend, matrix: Sparse, rows: Tensor, target: Target) -> None:
    """Compute a result that takes one tile."""
    result = op.begin(backend, target)
    result.tile(matrix, rows, last=True)
    result.end()
