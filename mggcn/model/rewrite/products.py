"""Chooses which product comes first, H W or A H; computes constants once; keeps sparse features sparse.

Source: MG-GCN, section 4.4 and 4.3: the narrower side goes through the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mggcn.model.choices import InputChoice, LayerChoice
from mggcn.model.kinds.dense import Linear, SparseLinear
from mggcn.model.kinds.elementwise import Elementwise
from mggcn.model.kinds.ends import DroppedValues, Input
from mggcn.model.rewrite.patterns import Normalised, followed_by, in_a_row
from mggcn.model.values import Graph, Value

AGGREGATED_FIRST = ("precomputed", "aggregate-first")


def order_products(graph: Graph, layers: Mapping[int, LayerChoice], norm: str = "", constant: int = 0) -> Graph:
    """Turn A_hat (H W) into (A_hat H) W in the layers of which `layers` says so; A_hat^K (X W) where `constant` is K.

    norm: model.norm, which is asked of several sums.
    """
    users = graph.users()
    found: dict[Value, Normalised] = {}
    for value in graph.values():
        sums = followed_by(users, value)
        if sums and isinstance(value.kind, Linear) and layers[value.kind.layer].products in AGGREGATED_FIRST:
            if constant > 1 and layers[value.kind.layer].products == "precomputed":
                links = [link for one in in_a_row(users, value, norm, constant) for link in one.links]
                sums = Normalised(value, tuple(links))
            found[sums.top] = sums
    linear_of: dict[Value, Value] = {}

    def rule(old: Value, new: Value) -> Value:
        if isinstance(old.kind, Linear):
            linear_of[old] = new
        if old not in found:
            return new
        linear = linear_of[found[old].x]
        (x,) = linear.operands
        return Value(linear.kind, (found[old].on(x),), linear.cols)

    return graph.rewritten(rule)


def precompute(graph: Graph, choice: InputChoice, norm: str) -> Graph:
    """Take A_hat^K X as the input where nothing else reads X, so that no epoch computes it; norm: model.norm."""
    if not choice.aggregated:
        return graph
    users = graph.users()
    inputs = [value for value in graph.values() if isinstance(value.kind, Input)]
    chains = [in_a_row(users, value, norm, choice.aggregated) for value in inputs]
    tops = {chain[-1].top: chain[0].x.cols for chain in chains if len(chain) == choice.aggregated}

    def rule(old: Value, new: Value) -> Value:
        return Value(Input(choice.sparse, choice.aggregated), (), tops[old]) if old in tops else new

    return graph.rewritten(rule)


def keep_sparse(graph: Graph, choice: InputChoice) -> Graph:
    """Multiply sparse features directly: row scales are stored in their values, and dropout changes the values."""
    if not choice.sparse:
        return graph

    kept: dict[tuple[float, bool], Value] = {}

    def stored(cols: int, dropout: float, scaled: bool) -> Value:
        """The sparse input, whose values under dropout are computed once for all readers."""
        if (dropout, scaled) not in kept:
            x = Value(Input(sparse=True, scaled=scaled), (), cols)
            kept[dropout, scaled] = Value(DroppedValues(dropout), (x,), cols) if dropout else x
        return kept[dropout, scaled]

    def rule(old: Value, new: Value) -> Value:
        if isinstance(new.kind, Input):
            return new.with_kind(replace(new.kind, sparse=True))
        if not isinstance(new.kind, Linear):
            return new
        (x,) = new.operands
        dropout = 0.0
        if isinstance(x.kind, Elementwise):
            dropout = x.kind.spec.dropout
            x = stored(x.cols, dropout, bool(x.kind.spec.out_scale))
        return Value(SparseLinear(new.kind.weight, new.kind.layer, bool(dropout)), (x,), new.cols)

    first = {value for value in graph.values() if isinstance(value.kind, Linear) and _reads_input(value)}
    return graph.rewritten(lambda old, new: rule(old, new) if old in first or isinstance(old.kind, Input) else new)


def _reads_input(linear: Value) -> bool:
    (x,) = linear.operands
    return isinstance((x.operands[0] if isinstance(x.kind, Elementwise) else x).kind, Input)
