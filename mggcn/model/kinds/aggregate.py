"""Sums over neighbours, forwards and backwards, and their panels for a constant input. V rows of this rank, E width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mggcn.aggregate.base import aggregate_name
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.backend.base import Epilogue
from mggcn.errors import PlanError
from mggcn.model.kinds.elementwise import NOTHING, EpilogueSpec
from mggcn.model.runtime import Runtime, Sizes, require
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

SLOT = "slot "
"""What names of the strategy's own buffers start with among an op's scratch."""


@dataclass(frozen=True, slots=True)
class Aggregate(PlainKind):
    """out (V, E) = finish(A^T x); backward: finish(A x). op: what is computed along edges where that is no sum.

    site: its number in the model, from 1. level: of the rows that it computes (planning/pruning.py), None for all.
    """

    site: int
    finish: EpilogueSpec = NOTHING
    backward: bool = False
    level: int | None = None
    op: EdgeOp = SUM

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
        return Adjoint((Value(kind, (gradient,), value.cols),))

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        """Return no memory: the strategy's is its plan's. Raises: PlanError for an op that keeps rows for its adjoint."""
        if kept := self.op.kept(self.name, sizes.rows, value.cols, sizes.dtype):
            raise PlanError(
                f"the edge operation {self.op.name} keeps {', '.join(spec.name for spec in kept)} for its gradient; "
                "the nodes of a model have no values for that: use one that keeps nothing"
            )
        return {}

    def run(self, rt: Runtime, op: Op) -> None:
        move = rt.aggregation.backward if self.backward else rt.aggregation.forward
        slots = slots_of(rt, op.scratch)
        move(op.tensor(rt, 0), rt.buffer(op.out), slots, self.site, self.finish.epilogue(rt), self.op)


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
