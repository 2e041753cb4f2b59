"""Rewrites that round values, recompute them instead of keeping them, read them where they are stored, compute fewer rows,
or compute by blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mggcn.aggregate.edge_op import SUM
from mggcn.blocks.block import Block, RowSet
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.dense import InputGrad, Linear, LinearGrad, SparseLinear, WeightGrad
from mggcn.model.kinds.elementwise import NOTHING, ActivationGrad, Add, Elementwise, Rounded
from mggcn.model.kinds.ends import Input, Loss, StoredRows
from mggcn.model.kinds.neighbours import AttentionMessage, Scores
from mggcn.model.rewrite.patterns import only_user
from mggcn.model.values import Graph, Value

MADE_AGAIN = Linear | SparseLinear | Scores
"""Kinds of a few flops for each byte that they write, without messages."""
ROUNDING = Linear | SparseLinear | LinearGrad | InputGrad | ActivationGrad | Elementwise
"""Kinds whose kernels can write another type than they read."""


def prune(graph: Graph, blocks: Mapping[int, Block]) -> Graph:
    """Let the aggregations named by site run over smaller blocks, because nothing reads their other rows.

    Source: docs/notes/0013.
    """

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, Aggregate) or new.kind.site not in blocks:
            return new
        return new.with_kind(replace(new.kind, block=blocks[new.kind.site]))

    return graph.rewritten(rule)


def read_outputs(graph: Graph) -> Graph:
    """Let the gradient of attention read the ReLU after the sums, which is kept anyway, instead of the sums.

    Where the gradient is not zero, a sum is what the ReLU left less bias and dropout: its memory is free after the ReLU.
    """

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, AttentionMessage) or not isinstance(new.operands[0].kind, ActivationGrad):
            return new
        gradient, sums, *rest = new.operands
        h = gradient.operands[1]
        spec = h.kind.spec if isinstance(h.kind, Elementwise) else NOTHING
        if not spec.relu or spec.row_scale or spec.out_scale or h.operands != (sums,):
            return new
        return new.with_kind(replace(new.kind, after=spec)).on(gradient, h, *rest)

    return graph.rewritten(rule)


def recompute(graph: Graph) -> Graph:
    """Recompute the input under dropout, block by block, wherever a product reads it, since it is as wide as the
    features.
    """
    users = graph.users()

    def made_again(value: Value) -> bool:
        if not isinstance(value.kind, Elementwise) or not isinstance(value.operands[0].kind, Input):
            return False
        return all(isinstance(user.kind, Linear | WeightGrad) for user in users[value])

    again = {value for value in graph.values() if made_again(value)}

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, Linear | WeightGrad) or old.operands[0] not in again:
            return new
        made, *rest = new.operands
        spec = made.kind.spec if isinstance(made.kind, Elementwise) else NOTHING
        return new.with_kind(replace(new.kind, recomputed=spec)).on(made.operands[0], *rest)

    return graph.rewritten(rule)


def make_again(graph: Graph) -> Graph:
    """Let the backward pass recompute rows that dense products made from the input, or from what it reads anyway.

    Their memory is free from their last reader forwards to their first one backwards, for one more product each. The
    kernels and their operands are the same, and so are the bits.
    """
    behind = _behind(graph)
    read = {operand for value in behind for operand in value.operands if operand not in behind}
    users = graph.users()

    def cheap(value: Value) -> bool:
        if not isinstance(value.kind, MADE_AGAIN) or all(user in behind for user in users[value]):
            return False
        source = value.operands[0]
        return isinstance(source.kind, Input) or source in read or cheap(source)

    again: dict[Value, Value] = {}

    def made(value: Value) -> Value:
        if value not in again:
            first, *rest = value.operands
            again[value] = value.on(made(first) if cheap(first) else first, *rest)
        return again[value]

    def rule(old: Value, new: Value) -> Value:
        if old not in behind or not any(cheap(operand) for operand in old.operands):
            return new
        return new.on(*(made(o) if cheap(o) else n for o, n in zip(old.operands, new.operands, strict=True)))

    return graph.rewritten(rule)


def read_stored(graph: Graph, block: Block) -> Graph:
    """Let sums over a step's first block read X of all vertices where it is stored, by their ids: no feed gathers it.

    Rows of the block's targets are gathered into the arena, forwards, and again backwards: their memory is free meanwhile.
    The graph stays as it is where anything else reads X, or a gradient flows back through the block's edges, which then
    name places. Bits stay, too: a row is summed in the order of its entries.
    """
    values, users = graph.values(), graph.users()
    inputs = {value for value in values if isinstance(value.kind, Input) and value.rows == block.sources}
    over = {value for value in values if isinstance(value.kind, Aggregate) and value.kind.block == block}
    own = {user for x in inputs for user in users[x] if isinstance(user.kind, Own)}
    if not over or any(_keeps_gathered(value) for value in inputs) or not all(_sums(v, inputs) for v in over):
        return graph
    if any(user not in own and user not in over for x in inputs for user in users[x]):
        return graph
    behind = _behind(graph)
    first, again = dict[RowSet, Value](), dict[RowSet, Value]()

    def rule(old: Value, new: Value) -> Value:
        if old in inputs and isinstance(new.kind, Input):
            return new.with_kind(replace(new.kind, everyone=True))
        if old in own:
            return first.setdefault(old.rows, Value(StoredRows(old.rows), new.operands, new.cols))
        if old in behind and own & {*old.operands}:
            pairs = [*zip(old.operands, new.operands, strict=True)]
            # Behind the gradient that they are multiplied with: the memory in which it is computed is free then.
            before = [n for o, n in pairs if o not in own]
            return new.on(*(again.setdefault(o.rows, n.on(*n.operands, *before)) if o in own else n for o, n in pairs))
        # Either order adds up to the same bits. The rows are free when the sums, which are kept, are computed.
        if isinstance(new.kind, Add) and _multiplies(new.operands[1]) and not _multiplies(new.operands[0]):
            return new.on(*reversed(new.operands))
        return new

    return graph.rewritten(rule)


def _behind(graph: Graph) -> set[Value]:
    """Return the values that depend on the gradient of the loss."""
    behind = set[Value]()
    for value in graph.values():
        if isinstance(value.kind, Loss) or any(operand in behind for operand in value.operands):
            behind.add(value)
    return behind


def _keeps_gathered(x: Value) -> bool:
    """Whether an input is no dense rows of X as they are stored."""
    return not isinstance(x.kind, Input) or x.kind.sparse or x.kind.learned or x.kind.aggregated > 0


def _sums(value: Value, inputs: set[Value]) -> bool:
    """Whether a value is a plain sum over neighbours of an input."""
    kind = value.kind
    return isinstance(kind, Aggregate) and kind.op == SUM and kind.rule is None and value.operands[0] in inputs


def _multiplies(value: Value) -> bool:
    """Whether a value is a product of gathered rows."""
    return isinstance(value.kind, Linear) and isinstance(value.operands[0].kind, StoredRows)


def round_operands(graph: Graph) -> Graph:
    """Round the operands of products with the graph, in the kernel that computes them if nothing else reads them."""
    users = graph.users()

    def rule(old: Value, new: Value) -> Value:
        if not isinstance(new.kind, Aggregate):
            return new
        x, *rest = new.operands
        if isinstance(x.kind, ROUNDING) and only_user(users, old.operands[0]) is old:
            return new.on(replace(x, operand=True), *rest)
        what = "gradient" if new.kind.backward else "input"
        return new.on(Value(Rounded(what, new.kind.site), (x,), x.cols, operand=True), *rest)

    return graph.rewritten(rule)


def block_rows(graph: Graph, rows_of: Callable[[int, RowSet], int]) -> Graph:
    """Set the number of rows per block of every product, from the columns that must stay in the cache."""

    def rule(old: Value, new: Value) -> Value:
        kind = new.kind
        if isinstance(kind, Linear | WeightGrad) and kind.recomputed is not None:
            return new.with_kind(replace(kind, block_rows=rows_of(new.operands[0].cols, new.operands[0].rows)))
        if isinstance(kind, Linear | LinearGrad | InputGrad):
            return new.with_kind(replace(kind, block_rows=rows_of(new.cols, new.rows)))
        return new

    return graph.rewritten(rule)


def spare_gradients(graph: Graph) -> Graph:
    """Copy a gradient that an aggregation may overwrite while another node still reads it."""
    users = graph.users()

    def rule(old: Value, new: Value) -> Value:
        if not (isinstance(new.kind, Aggregate) and new.kind.backward) or only_user(users, old.operands[0]) is old:
            return new
        gradient, *rest = new.operands
        return new.on(Value(Elementwise(NOTHING, new.kind.site), (gradient,), gradient.cols), *rest)

    return graph.rewritten(rule)
