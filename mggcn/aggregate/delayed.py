"""DistGNN's partial aggregates over a vertex cut (section 5.3, Algorithm 4): 0c, cd-0 and cd-r.

A rank multiplies the edges of its part. A split vertex then has partial sums on several ranks: the leaves send theirs to
the root, which adds them and sends the total back. Activations are equal on all copies, gradients are parts of a sum, so
the exchange is its own adjoint: cd-0 is exact. cd-r sends a bin of the split vertices per epoch and waits r epochs later
(delayed_epochs.py); 0c never sends. V rows of this rank, the first S of them split; L leaves, R roots once per leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from mggcn.aggregate.base import BuildContext, Matrix, RankAggregations
from mggcn.aggregate.delayed_part import Part, build_part
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Step
from mggcn.backend.base import Epilogue
from mggcn.config import RunConfig
from mggcn.memory.arena import BufferSpec
from mggcn.partition.cut_rows import (
    CutStats,
    row_ranges,
    stats_of_cut,
)
from mggcn.partition.parts import PartitionStats

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


class DelayedStrategy:
    """Partial aggregates over a vertex cut; run.delay says when they travel."""

    name = "delayed"
    kind: Literal["cut"] = "cut"

    def plan(self, run: RunConfig, stats: PartitionStats, rank: int, symmetric: bool, training: bool) -> DelayedPlan:
        delay = run.delay_epochs if training else 0
        return DelayedPlan(rank, stats_of_cut(stats), symmetric, delay, run.between == "last")


@dataclass(frozen=True, slots=True)
class DelayedPlan:
    """One rank's part of a vertex cut. delay: None never sends; keep_last: roots and leaves keep what came last."""

    rank: int
    stats: CutStats
    symmetric: bool
    delay: int | None
    keep_last: bool

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

    def buffers(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        if self.delay != 0 or len(self.stats.counts) == 1:
            return ()
        # First the leaves' sums go from one to the other, then the totals come back.
        return (
            BufferSpec(f"{op}.leaves", self.num_leaves(), cols, dtype),
            BufferSpec(f"{op}.roots", self.num_roots(), cols, dtype),
        )

    def state(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        if not self.delay:
            return ()
        # Both ends of a message are the transport's until it has come.
        names = {"leaves-out": True, "leaves-in": True, "roots-out": False, "roots-in": False}
        if self.keep_last:
            names |= {"leaves-last": True, "roots-last": False}
        leaves, roots = self.num_leaves(), self.num_roots()
        return tuple(
            BufferSpec(f"{op}.{name}", leaves if of_leaves else roots, cols, dtype, "state")
            for name, of_leaves in names.items()
        )

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0) -> tuple[Step, ...]:
        reuse = self.stats.reuse
        split, middle, rest = (Multiply(m.rows, self.rows, m.nnz, cols, reuse) for m in self.matrices)
        whole = (split, middle, rest)
        if backward and not self.symmetric:
            nnz = sum(self.stats.nnz[self.rank])
            whole = (Multiply(self.rows, self.rows, nnz, cols, reuse),)  # type: ignore[assignment]
        if self.delay is None or len(self.stats.counts) == 1:
            return whole
        # cd-r exchanges one bin an epoch; an exact aggregation all of them, however many the cut has.
        number = phase if self.delay else None
        leaves, roots = self.num_leaves(number), self.num_roots(number)
        width = BufferSpec("", 1, cols, dtype).nbytes
        # Roots add what each leaf sent, gather the totals, and leaves take them.
        up: tuple[Step, ...] = (Copy(leaves, cols), Send("all_to_all", leaves * width, roots * width))
        if self.delay:
            # What arrived is kept, the split rows are scaled, and totals lose their leaves' parts.
            up = (Copy(leaves + 2 * roots, cols), Copy(split.rows, cols), *up)
        down: tuple[Step, ...] = (Copy(2 * roots, cols), Send("all_to_all", roots * width, leaves * width))
        if self.delay:
            exchange = (*up, *down, Copy(leaves, cols))
            return (*exchange, *whole) if backward else (*whole, *exchange, Copy(split.rows, cols))
        if backward:
            return (*up, Await(0), *down, Await(1), Copy(leaves, cols), *whole)
        return (split, *up, middle, Await(0), *down, rest, Await(1), Copy(leaves, cols), Copy(split.rows, cols))

    def build(self, context: BuildContext) -> RankAggregations:
        part = build_part(context, self.bounds, self.period, partial=self.delay != 0)
        complete = Complete(part, context.comm)
        if self.delay is None:
            return RankAggregations(LocalOnly(part), complete)
        if self.delay == 0:
            return RankAggregations(complete, complete)
        from mggcn.aggregate.delayed_epochs import DelayedByEpochs  # it loads torch, which plans do without

        return RankAggregations(DelayedByEpochs(part, context.comm, context.states, self.keep_last), complete)


class _Stateless:
    """An aggregation that keeps nothing from epoch to epoch."""

    def begin_epoch(self, epoch: int) -> None:
        return

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        return


class LocalOnly(_Stateless):
    """0c: partial sums stand for the whole ones, by the degree that they lack; the backward pass is the adjoint of that."""

    exact = False

    def __init__(self, part: Part) -> None:
        self._part = part
        self._shares = part.backend.upload(part.missing)

    def forward(self, h: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None) -> None:
        part = self._part
        part.multiply(h, out, 0, Epilogue(row_scale=self._shares))
        for number in range(1, len(part.forward)):
            part.multiply(h, out, number, epilogue)
        part.finish(out, epilogue)

    def backward(
        self, g: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None
    ) -> None:
        self._part.scale(g, self._shares)
        self._part.multiply_t(g, out, epilogue)


class Complete(_Stateless):
    """cd-0: every copy of a split vertex gets the complete sum in the same aggregation."""

    exact = True

    def __init__(self, part: Part, comm: Communicator) -> None:
        self._part = part
        self._comm = comm

    def forward(self, h: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None) -> None:
        part = self._part
        part.multiply(h, out, 0, None)
        # While the sums of the split rows travel, the others are multiplied: half of them each way.
        self._exchange(out, buffers, lambda half: part.multiply(h, out, half, epilogue))
        part.finish(out, epilogue)

    def backward(
        self, g: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None
    ) -> None:
        self._exchange(g, buffers, lambda half: None)
        self._part.multiply_t(g, out, epilogue)

    def _exchange(self, sums: Tensor, buffers: Sequence[Tensor], meanwhile: Callable[[int], None]) -> None:
        """Replace the split rows of `sums`, parts of a sum on each rank, by the total on all."""
        if self._comm.size == 1:
            meanwhile(1)
            meanwhile(2)
            return
        lists, backend = self._part.lists, self._part.backend
        leaves, roots = (buffer[:, : sums.shape[1]] for buffer in buffers)
        lists.gather_leaves(backend, sums, leaves)
        arrived = lists.send_up(self._comm, leaves, roots, backend.record())
        meanwhile(1)
        arrived.wait()
        lists.add_to_roots(backend, roots, sums)
        lists.gather_roots(backend, sums, roots)
        arrived = lists.send_down(self._comm, roots, leaves, backend.record())
        if roots.dtype != sums.dtype:
            # Messages are rounded: a root takes its total as it was sent, so that all copies have the same.
            lists.scatter_roots(backend, roots, sums)
        meanwhile(2)
        arrived.wait()
        lists.scatter_leaves(backend, leaves, sums)
