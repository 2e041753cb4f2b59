"""Sums over neighbours, forwards and backwards, and by panels for a constant input; other edge operations, with the
tensors that they read and keep besides the rows that are sent. V rows of this rank, E width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from mggcn.aggregate.base import aggregate_name
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.backend.base import Epilogue
from mggcn.blocks.block import OWNED, WHOLE, Block, RowSet
from mggcn.errors import PlanError
from mggcn.model.kinds.elementwise import NOTHING, EpilogueSpec
from mggcn.model.kinds.relations import RelationWeights
from mggcn.model.runtime import Runtime, Sizes, require
from mggcn.model.values import Adjoint, Graph, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

SLOT = "slot "
"""Prefix of the names of the strategy's own buffers among an op's scratch."""


class Rule(Protocol):
    """How to run and differentiate an edge operation that keeps rows for its gradient, or reads rows that are not
    sent.
    """

    def bound(self, op: EdgeOp, rt: Runtime) -> EdgeOp:
        """Return the operation with the tensors that it reads from a rank's runtime."""
        ...

    def adjoint(self, kind: Aggregate, value: Value, gradient: Value) -> Adjoint:
        """Return the gradients of the operands of `value`, whose kind is `kind`."""
        ...


@dataclass(frozen=True, slots=True)
class Part(PlainKind):
    """Memory that the operand's node leaves besides its result: the scratch of this name, or for "" the rows that were
    sent, as the pass leaves them. Runs no op: the memory lives until nothing reads it.
    """

    purpose: str

    def rows(self, operands: Sequence[Value]) -> RowSet:
        (whole,) = operands
        return whole.rows if self.purpose else whole.operands[0].rows

    def run(self, rt: Runtime, op: Op) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Aggregate(PlainKind):
    """out (V, E) = finish(A^T x); backward: finish(A x). op: the edge operation, if it is not a sum.

    site: its number in the model, from 1. block: over which it runs, from sources to targets, backwards the other way.
    rule: of an op with more operands than x or with kept rows: its local tensors are the further operands, the numbers of
    the vertices, and what it keeps. what: name of a second aggregation of a site in the same direction.
    relations: the weights of a `Relational` op, whose backward pass reads x again, as a second operand, and writes their
    gradients.
    """

    site: int
    finish: EpilogueSpec = NOTHING
    backward: bool = False
    block: Block = WHOLE
    op: EdgeOp = SUM
    rule: Rule | None = None
    what: str = ""
    relations: RelationWeights | None = None

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.block.sources if self.backward else self.block.targets

    @property
    def has_parameters(self) -> bool:
        return self.relations is not None

    @property
    def gradient_of(self) -> str:
        return self.relations.bases if self.relations is not None and self.backward else ""

    @property
    def overwrites(self) -> tuple[int, ...]:
        # A strategy may overwrite the gradient.
        return (0,) if self.backward else ()

    @property
    def by_columns(self) -> bool:
        return self.op.columnwise and self.rule is None and self.relations is None

    @property
    def name(self) -> str:
        """Name of the aggregation, which is the prefix of its buffers' names."""
        name = aggregate_name(self.site, self.backward)
        return f"{name}.{self.what}" if self.what else name

    @property
    def label(self) -> str:
        label = f"aggregate-grad {self.site}" if self.backward else f"aggregate {self.site}"
        return f"{self.what} {self.site}" if self.what else label

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        if self.rule is not None:
            return self.rule.adjoint(self, value, gradient)
        kind = Aggregate(self.site, backward=not self.backward, block=self.block, op=self.op.adjoint)
        if self.relations is None:
            return Adjoint((Value(kind, (gradient,), value.cols),))
        (x,) = value.operands
        # One pass gives both gradients; that of a constant input is left out.
        wanted = any(below.kind.has_parameters for below in Graph((x,)).values())
        op = replace(kind.op, of_rows=wanted)  # type: ignore[type-var]
        both = Value(replace(kind, op=op, relations=self.relations), (gradient, x), x.cols if wanted else 1)
        return Adjoint((both if wanted else None,), (both,))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        """Return what the op keeps; the strategy's memory is its plan's.

        Raises: PlanError for kept rows without a rule for their gradient, or in a type that cannot hold them.
        """
        kept = self.op.kept(self.name, sizes.rows[value.rows], value.cols, sizes.dtype)
        if kept and self.rule is None:
            raise PlanError(
                f"the edge operation {self.op.name} keeps {', '.join(spec.name for spec in kept)} for its gradient; "
                "give its node a rule that uses them"
            )
        if self.rule is not None and "bf16" in (sizes.dtype, sizes.operand):
            raise PlanError(
                f"{self.op.name} of neighbours stores maxima and vertex numbers, which bfloat16 cannot hold; "
                "use run.precision fp32, tf32 or fp64"
            )
        room = {} if self.relations is None else self.relations.scratch(self.op, sizes, value.rows)  # type: ignore[arg-type]
        return {**room, **{spec.name.removeprefix(f"{self.name}."): Scratch(spec.cols) for spec in kept}}

    def run(self, rt: Runtime, op: Op) -> None:
        aggregation = rt.aggregation(self.block)
        move = aggregation.backward if self.backward else aggregation.forward
        slots, edge_op = slots_of(rt, op.scratch), self.op
        local = [op.tensor(rt, index) for index in range(1, len(op.operands))]
        if self.rule is not None:
            kept = [rt.buffer(name) for purpose, name in op.scratch.items() if not purpose.startswith(SLOT)]
            local = [*local, rt.inputs.rows[op.rows].ids, *kept]
            edge_op = self.rule.bound(edge_op, rt)
        if self.relations is not None:
            edge_op = self.relations.bound(self.op, rt, op)  # type: ignore[arg-type]
        target = Target(rt.buffer(op.out), self.finish.epilogue(rt, op.rows), local)
        move(op.tensor(rt, 0), target, slots, self.site, edge_op)
        if self.relations is not None and self.backward:
            self.relations.write_gradients(rt, op)


def slots_of(rt: Runtime, scratch: Mapping[str, str]) -> list[Tensor]:
    """Return the strategy's own buffers, in the order in which its plan declared them."""
    return [rt.buffer(name) for purpose, name in scratch.items() if purpose.startswith(SLOT)]


@dataclass(frozen=True, slots=True)
class Panel(PlainKind):
    """Columns [first, first + width) of the dense input X become A_hat times them, in place, through the buffer `panel`."""

    title: ClassVar[str] = "panel {self.first}"
    stored = False
    first: int
    width: int

    def run(self, rt: Runtime, op: Op) -> None:
        inputs = rt.inputs.rows[OWNED]
        columns = require(inputs.dense)[:, self.first : self.first + self.width]
        panel = rt.buffer(op.scratch["panel"])[:, : self.width]
        rt.backend.finish(columns, panel, Epilogue(out_scale=inputs.col_scale))
        target = Target(columns, Epilogue(row_scale=inputs.row_scale))
        rt.aggregation(WHOLE).forward(panel, target, slots_of(rt, op.scratch), 1)
