"""Sums over neighbours, forwards and backwards, and their panels for a constant input. V rows of this rank, E width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mggcn.aggregate.base import aggregate_name
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.backend.base import Epilogue
from mggcn.errors import PlanError
from mggcn.model.kinds.elementwise import NOTHING, EpilogueSpec
from mggcn.model.kinds.relations import RelationWeights
from mggcn.model.runtime import Runtime, Sizes, require
from mggcn.model.values import Adjoint, Graph, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

SLOT = "slot "
"""What names of the strategy's own buffers start with among an op's scratch."""


@dataclass(frozen=True, slots=True)
class Aggregate(PlainKind):
    """out (V, E) = finish(A^T x); backward: finish(A x). op: what is computed along edges where that is no sum.

    relations: the weights of a `Relational` op, whose backward pass reads x again, as a second operand, and writes their
    gradients. site: its number in the model, from 1. level: of the rows that it computes (planning/pruning.py), None for
    all.
    """

    site: int
    finish: EpilogueSpec = NOTHING
    backward: bool = False
    level: int | None = None
    op: EdgeOp = SUM
    relations: RelationWeights | None = None

    @property
    def has_parameters(self) -> bool:
        return self.relations is not None

    @property
    def gradient_of(self) -> str:
        return self.relations.bases if self.relations is not None and self.backward else ""

    @property
    def overwrites(self) -> tuple[int, ...]:
        # A strategy may use the gradient up.
        return (0,) if self.backward else ()

    @property
    def name(self) -> str:
        """Name of the aggregation, with which the names of its buffers start."""
        return aggregate_name(self.site, self.backward)

    @property
    def label(self) -> str:
        return f"aggregate-grad {self.site}" if self.backward else f"aggregate {self.site}"

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        kind = Aggregate(self.site, backward=not self.backward, level=self.level, op=self.op.adjoint)
        if self.relations is None:
            return Adjoint((Value(kind, (gradient,), value.cols),))
        (x,) = value.operands
        # One pass gives both gradients; that of a constant input is left out.
        wanted = any(below.kind.has_parameters for below in Graph((x,)).values())
        op = replace(kind.op, of_rows=wanted)  # type: ignore[type-var]
        both = Value(replace(kind, op=op, relations=self.relations), (gradient, x), x.cols if wanted else 1)
        return Adjoint((both if wanted else None,), (both,))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        """Return no memory: the strategy's is its plan's. Raises: PlanError for an op that keeps rows for its adjoint."""
        if kept := self.op.kept(self.name, sizes.rows, value.cols, sizes.dtype):
            raise PlanError(
                f"the edge operation {self.op.name} keeps {', '.join(spec.name for spec in kept)} for its gradient; "
                "the nodes of a model have no values for that: use one that keeps nothing"
            )
        return {} if self.relations is None else self.relations.scratch(self.op, sizes)  # type: ignore[arg-type]

    def run(self, rt: Runtime, op: Op) -> None:
        move = rt.aggregation.backward if self.backward else rt.aggregation.forward
        slots, edge_op = slots_of(rt, op.scratch), self.op
        if self.relations is not None:
            edge_op = self.relations.bound(self.op, rt, op)  # type: ignore[arg-type]
        local = [op.tensor(rt, index) for index in range(1, len(op.operands))]
        move(op.tensor(rt, 0), rt.buffer(op.out), slots, self.site, self.finish.epilogue(rt), edge_op, local)
        if self.relations is not None and self.backward:
            self.relations.write_gradients(rt, op)


def slots_of(rt: Runtime, scratch: Mapping[str, str]) -> list[Tensor]:
    """Return the strategy's own buffers, in the order in which its plan declared them."""
    return [rt.buffer(name) for purpose, name in scratch.items() if purpose.startswith(SLOT)]


@dataclass(frozen=True, slots=True)
class Panel(PlainKind):
    """Columns [first, first + width) of the dense input X become those of A_hat X, in place, through the buffer `panel`."""

    stored = False
    first: int
    width: int

    @property
    def label(self) -> str:
        return f"panel {self.first}"

    def run(self, rt: Runtime, op: Op) -> None:
        columns = require(rt.inputs.dense)[:, self.first : self.first + self.width]
        panel = rt.buffer(op.scratch["panel"])[:, : self.width]
        rt.backend.finish(columns, panel, Epilogue(out_scale=rt.inputs.col_scale))
        rt.aggregation.forward(panel, columns, slots_of(rt, op.scratch), 1, Epilogue(row_scale=rt.inputs.row_scale))
