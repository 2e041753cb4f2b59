"""Chooses which product comes first, H W or A H; computes constants once; keeps sparse features sparse; makes one product
of two with the same rows.

Source: MG-GCN, section 4.4 and 4.3: the narrower side goes through the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mggcn.blocks.block import RowSet
from mggcn.model.choices import InputChoice, LayerChoice
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.dense import Linear, SparseLinear
from mggcn.model.kinds.elementwise import NOTHING, Add, Elementwise, EpilogueSpec
from mggcn.model.kinds.ends import DroppedValues, Input
from mggcn.model.rewrite.patterns import Normalised, Users, followed_by, in_a_row, only_user
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

    kept: dict[tuple[float, bool, RowSet], Value] = {}

    def stored(x: Value, spec: EpilogueSpec) -> Value:
        """The sparse input of a row set, whose values under dropout are computed once for all readers."""
        scaled = bool(spec.out_scale)
        of = spec.dropout, scaled, x.rows
        if of not in kept:
            itself = Value(Input(sparse=True, scaled=scaled, of=x.rows), (), x.cols)
            kept[of] = Value(DroppedValues(spec.dropout), (itself,), x.cols) if spec.dropout else itself
        return kept[of]

    def rule(old: Value, new: Value) -> Value:
        if isinstance(new.kind, Input):
            return new.with_kind(replace(new.kind, sparse=True))
        if not isinstance(new.kind, Linear):
            return new
        (x,) = new.operands
        spec = _input_under(x)[1]
        if not isinstance(x.kind, Input):
            x = stored(x, spec)
        return Value(SparseLinear(new.kind.weight, new.kind.layer, bool(spec.dropout)), (x,), new.cols)

    first = {value for value in graph.values() if isinstance(value.kind, Linear) and _reads_input(value)}
    return graph.rewritten(lambda old, new: rule(old, new) if old in first or isinstance(old.kind, Input) else new)


def merge_products(graph: Graph) -> Graph:
    """Turn H W + Z + H V into H (W + V) + Z, such as GraphSAGE's own weights beside a linear residual.

    W and V, and biases, stay parameters of their own: the matrices are added before a product, and have one gradient.
    """
    users = graph.users()
    taken: dict[Value, tuple[Value, Value]] = {}  # product -> the term H V + b that it takes over, and its H V
    left: dict[Value, int] = {}  # sum -> the index of the operand that is left of it
    for value in graph.values():
        for index in (0, 1) if isinstance(value.kind, Add) else ():
            rest, term = value.operands[index], value.operands[1 - index]
            second = next(_products_in(users, term), None)
            if value in left or second is None or isinstance(term.kind, Add) or second not in (term, *term.operands):
                continue
            used = {*taken, *(product for _, product in taken.values())}
            alike = (first for first in _products_in(users, rest) if first.operands == second.operands)
            first = next((first for first in alike if not {first, second} & used), None)
            if first is not None:
                taken[first], left[value] = (term, second), index

    def rule(old: Value, new: Value) -> Value:
        if old in left:
            return new.operands[left[old]]
        if old not in taken or not isinstance(new.kind, Linear):
            return new
        term, second = taken[old]
        both = new.with_kind(replace(new.kind, added=second.kind.weight))  # type: ignore[attr-defined]
        return both if term is second else term.on(both)

    return graph.rewritten(rule)


def _products_in(users: Users, value: Value) -> Iterator[Value]:
    """The dense products that a value adds up, biases aside, if nothing else reads them or their sums."""
    if only_user(users, value) is None:
        return
    if isinstance(value.kind, Linear):
        yield value
    elif isinstance(value.kind, Add) or (isinstance(value.kind, Elementwise) and value.kind.spec.parts == ("bias",)):
        for operand in value.operands:
            yield from _products_in(users, operand)


def _reads_input(linear: Value) -> bool:
    return isinstance(_input_under(linear.operands[0])[0].kind, Input)


def _input_under(x: Value) -> tuple[Value, EpilogueSpec]:
    """Return what x is the rows of a smaller row set of, or one elementwise step of, or both; and that step."""
    spec = NOTHING
    while isinstance(x.kind, Own) or (isinstance(x.kind, Elementwise) and spec == NOTHING):
        spec = x.kind.spec if isinstance(x.kind, Elementwise) else spec
        x = x.operands[0]
    return x, spec
