"""Reads the first layer's sums over neighbours from A X, where a step runs over batches: no edge of that layer is drawn.

Source: BatchGNN, section 3, whose cache estimates GCN's normalisation; here it is the whole graph's.
"""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.aggregate.edge_op import SUM
from mggcn.blocks.block import Block
from mggcn.errors import PlanError
from mggcn.model.gin import SelfWeight
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.dense import Linear
from mggcn.model.kinds.elementwise import Add, Elementwise
from mggcn.model.kinds.ends import Input
from mggcn.model.rewrite.patterns import COL, ROW, Users, does
from mggcn.model.values import Graph, Value


@dataclass(frozen=True, slots=True)
class FirstSums:
    """What batches read instead of the first layer's edges: S_r A^T S_c X, without S_r or S_c if `row` or `col` says so.

    itself: whether they read X, too. layers: the numbers of the dense layers that multiply the sums.
    """

    row: bool
    col: bool
    itself: bool
    layers: frozenset[int]


def read_first_sums(graph: Graph, block: Block) -> tuple[Graph, FirstSums]:
    """Replace what a model computes over its first block by inputs of the block's targets: A X, and X where it is read.

    A product X W moves behind the sum, with which it commutes. Raises: PlanError for a model that reads X otherwise.
    """
    graph, layers = _products_last(graph, block)
    users = graph.users()
    plain = Value(Input(of=block.targets), (), _features(graph, block).cols)
    sums = Value(Input(aggregated=1, of=block.targets), (), plain.cols)
    found: dict[Value, tuple[bool, bool]] = {}
    for value in graph.values():
        if isinstance(value.kind, Aggregate) and value.kind.op == SUM and value.kind.block == block:
            (x,) = value.operands
            col = does(x, COL)
            if not isinstance((x.operands[0] if col else x).kind, Input):
                continue
            after = users[value]
            row = len(after) == 1 and does(after[0], ROW)
            found[after[0] if row else value] = row, col

    def rule(old: Value, new: Value) -> Value:
        if old in found:
            return sums
        is_own = isinstance(new.kind, Own) and isinstance(new.operands[0].kind, Input)
        return plain if is_own and new.rows == block.targets else new

    graph = graph.rewritten(rule)
    values = graph.values()
    if any(value.rows == block.sources for value in values) or len(set(found.values())) != 1:
        raise PlanError(f"sample.first full reads A X, computed once, and {_obstacle(values, block)}; choose drawn")
    ((row, col),) = set(found.values())
    return graph, FirstSums(row, col, plain in values, layers)


def _obstacle(values: tuple[Value, ...], block: Block) -> str:
    """Say in words why a model cannot read its first sums from A X."""
    for value in values:
        if isinstance(value.kind, Elementwise) and value.kind.spec.dropout and value.rows == block.sources:
            return "model.input_dropout changes X in every step"
        if isinstance(value.kind, Aggregate) and value.kind.block == block and value.kind.op != SUM:
            return f"{value.kind.label} of the first layer is no plain sum over neighbours"
    return "the first sum over neighbours is not one of X, but of what a layer computes"


def _features(graph: Graph, block: Block) -> Value:
    return next(value for value in graph.values() if isinstance(value.kind, Input) and value.kind.of == block.sources)


def _products_last(graph: Graph, block: Block) -> tuple[Graph, frozenset[int]]:
    """Turn what is linear in X W over a block, such as A (X W) or (1 + eps) X W + A (X W), into the same of X, times W."""
    users = graph.users()
    last: dict[Value, Value] = {}  # the last of what is linear in a product -> the product
    for value in graph.values():
        if isinstance(value.kind, Linear) and isinstance(value.operands[0].kind, Input) and value.rows == block.sources:
            end = _end_of(value, users, block)
            if end is not None:
                last[end] = value
    moved: dict[Value, Value] = {}

    def of_input(value: Value, linear: Value) -> Value:
        """The value, computed of X instead of X W."""
        if value is linear:
            return linear.operands[0]
        if value not in moved:
            operands = tuple(of_input(operand, linear) for operand in value.operands)
            moved[value] = Value(value.kind, operands, operands[0].cols)
        return moved[value]

    def rule(old: Value, new: Value) -> Value:
        if old not in last:
            return new
        linear = last[old]
        return Value(linear.kind, (of_input(old, linear),), linear.cols)

    layers = frozenset(linear.kind.layer for linear in last.values() if isinstance(linear.kind, Linear))
    return graph.rewritten(rule), layers


def _end_of(linear: Value, users: Users, block: Block) -> Value | None:
    """Return the value to which all that is linear in a product over a block leads; None if there is no such one."""
    inside, open_ = {linear}, [linear]
    while open_:
        value = open_.pop()
        for user in users[value]:
            if user not in inside and _is_linear(user, block) and all(one in inside for one in user.operands):
                inside.add(user)
                open_.append(user)
                # An Add is looked at again from its other operand.
    ends = [value for value in inside if not users[value] or any(user not in inside for user in users[value])]
    return ends[0] if len(ends) == 1 and ends[0] is not linear else None


def _is_linear(value: Value, block: Block) -> bool:
    """Whether a value over the block's rows is linear in the rows of its operands, whatever their width."""
    if value.rows not in (block.sources, block.targets):
        return False
    if isinstance(value.kind, Aggregate):
        return value.kind.op == SUM and value.kind.block == block
    scales = does(value, COL) if value.rows == block.sources else does(value, ROW)
    return scales or isinstance(value.kind, Own | SelfWeight | Add)
