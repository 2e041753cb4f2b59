"""Runs programs whose values lie on disk, stage by stage: over some rows or some columns at a time, while threads read what
comes next and write what is done.

V rows of this rank, D features.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from mggcn.aggregate.base import Aggregation
from mggcn.backend.base import KernelBackend
from mggcn.backend.window import WindowedBackend
from mggcn.blocks.block import OWNED, Block, RowSet
from mggcn.feed.features import FeatureReader
from mggcn.host import again_and_again
from mggcn.memory.arena import BufferSpec, Placement
from mggcn.memory.pages import WINDOW_ROWS
from mggcn.model.disk import RESULT, X
from mggcn.model.program import Program
from mggcn.model.runtime import Inputs, Rows
from mggcn.planning.disk import DiskPlan, DiskProgram, StagePlan, Transfer
from mggcn.train.pages import PageFile, Ticket
from mggcn.train.runtime import After, RankRuntime, buffer_view

MoveRows: TypeAlias = Callable[[str, int, int, Tensor], Ticket]
MovePanel: TypeAlias = Callable[[str, int, Tensor], Ticket]
"""What a page file moves: a name, first row and number of rows, or a panel; and where in memory."""
SETUP_BYTES = 8 << 20
"""Bytes of features that set-up converts and writes at a time."""


@dataclass(kw_only=True, slots=True)
class PartRuntime:
    """The Runtime of ops that run over some rows or some columns: buffers, inputs and parameters cut to these.

    columns: those of the results; None: all.
    """

    whole: RankRuntime
    views: Mapping[str, Tensor]
    inputs: Inputs
    continues: bool
    columns: slice | None

    @property
    def backend(self) -> KernelBackend:
        return self.whole.backend

    @property
    def host(self) -> None:
        return None

    @property
    def clock(self) -> Tensor:
        return self.whole.clock

    @property
    def first_column(self) -> int:
        return 0 if self.columns is None else self.columns.start

    def apart(self) -> AbstractContextManager[None]:
        return _windowed(self.backend).apart()

    def aggregation(self, block: Block) -> Aggregation:
        return self.whole.aggregation(block)

    def buffer(self, name: str) -> Tensor:
        return self.views[name]

    def num_rows(self, rows: RowSet) -> int:
        return self.inputs.rows[rows].ids.shape[0]

    def parameter(self, name: str) -> Tensor:
        return self._cut(self.whole.parameter(name))

    def operand(self, name: str) -> Tensor:
        return self._cut(self.whole.operand(name))

    def gradient(self, name: str) -> Tensor:
        return self._cut(self.whole.gradient(name))

    def _cut(self, parameter: Tensor) -> Tensor:
        return parameter if self.columns is None else parameter[..., self.columns]

    @property
    def loss(self) -> Tensor:
        return self.whole.loss

    @property
    def counts(self) -> Tensor:
        return self.whole.counts

    def sum_over_ranks(self, values: Tensor) -> None:
        self.whole.sum_over_ranks(values)


class _Stage:
    """A stage with its memory. resident: what stays in memory, by name."""

    def __init__(self, plan: StagePlan, memory: Tensor, resident: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self._memory, self._resident = memory, resident
        self._inside = [
            {p.spec.name: (p.spec, buffer_view(memory, p)) for p in program.arena.placements}
            for program in (plan.program, plan.narrow)
            if program is not None
        ]
        self._buffers = {one.name: one.buffers for one in (*plan.reads, *plan.writes)}
        self.kernels: Tensor = torch.empty(0, dtype=torch.uint8)
        if plan.kernels is not None:
            self.kernels = memory[plan.kernels.offset : plan.kernels.end]

    def program(self, number: int) -> Program:
        """Return the ops of a part."""
        narrow = self.plan.narrow
        return narrow if narrow is not None and number + 1 == len(self.plan.parts) else self.plan.program

    def moved(self, transfer: Transfer, number: int) -> Tensor:
        """Return the buffer of a part of a matrix that is read or written, as large as the part."""
        turns = self._buffers[transfer.left or transfer.name]
        part, placed = len(self.plan.parts[number]), turns[number % len(turns)]
        spec = placed.spec
        if self.plan.how == "rows":
            spec = dataclasses.replace(spec, rows=part)
        elif self.plan.how == "columns":
            spec = dataclasses.replace(spec, cols=part)
        return buffer_view(self._memory, dataclasses.replace(placed, spec=spec))

    def views(self, number: int) -> dict[str, Tensor]:
        """Return all buffers of a part by name."""
        plan, part, views = self.plan, self.plan.parts[number], dict[str, Tensor]()
        inside = self._inside[0 if self.program(number) is plan.program else 1]
        for name, (spec, view) in inside.items():
            views[name] = view[: len(part)] if plan.how == "rows" and spec.row_set is not None else view
        span = slice(part.start, part.stop)
        for name, view in self._resident.items():
            # Vectors beside rows are whole to whoever reads them.
            rows = plan.how == "rows" and view.shape[0] == plan.total
            views[name] = view[span] if rows else view[:, span] if plan.how == "columns" else view
        return views | {one.name: self.moved(one, number) for one in (*plan.reads, *plan.writes) if not one.left}


class StagedProgram:
    """A program on one rank, whose values lie in a page file. memory: of the stage at hand."""

    def __init__(self, plan: DiskProgram, memory: Tensor, resident: Mapping[str, Tensor], pages: PageFile) -> None:
        self.stages: tuple[_Stage, ...] = tuple(_Stage(stage, memory, resident) for stage in plan.stages)
        self._pages = pages
        self.first: int = 0
        """The stage at which `run` begins."""
        self.finished: Callable[[int], None] | None = None
        """Called behind each stage but the last with the number of stages that are then finished."""

    def run(self, runtime: RankRuntime, after: After | None = None) -> None:
        """Implement Staged.run."""
        with watched(runtime.backend):
            self._run_stages(runtime, after)

    def _run_stages(self, runtime: RankRuntime, after: After | None) -> None:
        for number, stage in enumerate(self.stages[self.first :], self.first + 1):
            try:
                with _windows(runtime.backend, stage):
                    self._run(runtime, stage, after)
            except BaseException:
                self._pages.settle()  # the next run has the same memory
                raise
            if self.finished is not None and number < len(self.stages):
                self.finished(number)

    def _run(self, runtime: RankRuntime, stage: _Stage, after: After | None) -> None:
        parts, turns = stage.plan.parts, stage.plan.turns
        writing: list[list[Ticket]] = [[] for _ in range(turns)]
        reading = self._read(stage, 0)
        for number, part in enumerate(parts):
            self._wait(reading)
            # The buffers that the part before has read are free, and it reads what comes next while this one computes.
            reading = self._read(stage, number + 1) if turns > 1 and number + 1 < len(parts) else []
            self._wait(writing[number % turns])
            if stage.plan.how == "rows":
                _windowed(runtime.backend).window(part.start, len(part))
            view = _part_of(runtime, stage, number)
            for op in stage.program(number).ops:
                with runtime.annotate(op.label):
                    op.run(view)
                if after is not None:
                    after(op, view, number + 1 == len(parts))
            writing[number % turns] = self._write(stage, number)
            if turns == 1 and number + 1 < len(parts):
                if any(one.left for one in stage.plan.writes):  # from the buffer that is read into
                    self._wait(writing[0])
                reading = self._read(stage, number + 1)
        for tickets in writing:
            self._wait(tickets)

    def _read(self, stage: _Stage, number: int) -> list[Ticket]:
        pages, reads = self._pages, stage.plan.reads
        return self._moved(stage, number, reads, pages.read_rows, pages.read_panel)

    def _write(self, stage: _Stage, number: int) -> list[Ticket]:
        pages, writes = self._pages, stage.plan.writes
        return self._moved(stage, number, writes, pages.write_rows, pages.write_panel)

    def _moved(
        self, stage: _Stage, number: int, transfers: Sequence[Transfer], rows: MoveRows, panel: MovePanel
    ) -> list[Ticket]:
        """Begin to move a part of some matrices between their buffers and the disk."""
        part = stage.plan.parts[number]
        if stage.plan.how == "columns":
            return [panel(one.page, number, stage.moved(one, number)) for one in transfers]
        return [rows(one.page, part.start, len(part), stage.moved(one, number)) for one in transfers]

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._pages.wait(ticket)


def watched(backend: KernelBackend) -> AbstractContextManager[None]:
    """Return a context in which pages of mapped edges, which come and go, are told from the peak of the process."""
    glance = _windowed(backend).glance_at_memory
    glance()  # the first one reads the maps of the process, best before their pages come and go
    return again_and_again(glance)


def _windowed(backend: KernelBackend) -> WindowedBackend:
    """Return the backend as one whose calls may be on windows of rows: a CPU's, as the plan has it."""
    return cast(WindowedBackend, backend)


