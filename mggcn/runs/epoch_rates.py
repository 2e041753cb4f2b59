"""Measures what epochs take beside their kernels, by training: an op's beginning, a batch's matrices, the pace of work."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mggcn.config import Config
from mggcn.config.files import with_settings
from mggcn.cost.machine import Machine
from mggcn.cost.work import Work
from mggcn.graph.generate import community
from mggcn.planning.op_cost import epoch_cost, num_matrices
from mggcn.planning.op_work import program_items
from mggcn.runs.train import prepare_run, run_training

if TYPE_CHECKING:
    from mggcn.graph.csr import Graph
    from mggcn.planning.run import RunPlan


class Trained(NamedTuple):
    """A run of tune's own, on a generated graph with as many features as each of its hidden layers has columns."""

    vertices: int
    edges: int
    width: int
    settings: str

    def graph(self) -> Graph:
        return community(self.vertices, self.edges, self.width, 16, seed=0, train=0.5)

    def config(self, threads: int) -> Config:
        own = [f"model.hidden={self.width}", f"run.threads={threads}", "run.capacity=memory", "train.eval_every=0"]
        return with_settings(Config(), [*own, *self.settings.split()])

    def median_s(self, threads: int, folder: Path) -> tuple[RunPlan, float]:
        """Train in this process; return the plan and the median seconds of an epoch but the first fourth of them, in which
        memory is mapped and clocks rise. Raises: PlanError if it does not fit into memory.
        """
        graph, seconds = self.graph(), list[float]()
        run = prepare_run(self.config(threads), graph, None, folder)
        run_training(run, graph, quiet=True, on_epoch=lambda row: seconds.append(row["seconds"]))
        return run.plan, statistics.median(seconds[len(seconds) // 4 :])


LARGE: Final = Trained(60_000, 600_000, 128, "train.epochs=12")
"""Rows of 30 MB, more than most caches hold of one process; an op's work takes milliseconds."""
SMALL: Final = Trained(4096, 16_384, 64, "train.epochs=200")
"""An op's work takes some 0.1 ms, but its rows are too many for one thread (planning/op_cost.py, SMALL_ROWS)."""
BATCHES: Final = SMALL._replace(settings="train.epochs=8 model.kind=sage sample.batch=64 sample.fanout=5,5")
LEAST_PACE: Final = 0.5
"""Less is a disturbed measurement."""
LEAST_S: Final = 1e-9
ROUNDS: Final = 3
"""Of each, in turn: threads wake late in some runs and not in others."""


def epoch_rates(machine: Machine, threads: int, folder: Path) -> dict[str, float]:
    """Return op_s, matrix_s and pace of DeviceRates for a machine's file that has all other rates.

    They are what makes three plans right: of epochs of much work, of epochs of little, and of steps on small batches.
    folder: for the runs' folders. Cost: some 15 s on two cores, and 80 MiB beside what a process has in any case. Raises:
    PlanError if that much memory is not there.
    """

    def planned_s(plan: RunPlan, *, pace: float = 1.0, op_s: float = 0.0, matrix_s: float = 0.0) -> float:
        device = dataclasses.replace(machine.device, pace=pace, op_s=op_s, matrix_s=matrix_s)
        return epoch_cost(plan, dataclasses.replace(machine, device=device)).step_s

    def missing(plan: RunPlan, measured_s: float) -> tuple[float, float, int]:
        """Return the seconds that calls do not explain, those of work at a pace of 1, and how often an op begins."""
        items = program_items(plan, plan.ranks[0], plan.ranks[0].train)
        calls_s = planned_s(plan, pace=0.0)
        begins = sum(item.begins for item in items if isinstance(item, Work))
        return measured_s - calls_s, planned_s(plan) - calls_s, begins

    found = [
        [run.median_s(threads, folder / f"{number}-{part}") for part, run in enumerate((LARGE, SMALL, BATCHES))]
        for number in range(ROUNDS)
    ]
    # Plans are alike in all rounds.
    large, small, batches = ((of[0][0], statistics.median(s for _, s in of)) for of in zip(*found, strict=True))
    large_s, large_work_s, large_begins = missing(*large)
    small_s, small_work_s, small_begins = missing(*small)
    # seconds = pace * work + begins * beside, of both
    divisor = small_begins * large_work_s - large_begins * small_work_s
    beside_s = max((small_s * large_work_s - large_s * small_work_s) / divisor, 0.0)
    pace = max((large_s - large_begins * beside_s) / large_work_s, LEAST_PACE)
    op_s, (plan, measured_s) = machine.device.call_s + beside_s, batches
    # Next to nothing, not nothing, which would say that it was not measured.
    computed_s = planned_s(plan, pace=pace, op_s=op_s, matrix_s=LEAST_S)
    matrix_s = max(measured_s / plan.steps - computed_s, 0.0) / num_matrices(plan) + LEAST_S
    return {"op_s": op_s, "matrix_s": matrix_s, "pace": pace}
