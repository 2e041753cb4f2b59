"""Nodes that combine values: weighted sums, columns side by side, the larger of two; and activations other than ReLU.

V rows of this rank, D columns. All are passes of torch over existing matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mggcn.blocks.block import RowSet
from mggcn.model.runtime import Runtime
from mggcn.model.values import Adjoint, Op, PlainKind, Value

SLOPE = 0.01
"""Slope of leaky_relu below zero, as torch's default."""


@dataclass(frozen=True, slots=True)
class Own(PlainKind):
    """The rows of x that belong to a block's targets, its first ones. Runs no op: the memory is that of x."""

    targets: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.targets

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        return Adjoint((Value(Padded(x.rows), (gradient,), value.cols),))

    def run(self, rt: Runtime, op: Op) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Padded(PlainKind):
    """out = the operand's rows, and zeros for the remaining rows of a larger row set."""

    sources: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.sources

    def run(self, rt: Runtime, op: Op) -> None:
        g, out = op.tensor(rt, 0), rt.buffer(op.out)
        out[: g.shape[0]].copy_(g)
        out[g.shape[0] :].zero_()


@dataclass(frozen=True, slots=True)
class AddOwn(PlainKind):
    """out = a, to whose first rows g is added: nothing is added to the others. Operands a and g."""

    title: ClassVar[str] = "add own"
    in_place: ClassVar[tuple[int, ...]] = (0,)

    def run(self, rt: Runtime, op: Op) -> None:
        a, g, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        if out.data_ptr() != a.data_ptr():
            out.copy_(a)
        out[: g.shape[0]].add_(g)


@dataclass(frozen=True, slots=True)
class Scaled(PlainKind):
    """out = factor * x."""

    in_place: ClassVar[tuple[int, ...]] = (0,)
    by_rows: ClassVar[bool] = True
    factor: float

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.mul(op.tensor(rt, 0), self.factor, out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class Blend(PlainKind):
    """out = (1 - share) * a + share * b."""

    in_place: ClassVar[tuple[int, ...]] = (0, 1)
    by_rows: ClassVar[bool] = True
    share: float

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        factors = 1 - self.share, self.share
        a, b = (Value(Scaled(factor), (gradient,), gradient.cols) for factor in factors)
        return Adjoint((a, b))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.lerp(op.tensor(rt, 0), op.tensor(rt, 1), self.share, out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class Concat(PlainKind):
    """out = the operands' columns, one after the other."""

    by_rows: ClassVar[bool] = True
    widths: tuple[int, ...]

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        starts = [sum(self.widths[:place]) for place in range(len(self.widths))]
        pairs = zip(starts, self.widths, strict=True)
        return Adjoint(tuple(Value(Columns(first), (gradient,), width) for first, width in pairs))

    def run(self, rt: Runtime, op: Op) -> None:
        out, first = rt.buffer(op.out), 0
        for index, width in enumerate(self.widths):
            out[:, first : first + width].copy_(op.tensor(rt, index))
            first += width


@dataclass(frozen=True, slots=True)
class Columns(PlainKind):
    """out = columns first, ... of x."""

    by_rows: ClassVar[bool] = True
    first: int

    def run(self, rt: Runtime, op: Op) -> None:
        rt.buffer(op.out).copy_(op.tensor(rt, 0)[:, self.first : self.first + op.cols])


@dataclass(frozen=True, slots=True)
class Larger(PlainKind):
    """out = max(a, b), element by element; the gradient of equals is the first one's."""

    by_rows: ClassVar[bool] = True

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        return Adjoint(tuple(Value(LargerGrad(place), (gradient, *value.operands), value.cols) for place in (0, 1)))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.maximum(op.tensor(rt, 0), op.tensor(rt, 1), out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class LargerGrad(PlainKind):
    """out = g where operand `place` of a, b was taken, else 0. Operands g, a and b."""

    by_rows: ClassVar[bool] = True
    place: int

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        g, a, b = (op.tensor(rt, index) for index in range(3))
        taken = torch.ge if self.place == 0 else torch.lt
        taken(a, b, out=rt.buffer(op.out)).mul_(g)


@dataclass(frozen=True, slots=True)
class Activation(PlainKind):
    """out = f(z): elu (alpha 1), leaky_relu (SLOPE), or gelu by the error function, as torch's defaults."""

    title: ClassVar[str] = "{self.name} {self.site}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    by_rows: ClassVar[bool] = True
    name: Literal["elu", "leaky_relu", "gelu"]
    site: int

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        # The derivatives of elu and leaky_relu follow from their results, so z need not be kept.
        kept = value.operands[0] if self.name == "gelu" else value
        return Adjoint((Value(ActivationBack(self.name, self.site), (gradient, kept), value.cols),))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        z, out, aten = op.tensor(rt, 0), rt.buffer(op.out), torch.ops.aten
        if self.name == "elu":
            aten.elu.out(z, 1.0, 1.0, 1.0, out=out)
        elif self.name == "leaky_relu":
            aten.leaky_relu.out(z, SLOPE, out=out)
        else:
            aten.gelu.out(z, out=out)


@dataclass(frozen=True, slots=True)
class ActivationBack(PlainKind):
    """The gradient of z from that of f(z). Operands: g and the result of f, or for gelu its operand."""

    title: ClassVar[str] = "{self.name}-grad {self.site}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    by_rows: ClassVar[bool] = True
    name: Literal["elu", "leaky_relu", "gelu"]
    site: int

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        g, kept, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        aten: Any = torch.ops.aten
        if self.name == "elu":
            aten.elu_backward.grad_input(g, 1.0, 1.0, 1.0, True, kept, grad_input=out)
        elif self.name == "leaky_relu":
            aten.leaky_relu_backward.grad_input(g, kept, SLOPE, True, grad_input=out)
        else:
            aten.gelu_backward.grad_input(g, kept, grad_input=out)
