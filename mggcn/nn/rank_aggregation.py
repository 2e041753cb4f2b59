"""A rank's share of z = S_r A^T S_c x by any exact strategy, of its adjoint, and of other edge operations.

It works on plain torch tensors. V rows of this rank, D width. Rows are sent padded to 64 bytes, so other operands are
copied first.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from mggcn.aggregate.base import Aggregation, AggregationPlan, BuildContext
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.assemble.plan import STRATEGIES, threads_per_rank
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
    """The aggregation of one rank, built once; memory for messages is allocated once per width. Collective."""

    def __init__(self, shared: Shared, backend: KernelBackend, comm: Communicator) -> None:
        graph, sharing, run, rank = shared.graph, shared.sharing, shared.config.run, comm.rank
        real = scale_dtype(run.precision)
        threads = threads_per_rank(shared.config)
        options = ShardOptions(
            aggregates=True,
            norm=sharing.norm,
            self_loops=sharing.self_loops,
            dtype=real,
            threads=threads,
        )
        strategy = STRATEGIES[run.strategy]
        # The plan of evaluation: for every strategy the exact one.
        self._plan: AggregationPlan = strategy.plan(run, shared.stats, rank, graph.symmetric, False)
        if not self._plan.exact:
            raise ConfigError(
                f"aggregate needs an exact strategy, and {run.strategy} is not exact here; choose another"
            )
        context = BuildContext(
            graph=graph.untyped(), partition=shared.partition, rank=rank, options=options, backend=backend, comm=comm
        )
        self._aggregation = self._built(context)
        # A matrix for the vertex itself stands for self-loops, which would have no relation.
        loopless = dataclasses.replace(options, self_loops=False)
        self._typed_context = dataclasses.replace(context, graph=graph, options=loopless)
        self.backend: KernelBackend = backend
        """The kernels of this rank."""
        self._dtype = STORAGE[run.precision]
        self.panel = 2**31 if DEVICES[run.device].is_host else PANEL
        """Most columns of a sparse product."""
        self._slots: dict[tuple[BufferSpec, ...], list[Tensor]] = {}
        self.comm: Communicator = comm
        """The transport of this rank."""
        self._agreed: set[tuple[str, int, bool]] = set()
        self.compared: int = 0
        """Calls that were compared with those of the other ranks."""
        self.rows: int = shared.stats.counts[rank]
        self._row_scale: Tensor | None = None
        self._col_scale: Tensor | None = None
        if sharing.norm != "none":
            owners = shared.partition.local_index(rank)
            degree = degrees(graph.adj_t, owners, rank, self_loops=sharing.self_loops, threads=threads)
            row_scale, col_scale = scales(degree, sharing.norm)
            self._row_scale = backend.upload(row_scale.astype(real))
            self._col_scale = None if col_scale is None else self._row_scale

    def _built(self, context: BuildContext) -> Aggregation:
        aggregation: Aggregation = self._plan.build(context).exact
        aggregation.begin_epoch(0)
        return aggregation

    @functools.cached_property
    def _by_relation(self) -> Aggregation:
        """The aggregation over entries by relation, built when first used. Collective."""
        return self._built(self._typed_context)

    def apply(self, x: Tensor, *, adjoint: bool) -> Tensor:
        """Return S_r A^T S_c x, or S_c A S_r x, as a new contiguous tensor (V, D). Collective.

        Raises: CommError if another rank has another D, or runs the other direction.
        """
        self.backend.activate()
        self._agree("sum", x.shape[1], adjoint, like=x)
        out = self.padded(x.shape[1], x)
        for first in range(0, x.shape[1], self.panel):
            columns = slice(first, first + self.panel)
            self._apply(x[:, columns], out[:, columns], adjoint)
        return out.contiguous()

    def run(
        self, op: EdgeOp, h: Tensor, cols: int, local: Sequence[Tensor], *, backward: bool, by_relation: bool = False
    ) -> Tensor:
        """Return an edge operation over the in-edges of this rank's rows, or their out-edges, (V, cols). Collective.

        h: the rows to be sent, from `padded`; backwards a strategy may overwrite it, so that copies of a row hold its
        complete gradient. local: as EdgeOp.begin takes it. by_relation: whether the operation reads entries by relation,
        without self-loops; the edges must have types. Raises: as apply; PlanError if the strategy cannot run the operation.
        """
        self.backend.activate()
        self._agree(op.name, cols, backward, like=h)
        buffers = self._buffers(cols, op)
        aggregation = self._by_relation if by_relation else self._aggregation
        out = self.padded(cols, h)
        move = aggregation.backward if backward else aggregation.forward
        move(h, Target(out, None, local), buffers, 1, op)
        return out

    def _agree(self, what: str, cols: int, adjoint: bool, like: Tensor) -> None:
        """Compare a call with the other ranks' calls. Messages cannot show a difference: padding makes several widths
        equally long.

        Only the first calls and new ones are compared: later calls repeat them, and the host would wait for a GPU.
        """
        if self.comm.size == 1 or (self.compared >= CHECKED_CALLS and (what, cols, adjoint) in self._agreed):
            return
        asked = like.new_zeros((self.comm.size, 2), dtype=torch.int64)
        asked[self.comm.rank, 0], asked[self.comm.rank, 1] = 2 * cols + adjoint, zlib.crc32(what.encode())
        self.comm.all_reduce(asked).wait()
        found = asked.tolist()
        if any(call != found[0] for call in found):
            calls = [f"rank {r} {('forwards', 'backwards')[n % 2]} with {n // 2}" for r, (n, _) in enumerate(found)]
            same = len({name for _, name in found}) == 1
            wrong = "rows of one width" if same else f"by one operation, and this rank by its {what}"
            raise CommError(f"all ranks must aggregate {wrong}; now {', '.join(calls)} columns")
        self.compared += 1
        self._agreed.add((what, cols, adjoint))

    def _apply(self, x: Tensor, out: Tensor, adjoint: bool) -> None:
        row, col = self._row_scale, self._col_scale
        before, after = (row, col) if adjoint else (col, row)
        move = self._aggregation.backward if adjoint else self._aggregation.forward
        # A strategy may overwrite its operand, and the gradient belongs to torch.
        h = self._operand(x, before, fresh=adjoint)
        target = Target(out, None if after is None else Epilogue(row_scale=after))
        move(h, target, self._buffers(x.shape[1], SUM), 1)

    def _operand(self, x: Tensor, scale: Tensor | None, *, fresh: bool) -> Tensor:
        """The rows as messages carry them: padded, aligned, scaled."""
        fits = x.stride() == (self._spec(x.shape[1]).ld, 1) and x.data_ptr() % ALIGNMENT == 0
        if fits and scale is None and not fresh:
            return x
        if scale is None:
            return self.filled(x.shape[1], x)
        h = self.padded(x.shape[1], x)
        torch.mul(x, scale[:, None], out=h)
        return h

    def padded(self, cols: int, like: Tensor, rows: int | None = None) -> Tensor:
        """Return a new (V, cols), or of so many rows, as `padded_rows` does."""
        return padded_rows(self.rows if rows is None else rows, cols, like)

    def filled(self, cols: int, columns: Tensor) -> Tensor:
        """Return rows as `padded`, of which the first columns are given."""
        rows = self.padded(cols, columns)
        rows[:, : columns.shape[1]].copy_(columns)
        return rows

    def _spec(self, cols: int) -> BufferSpec:
        return BufferSpec("", self.rows, cols, self._dtype)

    def _buffers(self, cols: int, op: EdgeOp) -> Sequence[Tensor]:
        """The strategy's buffers for a width and an operation, the same for all that need the same."""
        specs = tuple(self._plan.buffers("aggregate", cols, self._dtype, op))
        if specs not in self._slots:
            memory = self.backend.allocate(sum(spec.nbytes for spec in specs))
            self._slots[specs], start = [], 0
            for spec in specs:
                self._slots[specs].append(buffer_view(memory, Placement(spec, 0, 0, start)))
                start += spec.nbytes
        return self._slots[specs]


def padded_rows(rows: int, cols: int, like: Tensor) -> Tensor:
    """Return a new (rows, cols) padded to 64 bytes with zeros, since NaN in the padding may be slow."""
    step = ALIGNMENT // like.itemsize
    whole = like.new_empty((rows, -(-cols // step) * step))
    whole[:, cols:].zero_()
    return whole[:, :cols]
