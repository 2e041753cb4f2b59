"""Aggregation over a block in which vertices of other ranks have the rows that these last sent: historical embeddings.

A rank pushes some of its own rows in every step, in one message of fixed size, which is received some steps later and
cached for some more. What is not in the cache is left out of the sum. T targets, S sources of a block, K vertices of the
halo, D width. Source: Vasimuddin et al., DistGNN-MB, 2022, Algorithm 2 (docs/notes/0043-history.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.aggregate.base import BuildContext, Matrix, RankAggregations, aggregate_name
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.aggregate.history_cache import NUMBER_BYTES, Cache
from mggcn.aggregate.local import LocalPlan
from mggcn.aggregate.steps import Await, Copy, Send, Step
from mggcn.errors import PlanError
from mggcn.memory.arena import BufferSpec


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    """The plan of a block on one rank. local: over its edges; site: the aggregation that runs over it."""

    local: LocalPlan
    site: int
    cache: Cache
    exact = False
    period = 1
    by_columns = True

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.local.matrices

    @property
    def matrices_t(self) -> tuple[Matrix, ...]:
        return self.local.matrices_t

    @property
    def index_bytes(self) -> int:
        """Bytes of the ring, and of what a step finds in it: lines, missing rows, and the factor of each target twice."""
        size, halo, lines = self.local.size, self.cache.halo, self.cache.lines
        ring = NUMBER_BYTES * halo + (NUMBER_BYTES + 8) * lines
        return ring + NUMBER_BYTES * (max(size.sources, halo) + halo) + size.sources + 16 * size.targets

    def buffers(self, name: str, cols: int, dtype: str, op: EdgeOp = SUM) -> tuple[BufferSpec, ...]:
        if op != SUM:
            raise PlanError(
                f"sample.halo history leaves rows that are not in the cache out of a sum, and {op.name} of neighbours is "
                "none; choose a model that sums (gcn, sage with gcn or mean, gin, sgc, appnp), or sample.halo exact"
            )
        return ()

    def state(self, name: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        if name != aggregate_name(self.site, False):  # no row has a gradient on another rank
            return ()
        cache = self.cache
        sent, received = cache.messages(BufferSpec("", 1, cols, dtype).nbytes)
        rows = {"lines": cache.lines, "out": cache.slots * sum(sent.rows), "in": cache.slots * sum(received.rows)}
        return tuple(BufferSpec(f"{name}.{what}", count, cols, dtype, "state") for what, count in rows.items())

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        product = self.local.steps(cols, dtype, backward, phase, op)
        if backward:
            return product
        sent, received = self.cache.messages(BufferSpec("", 1, cols, dtype).nbytes)
        push = Copy(sum(sent.most), cols), Send("all_to_all", sent.nbytes, received.nbytes)
        # With a delay the message of an earlier step is there by now.
        arrival = () if self.cache.delay else (Await(0),)
        filled = Copy(min(self.local.size.sources, self.cache.halo), cols)
        return (*push, *arrival, Copy(sum(received.most), cols), filled, *product)

    def build(self, context: BuildContext) -> RankAggregations:
        from mggcn.aggregate.history_block import HistoryBlock  # it loads torch, which plans do without

        history = HistoryBlock(aggregate_name(self.site, False), self.cache, self.local, context)
        return RankAggregations(history, history)
