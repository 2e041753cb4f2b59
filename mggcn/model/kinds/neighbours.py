"""Maximum and attention over neighbours as nodes: the steps around their edge operations, and the gradients of both.

V rows of this rank, D columns, H heads of C columns, D = H C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mggcn.aggregate.attention import Attention, AttentionDestinations, AttentionSpec, Bound
from mggcn.aggregate.edge_op import EdgeOp
from mggcn.backend.base import keep_scale
from mggcn.blocks.block import Block, RowSet
from mggcn.model.kinds.aggregate import Aggregate, Part
from mggcn.model.kinds.elementwise import NOTHING, EpilogueSpec
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor


def write_numbers(rt: Runtime, column: Tensor, rows: RowSet) -> None:
    """Column (V, 1) = the numbers of the rows' vertices in the whole graph, as integers of its size."""
    import torch

    integers = {4: torch.int32, 8: torch.int64}[column.itemsize]
    column.view(integers).copy_(rt.inputs.rows[rows].ids[:, None])


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Return rows (V, D) as (V, H, C)."""
    return rows.view(rows.shape[0], heads, rows.shape[1] // heads)


@dataclass(frozen=True, slots=True)
class Numbered(PlainKind):
    """out (V, D + 1) = [x | number of the vertex]; its gradient is that of x."""

    title: ClassVar[str] = "numbered {self.site}"
    by_rows: ClassVar[bool] = True
    site: int

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((gradient,))

    def run(self, rt: Runtime, op: Op) -> None:
        x, out = op.tensor(rt, 0), rt.buffer(op.out)
        out[:, :-1].copy_(x)
        write_numbers(rt, out[:, -1:], op.rows)


@dataclass(frozen=True, slots=True)
class Joined(PlainKind):
    """out = the operands' columns, one after the other."""

    title: ClassVar[str] = "joined {self.site}"
    by_rows: ClassVar[bool] = True
    site: int

    def run(self, rt: Runtime, op: Op) -> None:
        out, first = rt.buffer(op.out), 0
        for index, width in enumerate(op.widths):
            out[:, first : first + width].copy_(op.tensor(rt, index))
            first += width


@dataclass(frozen=True, slots=True)
class MaximumRule:
    """The gradient of `Maximum` as nodes."""

    def bound(self, op: EdgeOp, rt: Runtime) -> EdgeOp:
        return op

    def adjoint(self, kind: Aggregate, value: Value, gradient: Value) -> Adjoint:
        winners = Value(Part("winners"), (value,), value.cols)
        message = Value(Joined(kind.site), (gradient, winners), 2 * value.cols)
        back = dataclasses.replace(kind, backward=True, op=kind.op.adjoint)
        return Adjoint((Value(back, (message,), value.cols),))


@dataclass(frozen=True, slots=True)
class Scores(PlainKind):
    """out = [x | s | number, with dropout], t beside it, of GAT: by head s = a_s x and t = a_t x.

    source, destination: parameters (H, C). The aggregation that reads it gives the complete gradient of x.
    """

    title: ClassVar[str] = "scores {self.site}"
    has_parameters = True
    by_rows: ClassVar[bool] = True
    spec: AttentionSpec
    site: int
    source: str
    destination: str

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"t": Scratch(self.spec.heads)}

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((gradient,))

    def run(self, rt: Runtime, op: Op) -> None:
        x, out, width = op.tensor(rt, 0), rt.buffer(op.out), self.spec.width
        out[:, :width].copy_(x)
        rt.backend.neighbours.head_dots(x, rt.parameter(self.source).flatten(), out[:, width : self.spec.travels])
        rt.backend.neighbours.head_dots(x, rt.parameter(self.destination).flatten(), rt.buffer(op.scratch["t"]))
        if self.spec.dropout:
            write_numbers(rt, out[:, -1:], op.rows)


@dataclass(frozen=True, slots=True)
class AttentionMessage(PlainKind):
    """out = [g | d | t or y | m | 1 / l | number, with dropout], d = g z by head. Operands g, z, t or y, and m with l.

    after: the bias, ReLU and dropout between z and the second operand, which is read in its place
    (model/rewrite/storage.py): where g is not zero, z is that operand less dropout's factor and the bias.
    """

    title: ClassVar[str] = "attention-message {self.site}"
    by_rows: ClassVar[bool] = True
    spec: AttentionSpec
    site: int
    after: EpilogueSpec = NOTHING

    @property
    def has_parameters(self) -> bool:
        return bool(self.after.bias)

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        out, (g, z, own, state) = rt.buffer(op.out), (op.tensor(rt, i) for i in range(4))
        heads, width, first = self.spec.heads, self.spec.width, self.spec.width + self.spec.heads
        out[:, :width].copy_(g)
        dots, unused = out[:, width:first], out[:, first : first + heads]
        rt.backend.neighbours.head_dots(g, z, dots)
        if self.after.dropout:
            dots.div_(float(np.float32(keep_scale(self.after.dropout))))  # as kernels round it
        if self.after.bias:
            rt.backend.neighbours.head_dots(g, rt.parameter(self.after.bias), unused)
            dots.sub_(unused)
        out[:, first : first + self.spec.scored].copy_(own)
        first += self.spec.scored
        out[:, first : first + heads].copy_(state[:, :heads])
        torch.reciprocal(state[:, heads:], out=out[:, first + heads : first + 2 * heads])
        if self.spec.dropout:
            write_numbers(rt, out[:, -1:], op.rows)


