"""A rank's share of z = S_r A^T S_c x by any exact strategy, and of its adjoint, between plain torch tensors.

V rows of this rank, D width. Rows travel padded to 64 bytes, so operands that are not are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mggcn.aggregate.base import Aggregation, AggregationPlan, BuildContext
from mggcn.assemble import STRATEGIES, threads_per_rank
from mggcn.backend.base import Epilogue, KernelBackend
from mggcn.comm.base import Communicator
from mggcn.comm.control_store import CHECKED_CALLS
from mggcn.errors import CommError, ConfigError
from mggcn.memory.arena import ALIGNMENT, BufferSpec, Placement
from mggcn.memory.device import DEVICES, STORAGE, scale_dtype
from mggcn.nn.sharing import Shared
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import degrees, scales
from mggcn.train.runtime import buffer_view

PANEL = 512
"""Columns that a GPU aggregates at a time: its kernels' work space is as wide."""


class RankAggregation:
    """Built once per rank; memory for messages is taken once per width. Collective."""

    def __init__(self, shared: Shared, backend: KernelBackend, comm: Communicator) -> None:
        graph, sharing, run, rank = shared.graph, shared.sharing, shared.config.run, comm.rank
        real = scale_dtype(run.precision)
        threads = threads_per_rank(shared.config)
        options = ShardOptions(
            aggregates=True,
            norm=sharing.norm,
            self_loops=sharing.self_loops,
            splits="main",
            split=0,
            dtype=real,
            threads=threads,
        )
        strategy = STRATEGIES[run.strategy]
        # The plan of evaluation: for every strategy the exact one.
        self._plan: AggregationPlan = strategy.plan(run, shared.stats, rank, graph.symmetric, False)
        if not self._plan.exact:
            raise ConfigError(f"aggregate is exact, and strategy {run.strategy} is not here; choose another")
        context = BuildContext(
            graph=graph.untyped(), partition=shared.partition, rank=rank, options=options, backend=backend, comm=comm
        )
        self._aggregation: Aggregation = self._plan.build(context).exact
        self._aggregation.begin_epoch(0)
        self._backend = backend
        self._dtype = STORAGE[run.precision]
        self._panel = 2**31 if DEVICES[run.device].is_host else PANEL
        self._slots: dict[int, list[Tensor]] = {}
        self._comm = comm
        self._agreed: set[tuple[int, bool]] = set()
        self.compared = 0
        """Calls that were compared with those of the other ranks."""
        self.rows = shared.stats.counts[rank]
        self._row_scale: Tensor | None = None
        self._col_scale: Tensor | None = None
        if sharing.norm != "none":
            owners = shared.partition.local_index(rank)
            degree = degrees(graph.adj_t, owners, rank, self_loops=sharing.self_loops, threads=threads)
            row_scale, col_scale = scales(degree, sharing.norm)
            self._row_scale = backend.upload(row_scale.astype(real))
            self._col_scale = None if col_scale is None else self._row_scale

    def apply(self, x: Tensor, *, adjoint: bool) -> Tensor:
        """Return S_r A^T S_c x, or S_c A S_r x, as a new contiguous tensor (V, D). Collective.

        Raises: CommError if another rank has another D, or runs the other direction.
        """
        self._backend.activate()
        self._agree(x.shape[1], adjoint, like=x)
        out = self._padded(x.shape[1], x)
        for first in range(0, x.shape[1], self._panel):
            columns = slice(first, first + self._panel)
            self._apply(x[:, columns], out[:, columns], adjoint)
        return out.contiguous()

    def _agree(self, cols: int, adjoint: bool, like: Tensor) -> None:
        """Compare a call with the other ranks'. Messages do not: rows are padded, so equally long for several widths.

        Only the first calls, and those that are new: what follows repeats them, and a GPU would be waited for.
        """
        if self._comm.size == 1 or (self.compared >= CHECKED_CALLS and (cols, adjoint) in self._agreed):
            return
        asked = like.new_zeros(self._comm.size, dtype=torch.int64)
        asked[self._comm.rank] = 2 * cols + adjoint
        self._comm.all_reduce(asked).wait()
        found = asked.tolist()
        if len(set(found)) > 1:
            calls = [f"rank {r} {('forwards', 'backwards')[call % 2]} with {call // 2}" for r, call in enumerate(found)]
            raise CommError(f"all ranks must aggregate rows of one width; now {', '.join(calls)} columns")
        self.compared += 1
        self._agreed.add((cols, adjoint))

    def _apply(self, x: Tensor, out: Tensor, adjoint: bool) -> None:
        row, col = self._row_scale, self._col_scale
        before, after = (row, col) if adjoint else (col, row)
        move = self._aggregation.backward if adjoint else self._aggregation.forward
        # A strategy may overwrite what it takes the adjoint of, which is torch's.
        h = self._operand(x, before, fresh=adjoint)
        move(h, out, self._buffers(x.shape[1]), 1, None if after is None else Epilogue(row_scale=after))

    def _operand(self, x: Tensor, scale: Tensor | None, *, fresh: bool) -> Tensor:
        """The rows as messages carry them: padded, aligned, scaled."""
        fits = x.stride() == (self._spec(x.shape[1]).ld, 1) and x.data_ptr() % ALIGNMENT == 0
        if fits and scale is None and not fresh:
            return x
        h = self._padded(x.shape[1], x)
        if scale is None:
            h.copy_(x)
        else:
            torch.mul(x, scale[:, None], out=h)
        return h

    def _padded(self, cols: int, like: Tensor) -> Tensor:
        """A new (V, cols) tensor whose rows are padded to 64 bytes, with zeros: what is not a number may be slow."""
        spec = self._spec(cols)
        whole = like.new_empty((spec.rows, spec.ld))
        whole[:, cols:].zero_()
        return whole[:, :cols]

    def _spec(self, cols: int) -> BufferSpec:
        return BufferSpec("", self.rows, cols, self._dtype)

    def _buffers(self, cols: int) -> Sequence[Tensor]:
        """The strategy's buffers for a width."""
        if cols not in self._slots:
            specs = self._plan.buffers("aggregate", cols, self._dtype)
            memory = self._backend.allocate(sum(spec.nbytes for spec in specs))
            self._slots[cols], start = [], 0
            for spec in specs:
                self._slots[cols].append(buffer_view(memory, Placement(spec, 0, 0, start)))
                start += spec.nbytes
        return self._slots[cols]
