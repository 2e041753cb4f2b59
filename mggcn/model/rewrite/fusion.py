"""Fuses passes: elementwise steps with each other and with the product before them, and gradients likewise."""

from __future__ import annotations

from dataclasses import replace

from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import AddOwn, Padded
from mggcn.model.kinds.dense import InputGrad, Linear, LinearGrad, SparseLinear
from mggcn.model.kinds.elementwise import ActivationGrad, Add, BiasGrad, Elementwise
from mggcn.model.kinds.ends import Input, Loss
from mggcn.model.rewrite.patterns import ROW, does, only_user
from mggcn.model.values import Graph, Value

Product = Linear | SparseLinear | LinearGrad | Aggregate
"""Kinds that an epilogue can follow."""
Summing = Loss | ActivationGrad
"""Kinds of gradients that sum their columns, and scale their rows, on the way."""


def fuse_elementwise(graph: Graph) -> Graph:
    """Merge consecutive elementwise steps into one."""
    users = graph.users()

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, Elementwise):
            return new
        (first,) = new.operands
        if isinstance(first.kind, Input):
            return new.with_kind(replace(new.kind, layer=0))
        if not isinstance(first.kind, Elementwise) or only_user(users, old.operands[0]) is not old:
            return new
        both = first.kind.spec.then(new.kind.spec)
        return new if both is None else replace(new, kind=Elementwise(both, first.kind.layer), operands=first.operands)

    return graph.rewritten(rule)


def fuse_epilogues(graph: Graph) -> Graph:
    """Let a product apply the following elementwise steps row by row, if nothing else reads it."""
    users = graph.users()

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, Elementwise):
            return new
        (product,) = new.operands
        kind = product.kind
        if not isinstance(kind, Product) or kind.finish.parts or only_user(users, old.operands[0]) is not old:
            return new
        return product.with_kind(replace(kind, finish=new.kind.spec))

    return graph.rewritten(rule)


def fuse_bias_gradients(graph: Graph) -> Graph:
    """Let the kernel that computes a gradient also sum its columns."""
    users = graph.users()
    sums: dict[Value, str] = {}
    for root in graph.roots:
        if isinstance(root.kind, BiasGrad) and isinstance(root.operands[0].kind, Summing):
            sums.setdefault(root.operands[0], root.kind.bias)

    def rule(old: Value, new: Value) -> Value:
        return new.with_kind(replace(new.kind, sums=sums[old])) if old in sums else new  # type: ignore[type-var]

    def fused(root: Value) -> bool:
        return isinstance(root.kind, BiasGrad) and sums.get(root.operands[0]) == root.kind.bias

    # A gradient that only its sum reads is still computed, for the sum.
    roots = tuple(
        root.operands[0] if len(users[root.operands[0]]) == 1 else None for root in graph.roots if fused(root)
    )
    rest = (root for root in graph.roots if not fused(root))
    return Graph((*(root for root in roots if root is not None), *rest)).rewritten(rule)


def add_own_rows(graph: Graph) -> Graph:
    """Add the gradient of a row set's first rows to theirs alone, instead of one that zeros fill up to all.

    Bits stay: sums over neighbours and products begin with zero, so none is a negative zero, which adding 0 changes.
    """
    users = graph.users()

    def rule(old: Value, new: Value) -> Value:
        for at in (0, 1) if isinstance(new.kind, Add) else ():
            padded, other = new.operands[at], new.operands[1 - at]
            alone = isinstance(padded.kind, Padded) and only_user(users, old.operands[at]) is old
            if alone and not isinstance(other.kind, Padded):
                return Value(AddOwn(), (other, *padded.operands), new.cols)
        return new

    return graph.rewritten(rule)


def fuse_gradients(graph: Graph) -> Graph:
    """Fuse the kernel of a gradient with the row scale that its aggregation needs, and with the product that feeds it."""
    users = graph.users()

    def scaled(old: Value, new: Value) -> Value:
        if not does(new, ROW) or only_user(users, old.operands[0]) is not old:
            return new
        (gradient,) = new.operands
        kind = gradient.kind
        if not isinstance(kind, Summing) or kind.row_scale:
            return new
        return gradient.with_kind(replace(kind, row_scale="row"))

    graph = graph.rewritten(scaled)
    users = graph.users()

    def through(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, ActivationGrad):
            return new
        product, h = new.operands
        kind = product.kind
        if not isinstance(kind, LinearGrad) or kind.finish.parts or only_user(users, old.operands[0]) is not old:
            return new
        return new.with_kind(InputGrad(kind.weight, kind.layer, new.kind, kind.added)).on(product.operands[0], h)

    return graph.rewritten(through)
