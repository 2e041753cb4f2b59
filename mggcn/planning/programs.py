"""The programs of every rank, placed in its arena: ranks of equal sizes share theirs. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mggcn.aggregate.base import AggregationPlan
from mggcn.memory.arena import BufferSpec
from mggcn.model.lower import Model, Program, lower_evaluation, lower_setup, lower_training


@dataclass(frozen=True, slots=True)
class Programs:
    """What a rank runs: training epochs, evaluations, and set-up if it computes anything."""

    train: Program
    evaluate: Program
    setup: Program | None

    @property
    def arena_bytes(self) -> int:
        programs = [self.train, self.evaluate, *([self.setup] if self.setup else [])]
        return max(program.arena.nbytes for program in programs)


class Lowering:
    """Lowers the ranks of one run, whose models differ in rows and in the bytes of the input alone.

    panel: columns of a panel of set-up. Keeps one set of programs for all ranks with equal rows and slots.
    """

    def __init__(self, panel: int) -> None:
        self.panel = panel
        self._known: dict[tuple[int, tuple[tuple[BufferSpec, ...], ...]], Programs] = {}

    def programs(
        self, model: Model, training: AggregationPlan, exact: AggregationPlan, of_layer: Mapping[int, AggregationPlan]
    ) -> Programs:
        """Return the programs of a rank. of_layer: plans of layers that aggregate otherwise than `training` says.

        Raises: PlanError for an inconsistent program.
        """
        widths = sorted({width for layer in model.layers for width in (layer.d_in, layer.d_out)} | {self.panel})
        # All that a program takes from a plan are its slots.
        plans = (training, exact, *(of_layer[layer] for layer in sorted(of_layer)))
        types = (model.dtype, model.operand)
        slots = (plan.buffers("", width, dtype) for plan in plans for width in widths for dtype in types)
        key = (model.rows, tuple(slots))
        if key not in self._known:
            train, evaluate = lower_training(model, training, of_layer), lower_evaluation(model, exact)
            self._known[key] = Programs(train, evaluate, lower_setup(model, exact, self.panel))
        return self._known[key]
