"""Patterns that several rewrites look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mggcn.aggregate.edge_op import SUM
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.dense import Linear
from mggcn.model.kinds.elementwise import Elementwise, EpilogueSpec
from mggcn.model.values import Value

Users = Mapping[Value, list[Value]]
ROW, COL = EpilogueSpec(row_scale="row"), EpilogueSpec(out_scale="col")


def only_user(users: Users, value: Value) -> Value | None:
    """Return the only value that reads a given one; None if none or several do."""
    readers = users[value]
    return readers[0] if len(readers) == 1 else None


def does(value: Value, spec: EpilogueSpec) -> bool:
    """Whether a value applies exactly this epilogue to its operand."""
    return isinstance(value.kind, Elementwise) and value.kind.spec == spec


class Normalised(NamedTuple):
    """S_r A^T S_c x, or without one scale or both: the values from x upwards, `top` the last of them."""

    x: Value
    links: tuple[Value, ...]

    def is_norm(self, norm: str) -> bool:
        """Whether the scales are those of model.norm."""
        scales = [does(link, COL) for link in self.links].count(True), does(self.top, ROW)
        return scales == (int(norm == "symmetric"), True)

    @property
    def top(self) -> Value:
        return self.links[-1]

    def on(self, x: Value) -> Value:
        """Return the same normalised sum of another value."""
        for link in self.links:
            x = Value(link.kind, (x,), x.cols)
        return x


def normalised(users: Users, x: Value) -> Normalised | None:
    """Return the sum over neighbours, scaled or not, that alone reads x; None if something else does."""
    links: list[Value] = []
    after = only_user(users, x)
    if after is not None and does(after, COL):
        links.append(after)
        after = only_user(users, after)
    # Only a sum commutes with a product from the right.
    if after is None or not isinstance(after.kind, Aggregate) or after.kind.op != SUM:
        return None
    links.append(after)
    last = only_user(users, after)
    if last is not None and does(last, ROW):
        links.append(last)
    return Normalised(x, tuple(links))


def in_a_row(users: Users, x: Value, norm: str, most: int = 0) -> list[Normalised]:
    """Return the consecutive A_hat after x, each the only reader of the one before; most: their limit, 0 for none."""
    found: list[Normalised] = []
    while (sums := normalised(users, x)) and sums.is_norm(norm) and (not most or len(found) < most):
        found.append(sums)
        x = sums.top
    return found


def followed_by(users: Users, linear: Value) -> Normalised | None:
    """Return the normalised aggregation of a dense layer's result."""
    return normalised(users, linear) if isinstance(linear.kind, Linear) else None
