"""A model as a value: an immutable graph of values, each computed from others by a node of some kind.

V rows of this rank. Rewrites (rewrite/) are pure functions from graph to graph; derive.py adds the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from mggcn.blocks.block import OWNED, RowSet
from mggcn.errors import PlanError
from mggcn.model.runtime import Runtime, Sizes, require

if TYPE_CHECKING:
    from torch import Tensor


class Scratch(NamedTuple):
    """Memory that an op needs while it runs; rows None: as many as its result, dtype "": that of activations.

    sums: whether it holds sums over rows, which an op that runs over some rows at a time continues.
    """

    cols: int
    rows: int | None = None
    dtype: str = ""
    sums: bool = False


class Kind(Protocol):
    """How a value is computed: one small frozen class for each kind of node.

    `adjoint` gives gradients as nodes, so that nobody writes a model's backward pass. A kind outside this package can be a
    subclass of `PlainKind`.
    """

    @property
    def label(self) -> str:
        """Name in plans and timelines, such as "linear 1"."""
        ...

    def rows(self, operands: Sequence[Value]) -> RowSet:
        """Return the row set of the result."""
        ...

    @property
    def stored(self) -> bool:
        """Whether the result is a matrix of this rank's rows in the arena, rather than a gradient of weights or an
        input.
        """
        ...

    @property
    def has_parameters(self) -> bool:
        """Whether the node reads parameters of the model, whose gradients are effects of its adjoint."""
        ...

    @property
    def in_place(self) -> tuple[int, ...]:
        """The operands whose memory the result may reuse, the best first, if nothing reads them afterwards."""
        ...

    @property
    def overwrites(self) -> tuple[int, ...]:
        """The operands that the op may overwrite."""
        ...

    @property
    def by_rows(self) -> bool:
        """Whether a row of the result depends on the same rows of the operands alone, besides parameters and constants of
        the row, so that an op may run over some rows at a time, in order. Sums over rows are then the kernels' alone, which
        continue them (backend/window.py): what is computed from a sum is right after the last rows.
        """
        ...

    @property
    def by_columns(self) -> bool:
        """Whether a column of the result depends on the same column of the operands and parameters alone, so that an op may
        run over some columns at a time: from a multiple of 64 bytes on.
        """
        ...

    @property
    def gradient_of(self) -> str:
        """The parameter whose gradient the node writes, "" if none: no other node of a graph may write it."""
        ...

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        """Return the gradients of the node's operands, given the gradient of its result."""
        ...

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        """Bytes of the vectors that an op of this kind sums over ranks; it then needs all rows of its operands."""
        ...

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        """Return the memory that the op needs besides operands and result, by purpose."""
        ...

    def run(self, rt: Runtime, op: Op) -> None:
        """Compute the result of an op of this kind."""
        ...


