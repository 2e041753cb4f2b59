"""Programs whose buffers hold NaN before and after their planned life."""

from __future__ import annotations

import math
from dataclasses import replace

from mggcn.assemble.rank import Rank
from mggcn.memory.arena import BufferSpec
from mggcn.train.runtime import BoundProgram, RankRuntime


def reads_what_it_was_given(rank: Rank) -> bool:
    """Whether loss and gradients are the same if every op that reads memory which the plan did not grant reads NaN."""
    trainer = rank.trainer
    plain = trainer.gradients(1)
    grads = trainer.runtime.weights.grad.clone()
    runner = Poisoned(trainer.runtime)
    for program in ("evaluate", "train"):
        trainer.runtime.signals.zero_()
        runner.run(trainer.runtime.programs[program])
    if rank.comm.size > 1:
        rank.comm.all_reduce(trainer.runtime.weights.grad).wait()
        rank.comm.all_reduce(trainer.runtime.signals).wait()
    return plain == float(trainer.runtime.signals[0]) and bool((grads == trainer.runtime.weights.grad).all())


class Poisoned:
    """Runs a program so that reads of memory that the plan did not grant give NaN.

    Before an op, every buffer whose life starts there is filled with NaN, the padding of its rows too; after it, every
    buffer whose life ends.
    """

    def __init__(self, runtime: RankRuntime) -> None:
        self._runtime = runtime

    def run(self, bound: BoundProgram) -> None:
        runtime, program = self._runtime, bound.program
        runtime.bound = bound
        for index, op in enumerate(program.ops):
            allowed = {*op.reads, *op.writes}
            for placement in program.arena.placements:
                if placement.first == index:
                    self._poison(placement.spec)
            runtime.bound = replace(bound, views={n: v for n, v in bound.views.items() if n in allowed})
            op.run(runtime)
            runtime.bound = bound
            for placement in program.arena.placements:
                if placement.last == index and index + 1 < len(program.ops):
                    self._poison(placement.spec)

    def _poison(self, spec: BufferSpec) -> None:
        self._runtime.buffer(spec.name).as_strided((spec.rows, spec.ld), (spec.ld, 1)).fill_(math.nan)