@contextmanager
def _windows(backend: KernelBackend, stage: _Stage) -> Iterator[None]:
    """Let the backend's calls be on windows of rows, if the stage goes by rows."""
    if stage.plan.how != "rows":
        yield
        return
    windowed, complete = _windowed(backend), False
    windowed.begin_windows(stage.plan.total, stage.kernels)
    try:
        yield
        complete = True
    finally:
        windowed.end_windows(complete=complete)


def _part_of(runtime: RankRuntime, stage: _Stage, number: int) -> PartRuntime:
    plan, part = stage.plan, stage.plan.parts[number]
    by_rows, by_columns = plan.how == "rows", plan.how == "columns"
    return PartRuntime(
        whole=runtime,
        views=stage.views(number),
        inputs=_rows_of(runtime.inputs, part) if by_rows else runtime.inputs,
        continues=by_rows and part.start > 0,
        columns=slice(part.start, part.stop) if by_columns else None,
    )


def _rows_of(inputs: Inputs, part: range) -> Inputs:
    """Return the inputs of some of a rank's rows."""
    owned, some = inputs.owned, slice(part.start, part.stop)
    rows = Rows(
        ids=owned.ids[some],
        row_scale=None if owned.row_scale is None else owned.row_scale[some],
        col_scale=None if owned.col_scale is None else owned.col_scale[some],
        target=None if owned.target is None else owned.target.rows(some),
    )
    return Inputs(rows={OWNED: rows})


