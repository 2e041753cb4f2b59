"""Dense products: a layer, the gradient of its input and of its weights, by blocks of rows while these are in the cache.

V rows of this rank, D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mggcn.backend.base import Epilogue
from mggcn.model.kinds.elementwise import (
    NOTHING,
    ActivationGrad,
    EpilogueSpec,
    partial_sums,
    result_beside,
    sum_partials,
)
from mggcn.model.runtime import Runtime, Sizes, require
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor


def product_of_rows(
    rt: Runtime, a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue | None, first_row: int, sums: str
) -> None:
    """Out = epilogue(a @ b) for rows first_row, ...; sums: room for them if out has another type, or ""."""
    if not sums or rt.backend.fuses_products:
        rt.backend.matmul(a, b, out, epilogue=epilogue, first_row=first_row)
        return
    block = rt.buffer(sums)[: out.shape[0]]
    rt.backend.matmul(a, b, block)
    rt.backend.finish(block, out, epilogue if epilogue is not None else Epilogue(), first_row)


def finished_product(
    rt: Runtime, a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue | None, block_rows: int, sums: str
) -> None:
    """Out = epilogue(a @ b): at once, or by blocks of rows, finished and rounded while they are in the cache."""
    whole = (epilogue is None and not sums) or rt.backend.fuses_products
    step = max(1, out.shape[0] if whole else block_rows)
    for first in range(0, out.shape[0], step):
        some = slice(first, first + step)
        product_of_rows(rt, a[some], b, out[some], epilogue, first, sums)


def rounded_sums(value: Value, sizes: Sizes, block_rows: int) -> dict[str, Scratch]:
    """Return the scratch memory for rows of a product before rounding; none if they are not rounded."""
    return {"sums": Scratch(value.cols, block_rows)} if value.operand and sizes.rounds else {}


def summed_weights(rows: int, cols: int, added: str) -> dict[str, Scratch]:
    """Return the scratch memory for the sum of two weight matrices; none without a second one."""
    return {"weights": Scratch(cols, rows)} if added else {}


def weights_of(rt: Runtime, op: Op, weight: str, added: str) -> Tensor:
    """Return a weight matrix in the type that products read, or its sum with a second one."""
    if not added:
        return rt.operand(weight)
    import torch

    return torch.add(rt.parameter(weight), rt.parameter(added), out=rt.buffer(op.scratch["weights"]))


@dataclass(frozen=True, slots=True)
class Linear(PlainKind):
    """out (V, E) = finish(x (V, D) @ W); recomputed: the epilogue of the constant input that gives x, computed again by
    blocks of rows.

    added: a second matrix, "" for none; the product is then that of their sum. block_rows: rows of a block, which the
    lowering sets.
    """

    title: ClassVar[str] = "linear {self.layer}"
    has_parameters = True
    by_rows: ClassVar[bool] = True
    weight: str
    layer: int
    finish: EpilogueSpec = NOTHING
    recomputed: EpilogueSpec | None = None
    added: str = ""
    block_rows: int = 0

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        weight_grad = Value(WeightGrad(self.weight, self.layer, added=self.added), (x, gradient))
        rows_grad = Value(LinearGrad(self.weight, self.layer, added=self.added), (gradient,), x.cols)
        return Adjoint((rows_grad,), (weight_grad,))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        width = value.operands[0].cols
        block = {"block": Scratch(width, self.block_rows)} if self.recomputed else {}
        sums = rounded_sums(value, sizes, self.block_rows)
        return block | sums | summed_weights(width, value.cols, self.added)

    def run(self, rt: Runtime, op: Op) -> None:
        x, out, sums = op.tensor(rt, 0), rt.buffer(op.out), op.scratch.get("sums", "")
        weight, epilogue = weights_of(rt, op, self.weight, self.added), self.finish.epilogue(rt, op.rows)
        if self.recomputed is None:
            finished_product(rt, x, weight, out, epilogue, self.block_rows, sums)
            return
        for first in range(0, out.shape[0], self.block_rows):
            some = slice(first, first + self.block_rows)
            block = recomputed_block(rt, op, x[some], self.recomputed, first)
            product_of_rows(rt, block, weight, out[some], epilogue, first, sums)


def recomputed_block(rt: Runtime, op: Op, x: Tensor, spec: EpilogueSpec, first_row: int) -> Tensor:
    """Fill the op's block with spec(x), rows first_row, ... of the input, and return these rows."""
    block = rt.buffer(op.scratch["block"])[: x.shape[0]]
    rt.backend.finish(x, block, spec.epilogue(rt, op.sets[0]) or Epilogue(), first_row)
    return block


