"""Stages of a forward pass: cut at its aggregations, so that each computes the rows of one row set from those before.

A stage runs over some of its rows at a time. Over its aggregation it reads rows of all vertices, elsewhere those that it
computes; what a later stage reads, its outputs, is in memory for all vertices. So every edge and every row counts once a
layer, and no more of the network is in memory than what two stages share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mggcn.blocks.block import OWNED, Block, RowSet
from mggcn.errors import PlanError
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.ends import Input, StageInput, StageOutput
from mggcn.model.values import Graph, Value

RESULT = "result"
"""Name of the rows that the last stage writes: the scores."""


def of_all(name: str) -> str:
    """Return the name under which a stage reads an output's rows of all vertices, rather than those that it computes."""
    return f"{name}.all"


@dataclass(frozen=True, slots=True)
class Output:
    """Rows that a stage writes for later ones, or for whoever reads the result.

    operand: whether they have the type of operands of the graph product. first, last: the stages, by number, that write
    and last read them.
    """

    name: str
    cols: int
    operand: bool
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs between one aggregation and the next. graph: its values, down to its outputs.

    rows: the row set that it computes, from the input's, whose number is 0; block: of its aggregation, None without one.
    needs_input: whether it reads the input; reads_input: whether its aggregation does, of all vertices.
    """

    number: int
    rows: RowSet
    block: Block | None
    graph: Graph
    needs_input: bool
    reads_input: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """A forward pass in stages, and all that they write for each other."""

    stages: tuple[Stage, ...]
    outputs: tuple[Output, ...]

    @property
    def reads_input(self) -> bool:
        """Whether an aggregation reads the input, of all vertices."""
        return any(stage.reads_input for stage in self.stages)


def cut(result: Value, blocks: Sequence[Block]) -> Stages:
    """Cut a forward pass over blocks, the input's first, into stages: one of all rows where a model has no aggregation.

    Raises: PlanError for a result that has other rows than the last block's targets.
    """
    sets = [blocks[0].sources, *(block.targets for block in blocks)] if blocks else [OWNED]
    level = {rows: number for number, rows in enumerate(sets)}
    if result.rows != sets[-1]:
        raise PlanError(f"{result} has rows of {result.rows.name!r}, the last stage gives {sets[-1].name!r}")
    values = [value for value in Graph((result,)).values() if not isinstance(value.kind, Own | Input)]
    last = {result: len(blocks)}
    for value in values:
        for operand in map(_base, value.operands):
            if level[operand.rows] < level[value.rows] and not isinstance(operand.kind, Input):
                last[operand] = max(last.get(operand, 0), level[value.rows])
    # In the order in which they are computed.
    names = {value: RESULT if value is result else f"output.{n}" for n, value in enumerate(values) if value in last}
    outputs = tuple(
        Output(name, value.cols, value.operand, level[value.rows], last[value]) for value, name in names.items()
    )
    stages = (
        _stage(number, rows, blocks[number - 1] if number else None, values, names) for number, rows in enumerate(sets)
    )
    return Stages(tuple(stage for stage in stages if stage.graph.roots), outputs)


def _base(value: Value) -> Value:
    """Return the value whose first rows a value has."""
    while isinstance(value.kind, Own):
        (value,) = value.operands
    return value


def _stage(
    number: int, rows: RowSet, block: Block | None, values: Sequence[Value], names: Mapping[Value, str]
) -> Stage:
    """Return the values of a row set, with rows that are read from elsewhere as leaves."""
    done, leaves = dict[Value, Value](), dict[tuple[Value, RowSet], Value]()

    def read(base: Value, of: RowSet) -> Value:
        """Return what reads a value that this stage does not compute."""
        if (base, of) not in leaves:
            kind = base.kind
            leaf = StageInput(names.get(base, "") if of == rows else of_all(names.get(base, "")), of)
            leaves[base, of] = Value(
                replace(kind, of=of) if isinstance(kind, Input) else leaf, (), base.cols, base.operand
            )
        return leaves[base, of]

    for value in values:
        if value.rows != rows:
            continue
        operands = list[Value]()
        for place, base in enumerate(map(_base, value.operands)):
            over = isinstance(value.kind, Aggregate) and place == 0
            operands.append(done[base] if base in done else read(base, value.operands[0].rows if over else rows))
        done[value] = value.on(*operands)
    roots = tuple(Value(StageOutput(names[value]), (new,), value.cols) for value, new in done.items() if value in names)
    of_input = [of for base, of in leaves if isinstance(base.kind, Input)]
    return Stage(number, rows, block, Graph(roots), bool(of_input), any(of != rows for of in of_input))
