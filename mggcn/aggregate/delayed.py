"""DistGNN's partial aggregates over a vertex cut (section 5.3, Algorithm 4): 0c, cd-0 and cd-r.

A rank multiplies the edges of its part. A split vertex then has partial sums on several ranks: the leaves send theirs to
the root, which adds them and sends the total back. Activations are equal on all copies, gradients are parts of a sum, so
the exchange is its own adjoint: cd-0 is exact. cd-r sends a bin of the split vertices per epoch and waits r epochs later
(delayed_epochs.py); 0c never sends. V rows of this rank, the first S of them split; L leaves, R roots once per leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from mggcn.aggregate.base import Aggregation, BuildContext, Matrix, RankAggregations
from mggcn.aggregate.delayed_part import Part, build_part
from mggcn.aggregate.edge_op import SUM, Accumulation, EdgeOp, Target
from mggcn.aggregate.steps import Await, Copy, Send, Step
from mggcn.backend.base import Epilogue
from mggcn.config import RunConfig
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec
from mggcn.partition.base import PartitionStats
from mggcn.partition.cut.partition import (
    CutStats,
    row_ranges,
    stats_of_cut,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mggcn.comm.base import Communicator


class DelayedStrategy:
    """Partial aggregates over a vertex cut; run.delay says when they are sent."""

    name = "delayed"
    kind: Literal["cut"] = "cut"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> DelayedPlan:
        delay = run.delay_epochs if training else 0
        return DelayedPlan(rank, stats_of_cut(stats), symmetric, delay, run.stale_aggregates == "reuse")


@dataclass(frozen=True, slots=True)
class DelayedPlan:
    """One rank's part of a vertex cut. delay: None never sends; keep_last: roots and leaves keep the last message that
    they received.
    """

    rank: int
    stats: CutStats
    symmetric: bool
    delay: int | None
    keep_last: bool
    by_columns = True

    @property
    def exact(self) -> bool:
        return self.delay == 0 or len(self.stats.counts) == 1

    @property
    def period(self) -> int:
        return max(self.delay or 0, 1)

    @property
    def rows(self) -> int:
        return self.stats.counts[self.rank]

    @property
    def bounds(self) -> tuple[int, ...]:
        return row_ranges(self.stats.split[self.rank], self.rows)

    def num_leaves(self, number: int | None = None) -> int:
        """L: leaves of this rank, of all bins or one."""
        leaves = self.stats.leaves
        return int((leaves[:, self.rank] if number is None else leaves[number, self.rank]).sum())

    def num_roots(self, number: int | None = None) -> int:
        """R: leaves on other ranks whose root is here, of all bins or one."""
        leaves = self.stats.leaves
        return int((leaves[:, :, self.rank] if number is None else leaves[number, :, self.rank]).sum())

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        bounds = self.bounds
        sizes = (last - first for first, last in pairwise(bounds))
        return tuple(Matrix(rows, nnz) for rows, nnz in zip(sizes, self.stats.nnz[self.rank], strict=True))

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return () if self.symmetric else (Matrix(self.rows, sum(self.stats.nnz[self.rank])),)

    @property
    def index_bytes(self) -> int:
        lists = 4 * (self.num_leaves() + self.num_roots()) * (2 if self.period > 1 else 1)
        # What is missing of each split row, in the states that follow each other in a period.
        shares = 0 if self.delay == 0 else 1 if self.delay is None or self.keep_last else self.period
        return lists + 8 * self.stats.split[self.rank] * shares

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        if len(self.stats.counts) == 1:
            return ()
        if self.delay != 0 and not op.additive:
            raise PlanError(
                f"run.delay {'none' if self.delay is None else self.delay} uses partial sums in place of complete ones, "
                f"but the results of the edge operation {op.name} do not add up; use run.delay 0, or the strategy "
                "broadcast or halo"
            )
        if self.delay != 0:
            return ()
        # First the leaves' partial results go from one to the other, then the whole ones come back.
        width = op.columns(cols).shared
        if not width:
            return ()
        return (
            BufferSpec(f"{name}.leaves", self.num_leaves(), width, dtype),
            BufferSpec(f"{name}.roots", self.num_roots(), width, dtype),
        )

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        if not self.delay:
            return ()
        # The transport owns the buffers at both ends of a message until it has arrived.
        ends = {"leaves-out": True, "leaves-in": True, "roots-out": False, "roots-in": False}
        if self.keep_last:
            ends |= {"leaves-last": True, "roots-last": False}
        leaves, roots = self.num_leaves(), self.num_roots()
        return tuple(
            BufferSpec(f"{name}.{end}", leaves if of_leaves else roots, cols, dtype, "state")
            for end, of_leaves in ends.items()
        )

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        reuse, columns = self.stats.reuse, op.columns(cols)
        split, middle, rest = (columns.multiply(m.rows, self.rows, m.nnz, reuse) for m in self.matrices)
        whole: tuple[Step, ...] = (split, middle, rest)
        if backward and not self.symmetric:
            whole = (columns.multiply(self.rows, self.rows, sum(self.stats.nnz[self.rank]), reuse),)
        if self.delay is None or len(self.stats.counts) == 1 or not columns.shared:
            return whole
        # cd-r exchanges one bin an epoch; an exact aggregation all of them, however many the cut has.
        number = phase if self.delay else None
        leaves, roots = self.num_leaves(number), self.num_roots(number)
        shared = columns.shared
        width = BufferSpec("", 1, shared, dtype).nbytes
        # Roots add what each leaf sent, gather the totals, and leaves take them.
        up: tuple[Step, ...] = (Copy(leaves, shared), Send("all_to_all", leaves * width, roots * width))
        if self.delay:
            # What arrived is kept, the split rows are scaled, and totals lose their leaves' parts.
            up = (Copy(leaves + 2 * roots, shared), Copy(split.rows, shared), *up)
        down: tuple[Step, ...] = (Copy(2 * roots, shared), Send("all_to_all", roots * width, leaves * width))
        if self.delay:
            exchange = (*up, *down, Copy(leaves, shared))
            return (*exchange, *whole) if backward else (*whole, *exchange, Copy(split.rows, cols))
        if backward:
            return (*up, Await(0), *down, Await(1), Copy(leaves, shared), *whole)
        return (split, *up, middle, Await(0), *down, rest, Await(1), Copy(leaves, shared), Copy(split.rows, cols))

    def build(self, context: BuildContext) -> RankAggregations:
        part = build_part(context, self.bounds, self.period, partial=self.delay != 0)
        complete = Complete(part, context.comm)
        if self.delay is None:
            return RankAggregations(LocalOnly(part), complete)
        if self.delay == 0:
            return RankAggregations(complete, complete)
        from mggcn.aggregate.delayed_epochs import DelayedByEpochs  # it loads torch, which plans do without

        return RankAggregations(DelayedByEpochs(part, context.comm, context.states, self.keep_last), complete)


class LocalOnly(Aggregation):
    """0c: partial sums, scaled up by the degree that they lack, replace the complete ones; the backward pass is the
    adjoint.
    """

    exact = False

    def __init__(self, part: Part) -> None:
        self._part = part
        self._shares = part.backend.upload(part.missing)

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        part = self._part
        part.compute(op, h, replace(target, epilogue=Epilogue(row_scale=self._shares)), 0)
        for number in range(1, len(part.forward)):
            part.compute(op, h, target, number)
        part.finish(target.out, target.epilogue)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        self._part.scale(g, self._shares)
        self._part.compute_t(op, g, target)


class Complete(Aggregation):
    """cd-0: every copy of a split vertex gets the complete sum in the same aggregation."""

    exact = True

    def __init__(self, part: Part, comm: Communicator) -> None:
        self._part = part
        self._comm = comm

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        part, out = self._part, target.out
        shared = op.columns(out.shape[1]).shared
        split = part.begin_split(op, h, target)
        # While the partial results of the split rows are on their way, the other rows are computed: half of them during
        # each message.
        self._exchange(split, shared, out.dtype, buffers, lambda half: part.compute(op, h, target, half))
        part.end_split(split)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        # On copies, gradients are parts of a sum, whatever the op: they are added up before the op reads them.
        shared = op.columns(target.out.shape[1]).shared
        self._exchange(self._part.sums(g[:, :shared]), shared, g.dtype, buffers, lambda half: None)
        self._part.compute_t(op, g, target)

    def _exchange(
        self,
        partial: Accumulation,
        shared: int,
        dtype: torch.dtype,
        buffers: Sequence[Tensor],
        meanwhile: Callable[[int], None],
    ) -> None:
        """Replace the partial results of the split rows, of `shared` columns, by whole ones, equal on all copies."""
        if self._comm.size == 1 or not shared:
            meanwhile(1)
            meanwhile(2)
            return
        lists, backend = self._part.lists, self._part.backend
        leaves, roots = (buffer[:, :shared] for buffer in buffers)
        partial.gather(lists.leaves, leaves)
        arrived = lists.send_up(self._comm, leaves, roots, backend.record())
        meanwhile(1)
        arrived.wait()
        lists.add_to_roots(roots, partial)
        # The received rows have been added and are free again: they receive the complete results.
        lists.gather_roots(partial, roots)
        arrived = lists.send_down(self._comm, roots, leaves, backend.record())
        if roots.dtype != dtype:
            # Messages are rounded: a root takes its result as it was sent, so that all copies have the same.
            lists.scatter_roots(roots, partial)
        meanwhile(2)
        arrived.wait()
        partial.scatter(leaves, lists.leaves)