@dataclass(frozen=True, slots=True)
class ScoresGrad(PlainKind):
    """out (V, D) = dx + a_s ds + a_t dt, of GAT; the gradients of a_s and a_t are sums of x ds and x dt over all rows.

    Operands [dx | ds], dt and [x | ...].
    """

    title: ClassVar[str] = "scores-grad {self.site}"
    by_rows: ClassVar[bool] = True
    spec: AttentionSpec
    site: int
    source: str
    destination: str

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"products": Scratch(self.spec.width, self.spec.heads)}

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        moved, dt, x = (op.tensor(rt, i) for i in range(3))
        heads, width, out = self.spec.heads, self.spec.width, rt.buffer(op.out)
        ds, products = moved[:, width:], rt.buffer(op.scratch["products"])
        out.copy_(moved[:, :width])
        rows, cols = by_head(out, heads), width // heads
        for name, scores in ((self.source, ds), (self.destination, dt)):
            count = scores.shape[0]  # destinations are the first of the sources
            torch.addcmul(rows[:count], scores[:, :, None], rt.parameter(name), out=rows[:count])
            # Products of every head's scores with every head's columns; only those of a head with its own columns count.
            rt.backend.matmul(scores.t(), x[:count, :width], products)
            for head in range(heads):
                rt.gradient(name)[head].copy_(products[head, head * cols : (head + 1) * cols])


@dataclass(frozen=True, slots=True)
class HeadWeightGrad(PlainKind):
    """The gradient of a (H, C) of GATv2 = the sums of the columns of its rows (V, D)."""

    title: ClassVar[str] = "attention-weight-grad {self.site}"
    stored = False
    weight: str
    site: int

    @property
    def gradient_of(self) -> str:
        return self.weight

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.sum(op.tensor(rt, 0), 0, out=rt.gradient(self.weight).flatten())


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The gradient of attention as nodes. weights: a_s and a_t of GAT, a of GATv2, parameters (H, C)."""

    spec: AttentionSpec
    weights: tuple[str, ...]

    def bound(self, op: EdgeOp, rt: Runtime) -> EdgeOp:
        a = rt.parameter(self.weights[0]) if self.spec.dynamic else None
        spec = dataclasses.replace(self.spec, bound=Bound(a, rt.clock))
        return dataclasses.replace(op, spec=spec)  # type: ignore[type-var]

    def adjoint(self, kind: Aggregate, value: Value, gradient: Value) -> Adjoint:
        spec, site, (travelled, own) = self.spec, kind.site, value.operands
        state = Value(Part("state"), (value,), 2 * spec.heads)
        message = Value(AttentionMessage(spec, site), (gradient, value, own, state), spec.backwards)
        back = dataclasses.replace(kind, backward=True, op=kind.op.adjoint)
        sources = Value(back, (message, travelled), spec.travels)
        # The rows as the pass to the sources leaves them: where vertices have copies, their gradients are complete by
        # then.
        whole = Value(Part(""), (sources,), spec.backwards)
        along = dataclasses.replace(kind, op=AttentionDestinations(spec), what="destinations")
        destinations = Value(along, (travelled, whole), spec.scored)
        if spec.dynamic:
            rows = Value(Part("weights"), (destinations,), spec.width)
            effect = Value(HeadWeightGrad(self.weights[0], site), (rows,))
            return Adjoint((sources, destinations), (effect,))
        grad = ScoresGrad(spec, site, *self.weights)
        return Adjoint((Value(grad, (sources, destinations, travelled), spec.width), None))


def attend(x: Value, own: Value, rule: AttentionRule, block: Block) -> Value:
    """Return attention over the neighbours' rows x, [x | s] or x, for destinations that have t or y."""
    kind = Aggregate(rule.spec.site, block=block, op=Attention(rule.spec), rule=rule)
    return Value(kind, (x, own), rule.spec.width)


@dataclass(frozen=True, slots=True)
class HeadMean(PlainKind):
    """out (V, C) = the mean over heads of x (V, D)."""

    title: ClassVar[str] = "head-mean {self.site}"
    by_rows: ClassVar[bool] = True
    heads: int
    site: int

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (x,) = value.operands
        return Adjoint((Value(HeadMeanGrad(self.heads, self.site), (gradient,), x.cols),))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.mean(by_head(op.tensor(rt, 0), self.heads), 1, out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class HeadMeanGrad(PlainKind):
    """out (V, D) = g (V, C) / H for every head."""

    title: ClassVar[str] = "head-mean-grad {self.site}"
    by_rows: ClassVar[bool] = True
    heads: int
    site: int

    def run(self, rt: Runtime, op: Op) -> None:
        out = rt.buffer(op.out)
        by_head(out, self.heads).copy_(op.tensor(rt, 0)[:, None, :])
        out.mul_(1 / self.heads)
