"""Messages along edges, and their first derivatives by their operands as a table.

Source: DistGNN, Table 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from mggcn.backend.edges import Of, Op, Partial, Reducer

Side = Literal["lhs", "rhs"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True, slots=True)
class Derivative:
    """d message / d operand: scale times `partial` of backend/edges.py with these operands as its a and b."""

    partial: Partial
    scale: float = 1.0
    a: Side | None = None
    b: Side | None = None


DERIVATIVES: dict[tuple[Op, Side], Derivative] = {
    ("add", "lhs"): Derivative("one"),
    ("add", "rhs"): Derivative("one"),
    ("sub", "lhs"): Derivative("one"),
    ("sub", "rhs"): Derivative("one", -1.0),
    ("mul", "lhs"): Derivative("times", 1.0, "rhs"),
    ("mul", "rhs"): Derivative("times", 1.0, "lhs"),
    ("div", "lhs"): Derivative("over", 1.0, "rhs"),
    ("div", "rhs"): Derivative("ratio", -1.0, "lhs", "rhs"),
    ("copy", "lhs"): Derivative("one"),
}


@dataclass(frozen=True, slots=True)
class Message:
    """op(lhs, rhs) reduced at the destination; a copy has no rhs."""

    op: Op
    reducer: Reducer
    lhs_of: Of
    rhs_of: Of = "edge"

    def of(self, side: Side) -> Of:
        """Return whether an operand has a row for each source, destination or edge."""
        return self.lhs_of if side == "lhs" else self.rhs_of

    def read_for(self, sides: Iterable[Side]) -> set[Side]:
        """Return the operands that the gradients by `sides` read."""
        found = [DERIVATIVES[self.op, side] for side in sides]
        return {name for d in found for name in (d.a, d.b) if name is not None}
