"""Turns a graph of values into a flat list of ops and the buffers of one rank: chooses order, storage and places in the
arena.

V rows of this rank, L layers. Where a kernel works in place, its result takes over the storage of an operand that
nothing reads afterwards: a gradient overwrites its activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mggcn.aggregate.base import AggregationPlan
from mggcn.blocks.block import OWNED, Block
from mggcn.memory.arena import BufferSpec, place
from mggcn.model.choices import LayerChoice
from mggcn.model.kinds.aggregate import SLOT, Aggregate, Panel, Part
from mggcn.model.kinds.combine import Own
from mggcn.model.kinds.ends import Input, Loss, StageInput, StageOutput
from mggcn.model.program import Program
from mggcn.model.rewrite.storage import block_rows
from mggcn.model.runtime import Sizes
from mggcn.model.values import Graph, Op, Scratch, Value

REUSE = (range(0), range(2, 3), range(1, 2**30))
"""A result may take the storage of a value of equal size that was last read this many ops ago.

Each rule is tried and the smallest arena wins: storage that is taken over joins two lives into one, and `place`, a first
fit, packs some joined lives better and others worse. None is best for all widths (docs/notes/0018). With two ops the
gradient of an aggregate replaces the aggregate, which the weight gradient read before.
"""


Plans = Mapping[Block, AggregationPlan]
"""The plan of aggregating over each block of a program."""


def lower(name: str, graph: Graph, sizes: Sizes, plans: Plans, *, again: bool = False) -> Program:
    """Lower a graph for one rank. Weight gradients are local sums, to be added over ranks.

    again: whether its ops run more than once, over some rows at a time: sums over rows then keep their memory. Raises:
    PlanError for a graph that reads a value that no node makes.
    """
    order = block_rows(graph, sizes.block_rows).values()
    best = _placed(name, order, sizes, plans, REUSE[0], again)
    for reuse in REUSE[1:]:
        # No arena is smaller than the buffers that live at once.
        if best.arena.nbytes == best.arena.busiest:
            break
        best = min(best, _placed(name, order, sizes, plans, reuse, again), key=lambda program: program.arena.nbytes)
    return best


def _placed(name: str, order: Sequence[Value], sizes: Sizes, plans: Plans, reuse: range, again: bool) -> Program:
    """reuse: results also take the storage of a value of equal size that was last read this many ops ago."""
    names, storage = _names(order), _Storage(order, sizes, reuse)
    ops: list[Op] = []
    for index, value in enumerate(order):
        if isinstance(value.kind, Input | StageOutput):
            continue
        if isinstance(value.kind, StageInput):
            storage.of[value] = value.kind.name
            continue
        if isinstance(value.kind, Own):
            if value.operands[0] in storage.of:
                storage.of[value] = storage.of[value.operands[0]]
            continue
        if isinstance(value.kind, Part):
            (whole,) = value.operands
            purpose = value.kind.purpose
            inside = f"{names[whole]}.{purpose}" if purpose else storage.of[whole.operands[0]]
            storage.of[value] = storage.outputs.get(value, inside)
            continue
        operands = tuple(storage.of.get(operand, "") for operand in value.operands)
        out = storage.take(index, value, names[value])
        scratch = {
            purpose: _spec(f"{names[value]}.{purpose}", room, value, sizes, again)
            for purpose, room in value.kind.scratch(value, sizes).items()
        }
        if isinstance(value.kind, Aggregate):
            slots = plans[value.kind.block].buffers(value.kind.name, value.cols, sizes.operand, value.kind.op)
            scratch |= {f"{SLOT}{spec.name}": spec for spec in slots}
        # Scratch that a later stage reads lies where its part does.
        parts = {
            p.kind.purpose: n for p, n in storage.outputs.items() if isinstance(p.kind, Part) and p.operands == (value,)
        }
        storage.specs |= {spec.name: spec for purpose, spec in scratch.items() if purpose not in parts}
        ops.append(
            Op(
                kind=value.kind,
                operands=operands,
                out=out,
                widths=tuple(operand.cols for operand in value.operands),
                cols=value.cols,
                operand=value.operand and sizes.rounds,
                scratch={purpose: parts.get(purpose, spec.name) for purpose, spec in scratch.items()},
                rows=value.rows,
                sets=tuple(operand.rows for operand in value.operands),
                sums=_gathered_sums(value),
            )
        )
    buffers = _with_lifetimes(storage.specs, ops)
    outside = {*storage.outputs.values(), *(value.kind.name for value in order if isinstance(value.kind, StageInput))}
    result = next(iter(ops[-1].reads), "") if ops else ""
    return Program(name, tuple(ops), place(buffers.values(), ops, outside), result)


def _names(order: Sequence[Value]) -> dict[Value, str]:
    """A name for the result of every value: that of its op, such as linear1."""
    names: dict[Value, str] = {}
    for value in order:
        words, _, number = value.kind.label.rpartition(" ")
        name = words.replace(" ", "-") + number if number.isdigit() else value.kind.label.replace(" ", "-")
        alike = sum(other.kind.label == value.kind.label for other in names)
        names[value] = f"{name}.{alike + 1}" if alike else name
    return names


def _spec(name: str, room: Scratch, value: Value, sizes: Sizes, again: bool) -> BufferSpec:
    dtype, lifetime = room.dtype or sizes.dtype, "state" if again and room.sums else "scratch"
    if room.rows is None:
        return BufferSpec(name, sizes.rows[value.rows], room.cols, dtype, row_set=value.rows)
    return BufferSpec(name, room.rows, room.cols, dtype, lifetime)


class _Storage:
    """Maps every value to the name of its buffer (`of`), and every name in the arena to its spec (`specs`).

    outputs: the names of values that lie in other memory, for later stages.
    """

    def __init__(self, order: Sequence[Value], sizes: Sizes, reuse: range) -> None:
        self._last = {value: index for index, reader in enumerate(order) for value in (reader, *reader.operands)}
        for value in reversed(order):
            if isinstance(value.kind, Part) and not value.kind.purpose:
                travelled = value.operands[0].operands[0]
                self._last[travelled] = max(self._last[travelled], self._last[value])
            elif isinstance(value.kind, Own):
                (whole,) = value.operands
                self._last[whole] = max(self._last[whole], self._last[value])
        self._sizes, self._reuse = sizes, reuse
        self.outputs = {value.operands[0]: value.kind.name for value in order if isinstance(value.kind, StageOutput)}
        self._holds: dict[str, Value] = {}
        self.of: dict[Value, str] = {}
        self.specs: dict[str, BufferSpec] = {}

    def take(self, index: int, value: Value, name: str) -> str:
        """Give the result of op `index` a buffer, and return its name; "" if it stores none."""
        if not value.kind.stored:
            return ""
        if value in self.outputs:
            return self.of.setdefault(value, self.outputs[value])
        rows, dtype = self._sizes.rows[value.rows], self._sizes.operand if value.operand else self._sizes.dtype
        spec = BufferSpec(name, rows, value.cols, dtype, row_set=value.rows)
        free = [
            self.of[o]
            for o in (value.operands[i] for i in value.kind.in_place)
            # Own rows lie in memory of more rows, which others may read later; so do rows of a stage's output.
            if self.of.get(o, "") in self.specs and self._last[o] == index and not isinstance(o.kind, Own)
        ]
        free += [b for b, held in self._holds.items() if index - self._last[held] in self._reuse]
        buffer = next((old for old in free if self.specs[old] == replace(spec, name=old)), name)
        self.specs.setdefault(buffer, spec)
        self.of[value], self._holds[buffer] = buffer, value
        return buffer


def _gathered_sums(value: Value) -> tuple[bool, ...]:
    """Which operands are sums over neighbours that a batch gathers; () if none is. A rank's own lie where X was."""
    kinds = (operand.kind for operand in value.operands)
    found = tuple(isinstance(kind, Input) and kind.of != OWNED and kind.aggregated > 0 for kind in kinds)
    return found if any(found) else ()


