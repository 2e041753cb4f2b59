"""The plan of a run whose values lie on disk (run.capacity = disk): how many rows or columns of every stage are in memory
at a time, where its buffers lie there, and the bytes that a step reads and writes.

V rows of this rank. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from mggcn.backend.cpu.sizes import WindowSum, window_bytes
from mggcn.blocks.block import OWNED, WHOLE
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES, ArenaPlan, BufferSpec, Placement
from mggcn.memory.device import ANY, REAL
from mggcn.memory.pages import PAGE_BYTES, WINDOW_ROWS, PagePlan, PageSpec, plan_pages
from mggcn.memory.units import MIB
from mggcn.model.disk import Crossing, DiskStage, DiskStages, How, X, cut_for_disk, cut_setup, narrowed
from mggcn.model.kinds.dense import Linear, WeightGrad
from mggcn.model.kinds.ends import Loss
from mggcn.model.kinds.neighbours import ScoresGrad
from mggcn.model.lower import Plans, lower
from mggcn.model.network import Values
from mggcn.model.program import Program
from mggcn.model.runtime import Sizes
from mggcn.model.values import Graph
from mggcn.planning.regions import RankSizes, has_tiles

KERNELS: Final = "kernel work space"
WINDOW_BYTES: Final = 32 * MIB
"""Bytes of the widest matrix of a window of rows, at most: disks are as fast with less, and caches prefer it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A matrix of which a stage reads or writes a part at a time. name: of the buffer, as ops know it; page: on disk.

    buffers: its places in the stage's memory, which take turns; none if an op leaves it in the buffer `left`.
    """

    name: str
    page: str
    buffers: tuple[Placement, ...]
    left: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A stage of a program in memory. program: its ops, over `step` of `total` rows or columns at a time.

    narrow: the same for the columns that are left, if these are fewer: messages are as wide as they are. kernels: memory in
    which kernels continue sums over rows; nbytes: of all.
    """

    how: How
    program: Program
    narrow: Program | None
    step: int
    total: int
    reads: tuple[Transfer, ...]
    writes: tuple[Transfer, ...]
    kernels: Placement | None
    nbytes: int

    @property
    def turns(self) -> int:
        """How many buffers of a matrix take turns: with one, what comes next is read behind what is computed."""
        return max((len(one.buffers) for one in (*self.reads, *self.writes)), default=1)

    @property
    def parts(self) -> tuple[range, ...]:
        """The rows or columns of each part, in order."""
        return tuple(range(self.total)[first : first + self.step] for first in range(0, self.total, self.step))