def stage_programs(plan: DiskPlan, arena: Tensor, pages: PageFile) -> tuple[dict[str, StagedProgram], Tensor | None]:
    """Return a rank's programs by name, and the scores that an evaluation leaves in the arena, if it does.

    The page file is closed when the programs are gone.
    """
    programs, kept = dict[str, StagedProgram](), None
    for name, program in plan.programs.items():
        resident = {p.spec.name: buffer_view(arena, p) for p in plan.resident[name].placements}
        kept = resident.get(RESULT, kept)
        programs[name] = StagedProgram(program, arena[plan.stage_offset(name) :], resident, pages)
    weakref.finalize(programs["train"], pages.close)
    return programs, kept


def write_features(pages: PageFile, plan: DiskPlan, reader: FeatureReader, ids: Tensor, backend: KernelBackend) -> None:
    """Write the features of a rank's rows to disk, where programs read them; ids int64 (V,): of their vertices."""
    if plan.x is None:
        return
    spec, numbers = plan.x, ids.numpy()
    row = BufferSpec("", 1, spec.cols, spec.dtype).nbytes
    step = max(WINDOW_ROWS, SETUP_BYTES // row // WINDOW_ROWS * WINDOW_ROWS)
    room = BufferSpec(X, min(step, spec.rows), spec.cols, spec.dtype)
    buffer = buffer_view(backend.allocate(room.nbytes), Placement(room, 0, 0, 0))
    for first in range(0, spec.rows, step):
        some = numbers[first : first + step]
        backend.write(reader.anywhere.gather(some.astype(np.int64, copy=False)), buffer[: some.size])
        pages.wait(pages.write_rows(X, first, some.size, buffer[: some.size]))


def page_file(plan: DiskPlan, folder: Path, backend: KernelBackend, name: str = "") -> PageFile:
    """Make a rank's page file in a folder. name: of one that stays. Raises: PlanError as PageFile."""
    return PageFile(folder, plan.pages, backend.allocate(plan.pages.staging_bytes), name)
