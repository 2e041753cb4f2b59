"""The programs of every rank, placed in its arena: ranks of equal sizes share theirs. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.aggregate.edge_op import SUM
from mggcn.blocks.block import WHOLE, RowSet
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.lower import Plans, lower, lower_setup
from mggcn.model.network import Values
from mggcn.model.program import Program
from mggcn.model.runtime import Sizes
from mggcn.planning.block_evaluation import BlockEvaluation
from mggcn.planning.disk import DiskPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The programs of a rank: training epochs, evaluations, set-up if it computes anything, and the exact gradient.

    stages: of an evaluation by blocks, over a chunk; evaluate then says what it costs and sends, and is not run.
    """

    train: Program
    evaluate: Program
    setup: Program | None
    exact: Program | None
    """Training over the whole graph, where steps over batches are compared with it."""
    stages: tuple[Program, ...] = ()
    disk: DiskPlan | None = None
    """How the programs run whose values lie on disk, which then say what is computed and sent; None: as they are."""

    @property
    def over_whole(self) -> tuple[Program, ...]:
        """Return the programs but training's that run over the whole graph."""
        evaluate = None if self.stages else self.evaluate
        return tuple(p for p in (evaluate, self.setup, self.exact) if p is not None)

    @property
    def all(self) -> tuple[Program, ...]:
        """Return the programs that the rank has."""
        return (self.train, *self.over_whole, *self.stages)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena, which the programs share."""
        if self.disk is not None:
            return self.disk.arena_bytes
        return max(program.arena.nbytes for program in self.all)


class Lowering:
    """Lowers the ranks of one run, which differ in rows and in what their aggregations need.

    panel: columns of a panel of set-up, 0 if it computes nothing. Keeps one set of programs for all ranks with equal rows
    and slots.
    """

    def __init__(self, values: Values, panel: int) -> None:
        self._values = values
        self.panel = panel
        self._known: dict[tuple[tuple[tuple[RowSet, int], ...], tuple[tuple[BufferSpec, ...], ...]], Programs] = {}

    def programs(
        self, sizes: Sizes, training: Plans, evaluation: Plans, by_blocks: BlockEvaluation | None = None
    ) -> Programs:
        """Return the programs of a rank. Raises: PlanError for an inconsistent program."""
        values = self._values
        graphs = [graph for graph in (values.training, values.exact) if graph is not None]
        widths = sorted({value.cols for graph in graphs for value in graph.values()} | {self.panel})
        # A program depends on a plan only through its slots.
        plans = (*training.values(), *evaluation.values())
        types = (sizes.dtype, sizes.operand)
        edge_ops = dict.fromkeys(v.kind.op for v in values.training.values() if isinstance(v.kind, Aggregate))
        sums = (plan.buffers("", width, dtype) for plan in plans for width in widths for dtype in types)
        others = (
            plan.buffers("", width, types[1], op) for op in edge_ops if op != SUM for plan in plans for width in widths
        )
        slots = (*sums, *others)
        key = (tuple(sizes.rows.items()), slots)
        if key not in self._known:
            train = lower("train", values.training, sizes, training)
            if by_blocks is None:
                evaluate = lower("evaluate", values.evaluation, sizes, evaluation)
            else:
                evaluate = by_blocks.whole
            stages = () if by_blocks is None else by_blocks.programs
            hops = values.input.aggregated
            setup = lower_setup(evaluation[WHOLE], sizes, values.num_features, self.panel, hops) if self.panel else None
            exact = None if values.exact is None else lower("exact", values.exact, sizes, evaluation)
            self._known[key] = Programs(train=train, evaluate=evaluate, setup=setup, exact=exact, stages=stages)
        return self._known[key]