@dataclass(frozen=True, slots=True)
class DiskProgram:
    """A program in stages. read, written: the bytes that it moves: every matrix of a stage once."""

    stages: tuple[StagePlan, ...]
    read: int
    written: int

    @property
    def nbytes(self) -> int:
        return max(stage.nbytes for stage in self.stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskPlan:
    """How a rank runs from disk. panel: columns that ops by columns have in memory at a time.

    programs: train, evaluate, and setup if it computes anything. resident: what stays in memory from stage to stage, by
    program: scores that something needs all at once, and vectors that are kept beside rows. edge_bytes: of the edges of
    the rank's matrices, in mapped files whose pages the system takes back as it needs.
    """

    panel: int
    programs: Mapping[str, DiskProgram]
    resident: Mapping[str, ArenaPlan]
    pages: PagePlan
    edge_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        """The bytes of the rank's files: rows between stages, and edges."""
        return self.pages.nbytes + self.edge_bytes

    def stage_offset(self, program: str) -> int:
        """Return the byte of the arena at which the memory of a program's stage at hand begins."""
        return _paged(self.resident[program].nbytes)

    @property
    def arena_bytes(self) -> int:
        return max(self.stage_offset(name) + program.nbytes for name, program in self.programs.items())

    @property
    def x(self) -> PageSpec | None:
        """The dense input on disk; None where it is sparse, or nothing reads it."""
        return next((region.spec for region in self.pages.regions if region.spec.name == X), None)

    def widths(self, cols: int) -> tuple[int, ...]:
        """Return the columns of each panel of a matrix."""
        return tuple(min(self.panel, cols - first) for first in range(0, cols, self.panel))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "panel_columns": self.panel,
            "file_bytes": self.file_bytes,
            "programs": {
                name: {
                    "bytes_read": program.read,
                    "bytes_written": program.written,
                    "stages": [
                        {"by": s.how, "step": s.step, "nbytes": s.nbytes, "ops": [op.label for op in s.program.ops]}
                        for s in program.stages
                    ],
                }
                for name, program in self.programs.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class DiskChoices:
    """The programs of a rank in stages, from which `plan` makes a plan. training, evaluation: how they aggregate.

    item, real: bytes of a stored number and of a sum; tiles: whether products may be by tiles (backend/cpu/sizes.py).
    setup: columns of a panel of set-up in memory, which stay where others have other bits. keeps_scores: whether something
    needs an evaluation's scores of all rows at once.
    """

    values: Values
    sizes: Sizes
    training: Plans
    evaluation: Plans
    setup: int
    item: int
    real: int
    tiles: bool
    keeps_scores: bool

    @staticmethod
    def of(
        config: Config, values: Values, sizes: Sizes, training: Plans, evaluation: Plans, setup: int, keeps_scores: bool
    ) -> DiskChoices:
        """Return the choices of a rank of a run. Raises: ConfigError for a run that cannot have values on disk."""
        if config.run.device != "cpu":
            raise ConfigError("run.capacity disk is for CPUs; with --device cuda set run.capacity=memory")
        item, real = (ITEM_BYTES[name] for name in (sizes.dtype, REAL[config.run.precision]))
        return DiskChoices(
            values=values,
            sizes=sizes,
            training=training,
            evaluation=evaluation,
            setup=setup,
            item=item,
            real=real,
            tiles=has_tiles(),
            keeps_scores=keeps_scores,
        )

    @cached_property
    def programs(self) -> dict[str, DiskStages]:
        """The stages of each program, in the order in which they lie on disk. Raises: ConfigError as `cut_for_disk`."""
        values, sizes = self.values, self.sizes
        found = {
            "train": cut_for_disk(values.training, sizes, self.training),
            "evaluate": cut_for_disk(values.evaluation, sizes, self.evaluation, keeps_scores=self.keeps_scores),
        }
        if values.input.aggregated and not values.input.sparse:
            found["setup"] = cut_setup(sizes, values.num_features, values.input.aggregated)
        return found

    def panel(self, limit: Callable[[int], int]) -> int:
        """Return the columns of the fewest panels for which every stage by columns fits, at least 64 bytes.

        All ranks need the same. limit: bytes of the arena, by the columns of a panel. Cost: some lowered stages.
        """
        stages = [(n, s, of) for n, of in self.programs.items() for s in of.stages if s.how == "columns"]
        most = max((_cols(stage, of) for _, stage, of in stages), default=1)

        def fits(panel: int) -> bool:
            left = self._left(panel, limit(panel))
            return all(self._placed(name, stage, of, panel).nbytes <= left[name] for name, stage, of in stages)

        panels, panel = 1, self._units(most)
        while panel > self._unit and not fits(panel):
            panels += 1
            panel = self._units(-(-most // panels))
        return panel

    @property
    def _unit(self) -> int:
        """Columns of a panel are a multiple of it: 64 bytes of the narrowest type."""
        return ALIGNMENT // min(ITEM_BYTES[dtype] for dtype in (self.sizes.dtype, self.sizes.operand))

    def _units(self, cols: int) -> int:
        return -(-cols // self._unit) * self._unit

    def plan(self, panel: int, limit: int) -> DiskPlan:
        """Plan every stage for panels of `panel` columns, and for as many rows at a time as `limit` bytes of arena hold."""
        left, pages = self._left(panel, limit), self._pages(panel)
        programs = {}
        for name, of in self.programs.items():
            stages = tuple(self._stage(name, stage, of, panel, left[name]) for stage in of.stages)
            read = sum(pages[one.page].spec.nbytes for stage in stages for one in stage.reads)
            written = sum(pages[one.page].spec.nbytes for stage in stages for one in stage.writes)
            programs[name] = DiskProgram(stages, read, written)
        resident = {name: _resident(of) for name, of in self.programs.items()}
        return DiskPlan(panel=panel, programs=programs, resident=resident, pages=pages)

    def _left(self, panel: int, limit: int) -> dict[str, int]:
        """Return the bytes of an arena of `limit` that a stage of each program may take."""
        staging = self._pages(panel).staging_bytes
        return {name: limit - staging - _paged(_resident(of).nbytes) for name, of in self.programs.items()}

    def _pages(self, panel: int) -> PagePlan:
        """Lay out what crosses stages: programs follow each other, and X outlives them all."""
        lives, start = list[tuple[PageSpec, int, int]](), 1
        x: Crossing | None = None
        by_panels = {
            page_name(program, of.of(stage, name))
            for program, of in self.programs.items()
            for stage in of.stages
            if stage.how == "columns"
            for name in (*stage.reads, *stage.writes)
        }

        def spec_of(page: str, of: BufferSpec) -> PageSpec:
            cols = self._setup_panel(panel) if page == X and "setup" in self.programs else panel
            return PageSpec(page, of.rows, of.cols, of.dtype, cols if page in by_panels and cols < of.cols else None)

        for program, of in self.programs.items():
            for crossing in of.crossings.values():
                if crossing.name == X:
                    x = crossing
                elif not crossing.in_memory:
                    spec = spec_of(page_name(program, crossing), crossing.spec)
                    lives.append((spec, start + crossing.first, start + crossing.last))
            start += len(of.stages)
        if x is not None:
            lives.append((spec_of(X, x.spec), 0, start))
        return plan_pages(lives)

    def _setup_panel(self, panel: int) -> int:
        """Return the columns of a panel of set-up."""
        return panel if self.evaluation[WHOLE].by_columns else self.setup

    def _stage(self, program: str, stage: DiskStage, of: DiskStages, panel: int, limit: int) -> StagePlan:
        """Return a stage with as many rows at a time as fit into `limit` bytes, if it goes by rows."""
        if stage.how != "rows":
            placed = self._placed(program, stage, of, panel)
            return placed if placed.nbytes <= limit else self._placed(program, stage, of, panel, ahead=False)
        # Rows that are made again by blocks are summed block by block: windows then hold whole ones.
        again = any(isinstance(v.kind, Linear | WeightGrad) and v.kind.recomputed for v in stage.graph.values())
        unit = self.sizes.device.most_block_rows if again else WINDOW_ROWS
        widest = max(value.cols for value in stage.graph.values())
        row = BufferSpec("", 1, widest, self.sizes.dtype).nbytes
        fewest, most = 1, max(1, -(-min(self.sizes.owned, WINDOW_BYTES // max(row, 1)) // unit))
        while fewest < most:
            middle = (fewest + most + 1) // 2
            fits = self._placed(program, stage, of, middle * unit).nbytes <= limit
            fewest, most = (middle, most) if fits else (fewest, middle - 1)
        return self._placed(program, stage, of, fewest * unit)

    def _placed(self, program: str, stage: DiskStage, of: DiskStages, step: int, *, ahead: bool = True) -> StagePlan:
        """Lower a stage for `step` rows or columns, and give its buffers their places. ahead: whether there is room for the
        next part to be read while one is computed.
        """
        by_rows, by_columns = stage.how == "rows", stage.how == "columns"
        step = self._setup_panel(step) if program == "setup" else step
        total = _cols(stage, of) if by_columns else self.sizes.owned
        step = min(step, total) if by_rows or by_columns else total
        sizes = replace(self.sizes, rows={**self.sizes.rows, OWNED: step if by_rows else self.sizes.owned})
        if program == "setup":
            sizes = replace(sizes, operand=sizes.dtype)  # A X is computed once, and not rounded
        graph = narrowed(stage, step) if by_columns else stage.graph
        plans = self.training if program == "train" else self.evaluation
        lowered, narrow = lower(program, graph, sizes, plans, again=by_rows), None
        if by_columns and total % step:
            narrow = lower(program, narrowed(stage, total % step), sizes, plans)
        inside = max(one.arena.nbytes for one in (lowered, narrow) if one is not None)
        # While a part is computed, the next is read and the last is written.
        room = _Room(inside, 2 if ahead and step < total else 1)
        reads, writes = (
            tuple(
                Transfer(name, page_name(program, crossing), *room.of(stage, name, crossing.spec, sizes, step))
                for name in names
                if not (crossing := of.of(stage, name)).in_memory
            )
            for names in (stage.reads, stage.writes)
        )
        nbytes = self._kernel_bytes(stage.graph) if by_rows else 0
        kernels = room.take(BufferSpec("kernels", -(-nbytes // 64), 8, "int64")) if nbytes else None
        return StagePlan(
            how=stage.how,
            program=lowered,
            narrow=narrow,
            step=step,
            total=total,
            reads=reads,
            writes=writes,
            kernels=kernels,
            nbytes=room.nbytes,
        )

    def _kernel_bytes(self, graph: Graph) -> int:
        """Return the bytes in which kernels continue the sums of a stage from rows to rows."""
        shapes, losses = list[tuple[int, int]](), 0
        for value in graph.values():
            kind = value.kind
            if isinstance(kind, WeightGrad) and kind.recomputed is None:
                shapes.append((value.operands[0].cols, value.operands[1].cols))
            elif isinstance(kind, ScoresGrad):
                shapes += [(kind.spec.heads, kind.spec.width)] * 2
            losses += isinstance(kind, Loss)
        sums = [WindowSum(rows, cols, self.sizes.owned, self.item, self.real) for rows, cols in shapes]
        return window_bytes(sums, losses, tiles=self.tiles)


class _Room:
    """Memory of a stage behind its arena, handed out from its end on, at pages. copies: buffers of each matrix."""

    def __init__(self, nbytes: int, copies: int) -> None:
        self.nbytes: int = _paged(nbytes)
        self._copies = copies

    def take(self, spec: BufferSpec) -> Placement:
        placed = Placement(spec, 0, 0, self.nbytes)
        self.nbytes = _paged(placed.end)
        return placed

    def of(
        self, stage: DiskStage, name: str, spec: BufferSpec, sizes: Sizes, step: int
    ) -> tuple[tuple[Placement, ...], str]:
        """Return the buffers of a matrix that a stage reads or writes, or the name of that in which an op leaves it."""
        if left := stage.left.get(name, ""):
            return (), left
        cols = min(step, spec.cols) if stage.how == "columns" else spec.cols
        part = replace(spec, name=name, rows=sizes.owned, cols=cols)
        return tuple(self.take(part) for _ in range(self._copies)), ""


class Limits(NamedTuple):
    """Bytes that a rank may use, 0 for any; panel: columns that ops by columns have in memory, 0 to choose them."""

    nbytes: int
    panel: int = 0


def on_disk(
    choices: DiskChoices, sizes: RankSizes, regions: Mapping[str, int], setup: int, limits: Limits
) -> tuple[DiskPlan, dict[str, int]]:
    """Return a rank's plan from disk, and those of its regions that become others. setup: as of `RankSizes.regions`."""
    edges = sizes.entry_bytes if regions["graph"] else 0
    mapped = ({} if sizes.input.sparse else {"features": 0}) | {"graph": regions["graph"] - edges}
    fixed = {name: nbytes for name, nbytes in {**regions, **mapped}.items() if name not in ("arena", KERNELS)}

    def kernels(panel: int) -> int:
        of_panels: RankSizes = replace(sizes, panel=panel)
        return of_panels.regions(setup)[KERNELS]

    def arena(panel: int) -> int:
        return (limits.nbytes or ANY) - sum(fixed.values()) - kernels(panel)

    panel = limits.panel or choices.panel(arena)
    plan = replace(choices.plan(panel, arena(panel)), edge_bytes=edges)
    changed = {"arena": plan.arena_bytes, KERNELS: kernels(panel), "pieces of the page file": plan.pages.staging_bytes}
    return plan, mapped | changed


def page_name(program: str, crossing: Crossing) -> str:
    """Return the name on disk of what crosses the stages of a program."""
    return X if crossing.name == X else f"{program}: {crossing.name}"


def _cols(stage: DiskStage, of: DiskStages) -> int:
    """Return the columns of the matrices of a stage by columns."""
    return max(of.of(stage, name).spec.cols for name in (*stage.reads, *stage.writes))


def _resident(stages: DiskStages) -> ArenaPlan:
    """Place what stays in memory, one after the other: little but scores."""
    placements, end = list[Placement](), 0
    for crossing in stages.crossings.values():
        if crossing.in_memory:
            placements.append(Placement(crossing.spec, crossing.first, crossing.last, end))
            end = placements[-1].end
    return ArenaPlan(tuple(placements), end)


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
