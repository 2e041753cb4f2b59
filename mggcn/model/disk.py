"""A program whose values lie on disk between its stages: a graph cut into sweeps over rows, and ops over all rows.

A sweep is a run of ops of kinds that work row by row: it runs over some rows at a time, and what only its own ops read is
never written. An op of another kind is a stage of its own: it runs over all rows, and by columns where its kind allows,
some of them at a time. So every value crosses from memory to disk and back once for each stage that needs it, whatever the
order of the vertices (docs/notes/0046-disk.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from mggcn.blocks.block import OWNED
from mggcn.errors import ConfigError
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.aggregate import Aggregate, Part
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.elementwise import Elementwise, EpilogueSpec
from mggcn.model.kinds.ends import Input, LearnedGrad, Score, StageInput, StageOutput
from mggcn.model.lower import Plans
from mggcn.model.runtime import Sizes
from mggcn.model.values import Graph, Kind, Value

X: Final = "X"
"""Name of the dense input on disk."""
SUMMED: Final = "A X"
"""Name of the sums of its neighbours, which take its place."""
RESULT: Final = "result"
"""Name of the scores, where they stay in memory."""
How = Literal["rows", "columns", "whole"]
"""How a stage runs: over some rows at a time, over some columns of all rows, or over all at once."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that stages after the one that makes it read, by name: its buffer if it were in memory.

    first, last: the stages that make and last read it, by number. in_memory: whether it stays there: scores that are kept,
    and vectors that ops keep beside their rows.
    """

    spec: BufferSpec
    first: int
    last: int
    in_memory: bool

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class DiskStage:
    """A part of a program that runs over its rows or columns in one go. graph: its values, down to what it writes.

    reads, writes: names of the crossings. left: the operand, by name, that an op leaves as one of `writes`. onto: the
    crossing whose place one of `writes` takes.
    """

    how: How
    graph: Graph
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    onto: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskStages:
    """A program in stages, and all values that cross from one to another."""

    stages: tuple[DiskStage, ...]
    crossings: Mapping[str, Crossing]

    def of(self, stage: DiskStage, name: str) -> Crossing:
        """Return the crossing that a stage reads or writes by this name."""
        return self.crossings[stage.onto.get(name, name)]


def runs_by_columns(kind: Kind, cols: int, sizes: Sizes, plans: Plans) -> bool:
    """Return whether an op runs over some columns at a time: not where a strategy needs all, or keeps sums of them."""
    if isinstance(kind, Aggregate):
        plan = plans[kind.block]
        if not plan.by_columns or plan.state(kind.name, cols, sizes.operand):
            return False
    return kind.by_columns


def cut_for_disk(graph: Graph, sizes: Sizes, plans: Plans, *, keeps_scores: bool = True) -> DiskStages:
    """Cut a program over the whole graph into stages. plans: how it aggregates.

    keeps_scores: whether an evaluation's scores stay in memory; otherwise they are gone once their op has counted them.

    Raises: ConfigError for a model whose values cannot lie on disk.
    """
    _check(graph)
    values = [value for value in graph.values() if not isinstance(value.kind, Input)]
    groups = _groups(values)
    number = {value: stage for stage, group in enumerate(groups) for value in group}
    crossings, names = _crossings(values, number, sizes, keeps_scores)
    inputs = {value for value in graph.values() if _is_dense_input(value)}
    last = max((number[v] for v in values if inputs.intersection(v.operands)), default=-1)
    if last >= 0:
        spec = BufferSpec(X, sizes.owned, next(iter(inputs)).cols, sizes.dtype, row_set=OWNED)
        crossings[X] = Crossing(spec, -1, last, in_memory=False)
    stages = tuple(_stage(group, names, _how(group[0], sizes, plans)) for group in groups)
    return DiskStages(stages, crossings)


def cut_setup(sizes: Sizes, cols: int, hops: int) -> DiskStages:
    """Return the computation of A_hat^K X, K = hops, in the place of X (V, cols): by columns, a stage for each hop."""
    x = Value(StageInput(X, OWNED), (), cols)
    scaled = Value(Elementwise(EpilogueSpec(out_scale="col"), 0), (x,), cols)
    summed = Value(Aggregate(1, EpilogueSpec(row_scale="row")), (scaled,), cols)
    graph = Graph((Value(StageOutput(SUMMED), (summed,), cols),))
    crossing = Crossing(BufferSpec(X, sizes.owned, cols, sizes.dtype, row_set=OWNED), -1, hops, in_memory=False)
    hop = DiskStage("columns", graph, (X,), (SUMMED,), onto={SUMMED: X})
    return DiskStages((hop,) * hops, {X: crossing})


def narrowed(stage: DiskStage, cols: int) -> Graph:
    """Return the graph of a stage by columns for panels of at most `cols` columns."""

    def rule(old: Value, new: Value) -> Value:
        return new if isinstance(new.kind, Input) else replace(new, cols=min(new.cols, cols))

    return stage.graph.rewritten(rule)


def _check(graph: Graph) -> None:
    """Raise ConfigError for a program with rows other than all of the rank's, or with learned ones."""
    for value in graph.values():
        if isinstance(value.kind, LearnedGrad) or (isinstance(value.kind, Input) and value.kind.learned):
            raise ConfigError(
                "run.capacity disk keeps X on disk, and learned rows change in every step; set run.capacity=memory"
            )
        if value.rows != OWNED or isinstance(value.kind, Own):
            raise ConfigError(
                f"run.capacity disk is for programs over the vertices of a rank, and {value.kind.label} has rows of "
                f"{value.rows.name}; set run.capacity=memory"
            )


