"""Where a program begins and ends: the input, the loss, the score; and rows that one stage writes for another.

V rows of this rank, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from mggcn.backend.base import Dropout
from mggcn.blocks.block import OWNED, RowSet
from mggcn.model.kinds.elementwise import Scale, partial_sums, partials_of, result_beside, scale_of, sum_partials
from mggcn.model.runtime import Runtime, Sizes, require
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value


def input_name(aggregated: int) -> str:
    """Return the name of A_hat^K X: X, A X, A^2 X, ..."""
    return ("X", "A X")[aggregated] if aggregated < 2 else f"A^{aggregated} X"


@dataclass(frozen=True, slots=True)
class Input(PlainKind):
    """The input (V, D) of a row set: A_hat^K X, K = aggregated. scaled: a sparse one that was stored as S_c X.

    learned: whether its rows are trained, so that they have a gradient. everyone: whether readers get the rows of all
    vertices, where they are stored, and find those of the row set by its ids.
    """

    stored = False
    sparse: bool = False
    aggregated: int = 0
    scaled: bool = False
    of: RowSet = OWNED
    learned: bool = False
    everyone: bool = False

    @property
    def has_parameters(self) -> bool:
        return self.learned

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((), (Value(LearnedGrad(), (gradient,)),))

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    @property
    def label(self) -> str:
        return input_name(self.aggregated)

    def run(self, rt: Runtime, op: Op) -> None:
        """Do nothing."""


INDEX_ROWS: Final = 8192
"""Rows whose ids are converted at a time: what a step allocates stays of no note."""


@dataclass(frozen=True, slots=True)
class StoredRows(PlainKind):
    """out = the rows of X of a row set. The first operand is X of all vertices, where it is stored; others come before."""

    title: ClassVar[str] = "gather X"
    of: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    def run(self, rt: Runtime, op: Op) -> None:
        x, out, ids = op.tensor(rt, 0), rt.buffer(op.out), rt.inputs.rows[op.rows].ids
        for first in range(0, ids.shape[0], INDEX_ROWS):
            some = slice(first, first + INDEX_ROWS)
            rt.backend.gather_rows(x, ids[some].int(), out[some])


@dataclass(frozen=True, slots=True)
class LearnedGrad(PlainKind):
    """The gradient (V, D) of the learned input, in memory of its own, which outlives the program.

    A gradient that is not finite makes the loss NaN: it stays on this rank, and by the loss all ranks leave a step out.
    """

    title: ClassVar[str] = "input-grad 0"
    stored = False

    def run(self, rt: Runtime, op: Op) -> None:
        g, kept = op.tensor(rt, 0), require(rt.inputs.rows[op.sets[0]].gradient)
        kept.copy_(g)
        if kept.numel():
            least, greatest = kept.aminmax()
            rt.loss.add_((least.double() + greatest.double()) * 0.0)


@dataclass(frozen=True, slots=True)
class DroppedValues(PlainKind):
    """The values of the sparse input under this epoch's mask, in both orders."""

    title: ClassVar[str] = "input 1"
    stored = False
    probability: float

    def run(self, rt: Runtime, op: Op) -> None:
        rows = rt.inputs.rows[op.sets[0]]
        x = require(rows.sparse)
        values, values_t = (require(require(matrix).values) for matrix in (x.dropped, x.dropped_t))
        rt.backend.dropout_values(x.rows, values, rows.ids, Dropout(self.probability, rt.clock, 0))
        rt.backend.gather_rows(values.view(-1, 1), require(x.position), values_t.view(-1, 1))


@dataclass(frozen=True, slots=True)
class Loss(PlainKind):
    """The gradient of the loss with respect to scores z (V, C), times S_r if asked for; adds the loss to rt.loss.

    sums: the bias whose gradient is the sum of the columns of the gradient before S_r.
    """

    in_place: ClassVar[tuple[int, ...]] = (0,)
    by_rows: ClassVar[bool] = True
    row_scale: Scale = ""
    sums: str = ""

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, self.sums)

    def run(self, rt: Runtime, op: Op) -> None:
        z, _ = result_beside(op.tensor(rt, 0), rt.buffer(op.out))
        partials = partials_of(rt, op)
        target = require(rt.inputs.rows[op.rows].target)
        target.loss(rt.backend, z, scale_of(rt, self.row_scale, op.rows), rt.loss, partials)
        sum_partials(rt, partials, self.sums)


@dataclass(frozen=True, slots=True)
class Score(PlainKind):
    """Adds the target's counts for the three splits to rt.counts; the scores z stay readable after the program.

    counted: whether there is a target to count by: links are scored from z of all vertices, behind the program.
    """

    stored = False
    by_rows: ClassVar[bool] = True
    counted: bool = True

    def run(self, rt: Runtime, op: Op) -> None:
        if self.counted:
            require(rt.inputs.rows[op.sets[0]].target).count(rt.backend, op.tensor(rt, 0), rt.counts)


@dataclass(frozen=True, slots=True)
class StageInput(PlainKind):
    """Rows of a row set that an earlier stage has written (model/stages.py), in memory of this name. Runs no op."""

    stored = False
    name: str
    of: RowSet

    def rows(self, operands: Sequence[Value]) -> RowSet:
        return self.of

    def run(self, rt: Runtime, op: Op) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class StageOutput(PlainKind):
    """Has the operand written to memory of this name, which later stages read, instead of the arena. Runs no op."""

    stored = False
    name: str

    def run(self, rt: Runtime, op: Op) -> None:
        """Do nothing."""
