"""Nodes that score pairs of vertices from their embeddings: dot products, or products column by column, on which dense
layers follow; and those that bring the rows of all ranks together.

N vertices, V rows of this rank, S rows that pairs are of, M pairs, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mggcn.backend.base import KernelBackend
from mggcn.blocks.block import EVERYONE, PAIRS, RowSet
from mggcn.memory.arena import BufferSpec
from mggcn.model.runtime import PairRows, Runtime, Sizes, require
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor


def scored_pairs(value: Value, num_vertices: int, dtype: str) -> Value:
    """Return the rows of which pairs are: those of `value`, or on several ranks all vertices' (num_vertices > 0)."""
    if not num_vertices:
        return value
    nbytes = BufferSpec("", num_vertices, value.cols, dtype).nbytes
    return Value(Everyone(nbytes), (value,), value.cols)


@dataclass(frozen=True, slots=True)
class Everyone(PlainKind):
    """out (N, D) = the rows of all ranks, by vertex: zeros but for those that this rank counts, summed over ranks.

    nbytes: of the result with its padding.
    """

    title: ClassVar[str] = "rows of all ranks"
    nbytes: int

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return EVERYONE

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return (self.nbytes,)

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        return Adjoint((Value(OwnGradient(self.nbytes, x.rows), (gradient,), value.cols),))

    def run(self, rt: Runtime, op: Op) -> None:
        x, out, inputs = op.tensor(rt, 0), rt.buffer(op.out), rt.inputs.owned
        flat = _with_padding(out).zero_()
        if inputs.owned is None:
            out.index_copy_(0, inputs.ids, x)
        else:
            out.index_copy_(0, inputs.ids[inputs.owned], x[inputs.owned])
        rt.sum_over_ranks(flat)


@dataclass(frozen=True, slots=True)
class OwnGradient(PlainKind):
    """out (V, D) = this rank's rows of the sum over ranks of g (N, D), which is overwritten; copies of rows get zeros."""

    title: ClassVar[str] = "gradients of all ranks"
    nbytes: int
    of: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return (self.nbytes,)

    @property
    def overwrites(self) -> tuple[int, ...]:
        return (0,)

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        g, out, inputs = op.tensor(rt, 0), rt.buffer(op.out), rt.inputs.owned
        rt.sum_over_ranks(_with_padding(g))
        if inputs.owned is None:
            torch.index_select(g, 0, inputs.ids, out=out)
        else:
            out.zero_().index_copy_(0, inputs.owned, g[inputs.ids[inputs.owned]])


@dataclass(frozen=True, slots=True)
class PairDot(PlainKind):
    """out (M, 1) = the dot product of the two rows of each pair of x (S, D)."""

    title: ClassVar[str] = "pair-dot"

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return PAIRS

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        return Adjoint((Value(PairDotGrad(x.rows), (gradient, x), x.cols),))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return _both_ends(value.operands[0].cols, sizes)

    def run(self, rt: Runtime, op: Op) -> None:
        heads, tails = (rt.buffer(op.scratch[end]) for end in ("heads", "tails"))
        pair_dot(rt.backend, op.tensor(rt, 0), require(rt.inputs.pairs), heads, tails, rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class PairDotGrad(PlainKind):
    """The gradient of x (S, D) from g (M, 1): for every row the sum of its partners' rows, each times its pair's gradient.

    Operands g and x. One sparse product, whose values are the gradients of pairs.
    """

    title: ClassVar[str] = "pair-dot-grad"
    of: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    def run(self, rt: Runtime, op: Op) -> None:
        pair_dot_grad(rt.backend, op.tensor(rt, 0), op.tensor(rt, 1), require(rt.inputs.pairs), rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class PairProduct(PlainKind):
    """out (M, D) = the product, column by column, of the two rows of each pair of x (S, D)."""

    title: ClassVar[str] = "pair-product"

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return PAIRS

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        return Adjoint((Value(PairProductGrad(x.rows), (gradient, x), x.cols),))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"tails": _both_ends(value.cols, sizes)["tails"]}

    def run(self, rt: Runtime, op: Op) -> None:
        tails = rt.buffer(op.scratch["tails"])
        pair_product(rt.backend, op.tensor(rt, 0), require(rt.inputs.pairs), tails, rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class PairProductGrad(PlainKind):
    """The gradient of x (S, D) from g (M, D): the gradients of all ends, g times the row at the other end, summed by row.

    Operands g and x. The sum is a sparse product, whose columns are ends: heads, then tails.
    """

    title: ClassVar[str] = "pair-product-grad"
    of: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"ends": Scratch(value.cols, 2 * sizes.rows[PAIRS])}

    def run(self, rt: Runtime, op: Op) -> None:
        g, x, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        ends = rt.buffer(op.scratch["ends"])[: 2 * g.shape[0]]
        pair_product_grad(rt.backend, g, x, require(rt.inputs.pairs), ends, out)


def pair_dot(backend: KernelBackend, x: Tensor, pairs: PairRows, heads: Tensor, tails: Tensor, out: Tensor) -> None:
    """Compute out (M, 1), the dot product of both rows of x (S, D) of each pair. heads, tails (B, D): room for B rows."""
    import torch

    for some in _blocks(out.shape[0], heads.shape[0]):
        count = some.stop - some.start
        backend.gather_rows(x, pairs.heads[some], heads[:count])
        backend.gather_rows(x, pairs.tails[some], tails[:count])
        torch.sum(heads[:count].mul_(tails[:count]), 1, keepdim=True, out=out[some])


def pair_dot_grad(backend: KernelBackend, g: Tensor, x: Tensor, pairs: PairRows, out: Tensor) -> None:
    """Compute out (S, D), the gradient of x from that of the dot products g (M, 1)."""
    import torch

    torch.index_select(g[:, 0], 0, pairs.pair, out=require(pairs.matrix.values))
    backend.spmm(pairs.matrix, x, out, accumulate=False, epilogue=None)


def pair_product(backend: KernelBackend, x: Tensor, pairs: PairRows, tails: Tensor, out: Tensor) -> None:
    """Compute out (M, D), the product of both rows of x (S, D) of each pair. tails (B, D): room for B of them."""
    for some in _blocks(out.shape[0], tails.shape[0]):
        count = some.stop - some.start
        backend.gather_rows(x, pairs.heads[some], out[some])
        backend.gather_rows(x, pairs.tails[some], tails[:count])
        out[some].mul_(tails[:count])


def pair_product_grad(backend: KernelBackend, g: Tensor, x: Tensor, pairs: PairRows, ends: Tensor, out: Tensor) -> None:
    """Compute out (S, D), the gradient of x from that of the products g (M, D). ends (2 M, D): room for those of ends."""
    count = g.shape[0]
    for half, other in ((ends[:count], pairs.tails), (ends[count:], pairs.heads)):
        backend.gather_rows(x, other, half)
        half.mul_(g)
    backend.spmm(pairs.matrix, ends, out, accumulate=False, epilogue=None)


def _both_ends(cols: int, sizes: Sizes) -> dict[str, Scratch]:
    """Room for the rows of some pairs, which stay in the cache."""
    rows = sizes.block_rows(cols, PAIRS)
    return {end: Scratch(cols, rows) for end in ("heads", "tails")}


def _blocks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _with_padding(matrix: Tensor) -> Tensor:
    """Return a buffer as the vector that it lies in, padding included: messages are contiguous."""
    return matrix.as_strided((matrix.shape[0] * matrix.stride(0),), (1,))
