"""Scales of columns of the graph move into what makes them: neighbours are stored scaled, H' = S_c H, and sent so."""

from __future__ import annotations

from mggcn.model.kinds.dense import Linear
from mggcn.model.kinds.ends import Input
from mggcn.model.rewrite.patterns import COL, does, only_user
from mggcn.model.values import Graph, Value


def push_scales(graph: Graph) -> Graph:
    """Turn S_c (H W) into (S_c H) W where nothing else reads H: the pass over H W is gone, that over H does more."""
    users = graph.users()

    def moves(scale: Value) -> bool:
        if not does(scale, COL) or not isinstance(scale.operands[0].kind, Linear):
            return False
        (product,) = scale.operands
        (h,) = product.operands
        # A X is kept as it is; the pass over A X W ends the product.
        if isinstance(h.kind, Input) and h.kind.aggregated:
            return False
        return only_user(users, product) is scale and only_user(users, product.operands[0]) is product

    moved = {value for value in graph.values() if moves(value)}

    def rule(old: Value, new: Value) -> Value:
        if old not in moved:
            return new
        (product,) = new.operands
        (h,) = product.operands
        return Value(product.kind, (Value(new.kind, (h,), h.cols),), product.cols)

    return graph.rewritten(rule)