class PlainKind:
    """The defaults that suit most kinds: the result is a new matrix with a row for each of the first operand's."""

    __slots__ = ()
    title: ClassVar[str] = ""
    """Label in which {self.site} stands for a field."""
    stored: ClassVar[bool] = True
    in_place: ClassVar[tuple[int, ...]] = ()
    by_rows: ClassVar[bool] = False

    def rows(self, operands: Sequence[Value]) -> RowSet:
        """Return the row set of the first operand; all rows of the rank without one."""
        return operands[0].rows if operands else OWNED

    @property
    def has_parameters(self) -> bool:
        """Return False: most kinds read no parameters."""
        return False

    @property
    def overwrites(self) -> tuple[int, ...]:
        """Return no operand: most kinds overwrite none."""
        return ()

    @property
    def by_columns(self) -> bool:
        """Return False: most kinds need all columns."""
        return False

    @property
    def gradient_of(self) -> str:
        """Return "": most kinds write no parameter's gradient."""
        return ""

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        """Return (): most kinds sum nothing over ranks."""
        return ()

    @property
    def label(self) -> str:
        """Return the title with its fields filled in, by default the kind's name."""
        return self.title.format(self=self) or type(self).__name__.lower()

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        """Raise PlanError: nodes of a backward pass or a score have no gradient."""
        raise PlanError(f"the loss depends on {value}, whose kind has no adjoint; give {type(self).__name__} one")

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        """Return no memory."""
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A matrix (V, cols), or the effect of a node that stores none. Two values are equal only if they are the same.

    operand: whether it has the type of operands of the graph product, where that differs from that of activations. rows:
    its row set, as its kind says.
    """

    kind: Kind
    operands: tuple[Value, ...] = ()
    cols: int = 0
    operand: bool = False
    rows: RowSet = field(init=False)

    def __post_init__(self) -> None:
        # Stored, because a property would walk down to the input each time.
        object.__setattr__(self, "rows", self.kind.rows(self.operands))

    def with_kind(self, kind: Kind) -> Value:
        """Return the same value computed by another kind of node."""
        return replace(self, kind=kind)

    def on(self, *operands: Value) -> Value:
        """Return the same node on other operands."""
        return replace(self, operands=operands)

    def __str__(self) -> str:
        return f"{self.kind.label} ({self.cols})"


class Adjoint(NamedTuple):
    """Gradients of the operands, None where none is needed; effects: nodes that write gradients of parameters."""

    operands: tuple[Value | None, ...]
    effects: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One step of a program: a kind of node on named buffers.

    operands: their names, "" for the constant input; out: "" if nothing is stored; scratch: names by purpose.
    widths: columns of the operands; cols: of the result; operand: whether it has the type of what is multiplied with the
    graph, other than that of activations. rows: row set of the result; sets: of the operands; sums: which of them are the
    sums over neighbours that a batch gathers beside X, none without any.
    """

    kind: Kind
    operands: tuple[str, ...]
    out: str
    widths: tuple[int, ...]
    cols: int
    operand: bool = False
    scratch: Mapping[str, str] = field(default_factory=dict)
    rows: RowSet = OWNED
    sets: tuple[RowSet, ...] = ()
    sums: tuple[bool, ...] = ()

    @property
    def label(self) -> str:
        return self.kind.label

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(name for name in self.operands if name)

    @property
    def writes(self) -> tuple[str, ...]:
        used_up = tuple(self.operands[index] for index in self.kind.overwrites if self.operands[index])
        return (*((self.out,) if self.out else ()), *used_up, *self.scratch.values())

    def run(self, rt: Runtime) -> None:
        self.kind.run(rt, self)

    def tensor(self, rt: Runtime, index: int) -> Tensor:
        """Return an operand: the rows of its set in a buffer, or the constant dense input, maybe of all vertices."""
        name, rows = self.operands[index], self.sets[index]
        if not name:
            inputs = rt.inputs.rows[rows]
            if inputs.everyone is not None:
                return inputs.everyone
            constant = inputs.sums if self.sums and self.sums[index] else inputs.dense
            return require(constant)[: rt.num_rows(rows)]
        return rt.buffer(name) if rows is OWNED else rt.buffer(name)[: rt.num_rows(rows)]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The values that a program must compute, in the preferred order.

    Two graphs are equal if they compute the same values in the same order.
    """

    roots: tuple[Value, ...]

    def values(self) -> tuple[Value, ...]:
        """Return every value that a root needs, operands before their readers."""
        return tuple(_postorder(self.roots))

    def users(self) -> dict[Value, list[Value]]:
        """Return for every value its readers, each once for every operand that reads it."""
        found: dict[Value, list[Value]] = {value: [] for value in self.values()}
        for value in found:
            for operand in value.operands:
                found[operand].append(value)
        return found

    def rewritten(self, rule: Callable[[Value, Value], Value]) -> Graph:
        """Return the graph with `rule(old, new)` for every value, new being the old one on rewritten operands."""
        done: dict[Value, Value] = {}
        for old in self.values():
            operands = tuple(done[operand] for operand in old.operands)
            same = all(a is b for a, b in zip(operands, old.operands, strict=True))
            done[old] = rule(old, old if same else replace(old, operands=operands))
        return Graph(tuple(done[root] for root in self.roots))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash(len(self.roots))

    def _structure(self) -> list[tuple[object, ...]]:
        number = {value: index for index, value in enumerate(self.values())}
        nodes = [(v.kind, v.cols, v.operand, tuple(number[o] for o in v.operands)) for v in number]
        return [*nodes, tuple(number[root] for root in self.roots)]

    def __str__(self) -> str:
        names = {value: f"v{index}" for index, value in enumerate(self.values())}
        return "\n".join(
            f"{name} = {value.kind.label}({', '.join(names[o] for o in value.operands)})  {value.cols} columns"
            for value, name in names.items()
        )


def _postorder(roots: Sequence[Value]) -> Iterator[Value]:
    seen: set[Value] = set()
    for root in roots:
        stack = [(root, iter(root.operands))] if root not in seen else []
        seen.add(root)
        while stack:
            value, operands = stack[-1]
            fresh = next((operand for operand in operands if operand not in seen), None)
            if fresh is None:
                stack.pop()
                yield value
            else:
                seen.add(fresh)
                stack.append((fresh, iter(fresh.operands)))
