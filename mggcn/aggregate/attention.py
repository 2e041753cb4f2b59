"""Attention over neighbours as edge operations: GAT (Velickovic et al. 2018) and GATv2 (Brody et al. 2022).

H heads of C columns, D = H C. An edge u -> v has a score e_uv for each head, and z_v = sum of softmax(e_uv) x_u over the
in-edges of v. Forwards a row has a running maximum m, sum l and rescaled value z for each head (FlashAttention, Dao et al.
2022): triples combine in any order. Backwards weights are computed again from m and l, in one pass to the sources and one
to the destinations. No pass has a number for each edge. bench/notes/0025-attention.md has bytes and FLOP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mggcn.aggregate.edge_op import Arithmetic, Columns, EdgeOp, Share, Target
from mggcn.aggregate.maximum import GradientRows, PairedRows
from mggcn.backend.base import Dropout, KernelBackend, Sparse
from mggcn.backend.neighbours import Heads
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor

SLOPE = 0.2
"""Of LeakyReLU below 0, in both papers."""
LANES = 8
"""Edges of a row whose scores a processor computes at once (kBlock of cpu/attention.h)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Inputs of the kernels that are not sent: a (H, C) of GATv2's scores, and the clock (2,) of dropout."""

    a: Tensor | None
    clock: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention of a model, or heads of one from the head `first` on. dynamic: GATv2's scores. dropout: probability;
    site: which mask of the epoch. counted: values of edges are numbers of parallel edges, each an entry of the softmax,
    which are dropped together; otherwise values are not read.

    Forwards a row is [x (D) | s (H), of GAT | its number, with dropout], and has t (H), or y (D) of GATv2, where it is a
    destination. Backwards it is [g (D) | d (H) | t or y | m (H) | 1 / l (H) | its number, with dropout].
    """

    heads: int
    width: int
    dynamic: bool
    dropout: float = 0.0
    site: int = 0
    first: int = 0
    counted: bool = False
    bound: Bound | None = field(default=None, compare=False, repr=False)

    @property
    def scored(self) -> int:
        """Columns of t or y."""
        return self.width if self.dynamic else self.heads

    @property
    def travels(self) -> int:
        """Columns of the gradient of what travels forwards: [x | s], or x."""
        return self.width + (0 if self.dynamic else self.heads)

    @property
    def forwards(self) -> int:
        return self.travels + bool(self.dropout)

    @property
    def backwards(self) -> int:
        return self.width + 3 * self.heads + self.scored + bool(self.dropout)

    def heads_of(self, ids: Tensor) -> Heads:
        """Return the kernels' description of the heads, from the runtime that the op is bound to; ids int64 (V,)."""
        if self.bound is None:
            raise PlanError("attention runs as a node of a model, which binds it to weights and a clock")
        dropout = Dropout(self.dropout, self.bound.clock, self.site) if self.dropout else None
        return Heads(self.heads, self.width // self.heads, SLOPE, self.bound.a, dropout, ids, self.first, self.counted)

    def arithmetic(self, of: str = "") -> Arithmetic:
        """Return what a kernel computes along an edge; of: "sources" or "destinations" of the gradient, "" forwards."""
        names = ("gatv2" if self.dynamic else "gat", *filter(None, (of,)))
        return Arithmetic("_".join(names), self.heads, self.width, LANES)

    def of(self, heads: range) -> AttentionSpec:
        """Return the attention of some of the heads."""
        width, bound = self.width // self.heads * len(heads), self.bound
        if bound is not None and bound.a is not None:
            bound = Bound(bound.a[heads.start : heads.stop], bound.clock)
        return dataclasses.replace(self, heads=len(heads), width=width, first=self.first + heads.start, bound=bound)

    def columns_of(self, heads: range, fields: str) -> tuple[range, ...]:
        """Return the columns of some heads in a row of fields: x of D columns, h of H, n of one, that of no head."""
        cols, found, start = self.width // self.heads, [], 0
        for name in fields:
            step = {"x": cols, "h": 1, "n": 0}[name]
            found.append(
                range(start + heads.start * step, start + heads.stop * step) if step else range(start, start + 1)
            )
            start += self.heads * step
        return tuple(found)

    @property
    def fields(self) -> tuple[str, str, str]:
        """The fields of rows that travel forwards, of t or y, and of rows that travel backwards."""
        own, number = "x" if self.dynamic else "h", "n" if self.dropout else ""
        return f"x{'' if self.dynamic else 'h'}{number}", own, f"xh{own}hh{number}"


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of an op. make: makes the op from its attention; the others: fields of a row of its tensors as in Share."""

    spec: AttentionSpec
    make: Callable[[AttentionSpec], EdgeOp]
    operand: str
    local: str
    result: str
    kept: str

    @property
    def heads(self) -> int:
        return self.spec.heads

    def share(self, heads: range) -> Share:
        operand, local, result, kept = (
            self.spec.columns_of(heads, fields) for fields in (self.operand, self.local, self.result, self.kept)
        )
        op = self.make(self.spec.of(heads))
        return Share(op, operand, (local,), result, (kept,) if kept else (), bool(self.spec.dropout))


@dataclass(frozen=True, slots=True)
class Attention(EdgeOp):
    """Forwards. local: t (V, H) or y (V, D), numbers int64 (V,), then m and l (V, 2 H), which are kept."""

    spec: AttentionSpec
    name = "attention"
    columnwise = False
    additive = False

    @property
    def adjoint(self) -> AttentionSources:
        return AttentionSources(self.spec)

    def columns(self, cols: int) -> Columns:
        partial = self.spec.width + 2 * self.spec.heads
        return Columns(self.spec.forwards, partial, partial)

    def arithmetic(self, cols: int) -> Arithmetic:
        return self.spec.arithmetic()

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return (BufferSpec(f"{name}.state", rows, 2 * self.spec.heads, dtype, "kept"),)

    @property
    def by_head(self) -> AttentionHeads:
        forwards, own, _ = self.spec.fields
        return AttentionHeads(self.spec, Attention, forwards, own, "x", "hh")

    def begin(self, backend: KernelBackend, target: Target) -> Attending:
        return Attending(self.spec, backend, target)


class Attending(PairedRows):
    """The Accumulation of `Attention`: m and l by head beside z."""

    def __init__(self, spec: AttentionSpec, backend: KernelBackend, target: Target) -> None:
        self._own, ids, state = target.local
        super().__init__(backend, target, state)
        self._heads = spec.heads_of(ids)

    def _add(self, matrix: Sparse | None, rows: Tensor, last: bool) -> None:
        self._backend.neighbours.attend(
            self._heads, matrix, rows, self._own, self._out, self._beside, begins=not self._begun, ends=last
        )

    def combine(self, message: Tensor, index: Tensor) -> None:
        self._backend.neighbours.attend_combine(self._heads, message, index, self._out, self._beside)


@dataclass(frozen=True, slots=True)
class AttentionSources(EdgeOp):
    """Backwards: the gradients of what travelled. local: what travelled forwards of these rows, numbers int64 (V,).

    Where vertices have copies, g and d of a row are parts of a sum, what follows them is equal on all.
    """

    spec: AttentionSpec
    name = "gradient of attention"
    columnwise = False
    additive = False

    @property
    def adjoint(self) -> EdgeOp:
        raise PlanError("the gradient of attention has no derivative; use it in the backward pass alone")

    def columns(self, cols: int) -> Columns:
        return Columns(self.spec.backwards, self.spec.travels, self.spec.width + self.spec.heads)

    def arithmetic(self, cols: int) -> Arithmetic:
        return self.spec.arithmetic("sources")

    @property
    def by_head(self) -> AttentionHeads:
        forwards, _, backwards = self.spec.fields
        return AttentionHeads(self.spec, AttentionSources, backwards, forwards, forwards.removesuffix("n"), "")

    def begin(self, backend: KernelBackend, target: Target) -> SourceRows:
        return SourceRows(self.spec, backend, target)


class SourceRows(GradientRows):
    """The Accumulation of `AttentionSources`."""

    def __init__(self, spec: AttentionSpec, backend: KernelBackend, target: Target) -> None:
        super().__init__(backend, target)
        self._own, ids = target.local
        self._heads = spec.heads_of(ids)

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        if matrix.nnz or not self._begun:
            kernels, out = self._backend.neighbours, self._target.out
            kernels.attend_sources(self._heads, matrix, rows, self._own, out, begins=not self._begun)
        self._begun = True


@dataclass(frozen=True, slots=True)
class AttentionDestinations(EdgeOp):
    """Backwards, but along the edges: the gradients of t or y from rows of sources, which travel once more.

    local: what travelled backwards of these rows, whole on all copies, numbers int64 (V,), and for GATv2 the gradients of
    a by row (V, D), which are kept. The results are parts of a sum over copies, as gradients are: nothing is exchanged.
    """

    spec: AttentionSpec
    name = "gradient of attention's destinations"
    columnwise = False
    additive = False

    @property
    def adjoint(self) -> EdgeOp:
        raise PlanError("the gradient of attention has no derivative; use it in the backward pass alone")

    def columns(self, cols: int) -> Columns:
        return Columns(self.spec.forwards, self.spec.scored, 0)

    def arithmetic(self, cols: int) -> Arithmetic:
        return self.spec.arithmetic("destinations")

    def kept(self, name: str, rows: int, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        return (BufferSpec(f"{name}.weights", rows, self.spec.width, dtype, "kept"),) if self.spec.dynamic else ()

    @property
    def by_head(self) -> AttentionHeads:
        forwards, own, backwards = self.spec.fields
        return AttentionHeads(
            self.spec, AttentionDestinations, forwards, backwards, own, "x" if self.spec.dynamic else ""
        )

    def begin(self, backend: KernelBackend, target: Target) -> DestinationRows:
        return DestinationRows(self.spec, backend, target)


class DestinationRows(GradientRows):
    """Adds up the gradient of the destinations' scores, tile after tile (`AttentionDestinations`)."""

    def __init__(self, spec: AttentionSpec, backend: KernelBackend, target: Target) -> None:
        super().__init__(backend, target)
        self._own, ids, *beside = target.local
        self._heads, self._beside = spec.heads_of(ids), beside[0] if beside else None

    def tile(self, matrix: Sparse, rows: Tensor, *, last: bool) -> None:
        if matrix.nnz or not self._begun:
            kernels, out = self._backend.neighbours, self._target.out
            kernels.attend_destinations(self._heads, matrix, rows, self._own, out, self._beside, begins=not self._begun)
        self._begun = True