def _with_lifetimes(specs: Mapping[str, BufferSpec], ops: Sequence[Op]) -> dict[str, BufferSpec]:
    """Mark the buffers that live from the forward pass into the backward pass."""
    loss = next((index for index, op in enumerate(ops) if isinstance(op.kind, Loss)), len(ops))
    before = {name for op in ops[:loss] for name in (*op.reads, *op.writes)}
    kept = before & {name for op in ops[loss:] for name in (*op.reads, *op.writes)}
    return {
        name: replace(spec, lifetime="kept") if name in kept and spec.lifetime == "scratch" else spec
        for name, spec in specs.items()
    }


def lower_setup(aggregation: AggregationPlan, sizes: Sizes, cols: int, width: int, hops: int = 1) -> Program:
    """Lower the computation of A_hat^K X, K = hops, X of `cols` columns, by panels of `width` columns.

    The panels run through one op each, in order; buffer "panel" holds S_c X of the panel's columns.
    """
    panel = BufferSpec("panel", sizes.owned, width, sizes.dtype, row_set=OWNED)
    slots = aggregation.buffers("panel", width, sizes.dtype)  # A X is computed once, and not rounded
    scratch = {"panel": panel.name, **{f"{SLOT}{spec.name}": spec.name for spec in slots}}
    panels = [Panel(first, min(width, cols - first)) for first in range(0, cols, width)] * hops
    ops = tuple(Op(kind=kind, operands=(), out="", widths=(), cols=kind.width, scratch=scratch) for kind in panels)
    return Program("setup", ops, place([panel, *slots], ops))


def panel_width(aggregation: AggregationPlan, sizes: Sizes, cols: int, limit: int) -> int:
    """Return the most columns of a panel for which set-up fits an arena of `limit` bytes: all, or a multiple of 16."""
    width = cols
    while width > 16 and lower_setup(aggregation, sizes, cols, width).arena.nbytes > limit:
        width = max(16, (width // 2 + 15) // 16 * 16)
    return width


def paper_arena_bytes(layers: Sequence[LayerChoice], sizes: Sizes, ranks: int, largest_rows: int) -> int:
    """Return the bytes of the paper's L + 3 buffers (MG-GCN 4.2; L + 1 on one rank) for these widths, rows padded alike."""
    widths = [layer.d_out for layer in layers]
    buffers = [layers[0].d_out] + [max(layer.d_in, layer.d_out) for layer in layers[1:]]
    own = sum(BufferSpec("", sizes.owned, w, sizes.dtype).nbytes for w in [*buffers, max(widths)])
    slots = 2 * BufferSpec("", largest_rows, max(widths), sizes.dtype).nbytes if ranks > 1 else 0
    return own + slots


def aggregations(ops: Sequence[Op]) -> list[tuple[Op, Aggregate]]:
    """Return the aggregations among the ops, each with its kind."""
    return [(op, op.kind) for op in ops if isinstance(op.kind, Aggregate)]