@dataclass(frozen=True, slots=True)
class WeightGrad(PlainKind):
    """dW (D, E) = x^T g; recomputed: as of Linear, in order of the blocks. added: a second matrix of the same gradient."""

    title: ClassVar[str] = "weight-grad {self.layer}"
    stored = False
    by_rows: ClassVar[bool] = True
    weight: str
    layer: int
    recomputed: EpilogueSpec | None = None
    added: str = ""
    block_rows: int = 0

    @property
    def gradient_of(self) -> str:
        return self.weight

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"block": Scratch(value.operands[0].cols, self.block_rows)} if self.recomputed else {}

    def run(self, rt: Runtime, op: Op) -> None:
        x, g, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.gradient(self.weight)
        if self.recomputed is None:
            rt.backend.matmul(x.t(), g, out)
        else:
            if not rt.continues:
                out.zero_()
            for first in range(0, g.shape[0], self.block_rows):
                some = slice(first, first + self.block_rows)
                block = recomputed_block(rt, op, x[some], self.recomputed, first)
                with rt.apart():
                    rt.backend.matmul(block.t(), g[some], out, accumulate=True)
        if self.added:
            rt.gradient(self.added).copy_(out)


@dataclass(frozen=True, slots=True)
class LinearGrad(PlainKind):
    """dx (V, D) = finish(g (V, E) @ W^T); added: as of Linear."""

    title: ClassVar[str] = "product-grad {self.layer}"
    by_rows: ClassVar[bool] = True
    weight: str
    layer: int
    finish: EpilogueSpec = NOTHING
    added: str = ""
    block_rows: int = 0

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        weights = summed_weights(value.cols, value.operands[0].cols, self.added)
        return rounded_sums(value, sizes, self.block_rows) | weights

    def run(self, rt: Runtime, op: Op) -> None:
        weight, sums = weights_of(rt, op, self.weight, self.added).t(), op.scratch.get("sums", "")
        finished_product(
            rt, op.tensor(rt, 0), weight, rt.buffer(op.out), self.finish.epilogue(rt, op.rows), self.block_rows, sums
        )


@dataclass(frozen=True, slots=True)
class InputGrad(PlainKind):
    """The gradient before the activation that made x: `activation` of g (V, E) @ W^T, computed one block at a time.

    Operands g and x; the result takes the place of x, or is stored beside it in another type. added: as of Linear.
    """

    title: ClassVar[str] = "input-grad {self.layer}"
    in_place: ClassVar[tuple[int, ...]] = (1,)
    by_rows: ClassVar[bool] = True
    weight: str
    layer: int
    activation: ActivationGrad
    added: str = ""
    block_rows: int = 0

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        block = {"block": Scratch(value.cols, self.block_rows)}
        weights = summed_weights(value.cols, value.operands[0].cols, self.added)
        return block | weights | partial_sums(value, sizes, self.activation.sums)

    def run(self, rt: Runtime, op: Op) -> None:
        h, out = result_beside(op.tensor(rt, 1), rt.buffer(op.out))
        gradient, block = self.activation.gradient(rt, op), rt.buffer(op.scratch["block"])
        weight = weights_of(rt, op, self.weight, self.added).t()
        rt.backend.product_grad(op.tensor(rt, 0), weight, h, block, gradient, out)
        sum_partials(rt, gradient.partials, self.activation.sums)


@dataclass(frozen=True, slots=True)
class SparseLinear(PlainKind):
    """out (V, E) = finish(M @ W) with M the sparse input (V, D) of a row set, or its values under this epoch's mask."""

    title: ClassVar[str] = "sparse-linear {self.layer}"
    has_parameters = True
    by_columns = True
    weight: str
    layer: int
    dropped: bool
    finish: EpilogueSpec = NOTHING

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (matrix,) = value.operands
        kind = SparseWeightGrad(self.weight, self.layer, self.dropped)
        return Adjoint((None,), (Value(kind, (matrix, gradient)),))

    def run(self, rt: Runtime, op: Op) -> None:
        x = require(rt.inputs.rows[op.sets[0]].sparse)
        matrix = require(x.dropped) if self.dropped else x.rows
        epilogue = self.finish.epilogue(rt, op.rows)
        rt.backend.spmm(matrix, rt.operand(self.weight), rt.buffer(op.out), accumulate=False, epilogue=epilogue)


@dataclass(frozen=True, slots=True)
class SparseWeightGrad(PlainKind):
    """dW (D, E) = M^T g with M as of SparseLinear. Operands M and g."""

    title: ClassVar[str] = "sparse-weight-grad {self.layer}"
    stored = False
    by_columns = True
    weight: str
    layer: int
    dropped: bool

    @property
    def gradient_of(self) -> str:
        return self.weight

    def run(self, rt: Runtime, op: Op) -> None:
        x = require(rt.inputs.rows[op.sets[0]].sparse)
        matrix = require(x.dropped_t if self.dropped else x.rows_t)
        rt.backend.spmm(matrix, op.tensor(rt, 1), rt.gradient(self.weight), accumulate=False, epilogue=None)