def _is_dense_input(value: Value) -> bool:
    return isinstance(value.kind, Input) and not value.kind.sparse


def _groups(values: Sequence[Value]) -> list[list[Value]]:
    """Return the values of each stage, in the program's order: a Part belongs to the op that leaves it."""
    groups: list[list[Value]] = []
    sweep: list[Value] = []
    home: dict[Value, list[Value]] = {}
    for value in values:
        if isinstance(value.kind, Part):
            group = home[value.operands[0]]
        elif value.kind.by_rows:
            if not sweep:
                groups.append(sweep)
            group = sweep
        else:
            sweep, group = [], []
            groups.append(group)
        group.append(value)
        home[value] = group
    return groups


def _crossings(
    values: Sequence[Value], number: Mapping[Value, int], sizes: Sizes, keeps_scores: bool
) -> tuple[dict[str, Crossing], dict[Value, str]]:
    """Return what is read in a later stage than it is made in, by name, and the name of each such value."""
    last = dict[Value, int]()
    for value in values:
        for operand in value.operands:
            if operand in number and number[operand] < number[value] and _has_rows(operand):
                last[operand] = max(last.get(operand, 0), number[value])
    scored = {value.operands[0] for value in values if keeps_scores and isinstance(value.kind, Score)}
    last |= {value: max(last.get(value, 0), number[value]) for value in scored}
    crossings, names = dict[str, Crossing](), dict[Value, str]()
    for place, value in enumerate(values):
        if value in last:
            name = RESULT if value in scored else f"value {place}"
            spec = _spec(name, value, sizes)
            small = value in scored or spec.row_set is None
            crossings[name], names[value] = Crossing(spec, number[value], last[value], small), name
    return crossings, names


def _has_rows(value: Value) -> bool:
    return value.kind.stored


def _spec(name: str, value: Value, sizes: Sizes) -> BufferSpec:
    """Return the buffer of a value: of a Part that of its op's scratch."""
    cols, dtype = value.cols, sizes.operand if value.operand else sizes.dtype
    if isinstance(value.kind, Part) and value.kind.purpose:
        (whole,) = value.operands
        room = whole.kind.scratch(whole, sizes)[value.kind.purpose]
        cols, dtype = room.cols, room.dtype or sizes.dtype
        if room.rows is not None:
            return BufferSpec(name, room.rows, cols, dtype)
    elif isinstance(value.kind, Part):
        (left,) = value.operands[0].operands[:1]
        cols, dtype = left.cols, sizes.operand if left.operand else sizes.dtype
    return BufferSpec(name, sizes.owned, cols, dtype, row_set=OWNED)


def _stage(group: Sequence[Value], names: Mapping[Value, str], how: How) -> DiskStage:
    """Return the values of a stage, with leaves for what it reads, and what it writes as roots."""
    done, leaves = dict[Value, Value](), dict[Value, Value]()

    def read(value: Value) -> Value:
        if value in done:
            return done[value]
        if value not in leaves:
            leaves[value] = _leaf(value, names)
        return leaves[value]

    left = dict[str, str]()
    for value in group:
        done[value] = value.on(*map(read, value.operands))
        if isinstance(value.kind, Part) and not value.kind.purpose and value in names:
            travelled = done[value.operands[0]].operands[0]
            left[names[value]] = travelled.kind.name if isinstance(travelled.kind, StageInput) else ""
    used = {operand for value in group for operand in value.operands}
    roots = []
    for value, new in done.items():
        if value in names and names[value] not in left:
            roots.append(Value(StageOutput(names[value]), (new,), new.cols))
        elif value not in used and not isinstance(value.kind, Part):
            roots.append(new)
    reads = tuple(dict.fromkeys(leaf.kind.name for leaf in leaves.values() if isinstance(leaf.kind, StageInput)))
    writes = tuple(names[value] for value in group if value in names)
    return DiskStage(how, Graph(tuple(roots)), reads, writes, left)


def _leaf(value: Value, names: Mapping[Value, str]) -> Value:
    """Return what stands for a value of another stage, or the input, in a stage that reads it."""
    if value in names:
        return Value(StageInput(names[value], OWNED), (), value.cols, value.operand)
    if _is_dense_input(value):
        return Value(StageInput(X, OWNED), (), value.cols)
    # The sparse input, or its values under a mask, which are in memory.
    return Value(value.kind if isinstance(value.kind, Input) else Input(sparse=True), (), value.cols)


def _how(first: Value, sizes: Sizes, plans: Plans) -> How:
    """Return how the stage of an op runs, or that of the first op of a sweep."""
    if first.kind.by_rows:
        return "rows"
    return "columns" if runs_by_columns(first.kind, first.cols, sizes, plans) else "whole"
