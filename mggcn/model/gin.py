"""GIN's convolution, and the nodes of its learnt weight of a vertex itself.

V rows of this rank, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mggcn.model.builder import Builder
from mggcn.model.kinds.norms import partial_sums, partials_of, totals_of
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value


def gin(b: Builder, x: Value, width: int, last: bool) -> Value:
    """f(((1 + eps) x + A^T x) W_1 + b_1) W_2 + b_2 with f model.activation (Xu et al. 2019, eq. 4.1), eps learnt.

    W_1 comes before the sum, which it commutes with. Parameters are those of PyG's GINConv with two dense layers; eps is
    layers.<l>.eps (1,), from 0.
    """
    h = b.linear(x, width)
    eps = b.parameter(f"layers.{b.layer}.eps", (1,))
    itself = b.node(SelfWeight(eps, b.layer), b.own(h), cols=width)
    h = b.activation(b.bias(b.add(itself, b.neighbours(h))))
    return b.bias(b.linear(h, width))


@dataclass(frozen=True, slots=True)
class SelfWeight(PlainKind):
    """out = (1 + eps) * x with a parameter eps (1,)."""

    title: ClassVar[str] = "self-weight {self.site}"
    has_parameters = True
    eps: str
    site: int

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        effect = Value(SelfWeightGrad(self.eps, self.site), (gradient, x))
        back = Value(SelfWeightBack(self.eps, self.site), (gradient,), x.cols)
        return Adjoint((back,), (effect,))

    def run(self, rt: Runtime, op: Op) -> None:
        weighted(rt, self.eps, op)


def weighted(rt: Runtime, eps: str, op: Op) -> None:
    """Out = (1 + eps) * x."""
    import torch

    x = op.tensor(rt, 0)
    torch.mul(x, (rt.parameter(eps) + 1).to(x.dtype), out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class SelfWeightBack(PlainKind):
    """out = (1 + eps) * g."""

    title: ClassVar[str] = "self-weight-grad {self.site}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    eps: str
    site: int

    def run(self, rt: Runtime, op: Op) -> None:
        weighted(rt, self.eps, op)


@dataclass(frozen=True, slots=True)
class SelfWeightGrad(PlainKind):
    """The gradient of eps: the sum of g * x. Operands g and x."""

    title: ClassVar[str] = "self-weight-sum {self.site}"
    stored = False
    eps: str
    site: int

    @property
    def gradient_of(self) -> str:
        return self.eps

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, sums=2)

    def run(self, rt: Runtime, op: Op) -> None:
        g, x = op.tensor(rt, 0), op.tensor(rt, 1)
        partials = partials_of(rt, op, x.shape[1])
        rt.backend.norms.column_products(g, x, None, partials)
        rt.gradient(self.eps).copy_(totals_of(rt, op, partials)[1].sum())
