"""Work and messages of every op of a program for the cost model: bytes, FLOP and calls by op, in one place.

V rows of this rank, D input width, E output width. Rows are padded to 64 bytes, as in the arena. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from mggcn.aggregate.edge_op import SUM, Arithmetic, EdgeOp
from mggcn.aggregate.relations import Relational, multiplied_together, num_parts
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Stages, Step, num_messages
from mggcn.backend.cpu.figures import DenseShape, Figures
from mggcn.backend.cpu.variants import GAIN, MatrixTraits, costs_of
from mggcn.backend.cuda.dense_blocks import packed_shape, row_blocks
from mggcn.cost.machine import DeviceRates
from mggcn.cost.work import Item, Staged, Sum, Work, product
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import DENSE, DEVICES, REAL
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.kinds.combine import AddOwn
from mggcn.model.kinds.dense import InputGrad, Linear, LinearGrad, SparseLinear, SparseWeightGrad, WeightGrad
from mggcn.model.kinds.elementwise import ActivationGrad, BiasGrad, EpilogueSpec, Rounded
from mggcn.model.kinds.ends import DroppedValues, Loss, Score, StoredRows
from mggcn.model.kinds.hosted import Fetched, FromHost, OnHost, ToHost
from mggcn.model.kinds.neighbours import HeadMeanGrad, Scores, ScoresGrad
from mggcn.model.kinds.norms import BatchNorm, BatchNormGrad, LayerNorm, LayerNormGrad, RunningNorm
from mggcn.model.program import Program
from mggcn.model.values import Op
from mggcn.partition.locality.reuse import BOUNDS
from mggcn.planning.disk import StagePlan
from mggcn.planning.exchanges import learned_exchanges
from mggcn.planning.regions import OPTIMIZER_STATES
from mggcn.planning.run import SIGNALS, RankPlan, RunPlan

AFTER: Final = {"cpu": 8, "cuda": 2}
"""Calls of an epoch beside its ops: history, learning rate, optimiser, clock and signals, on a GPU two kernels."""


def stage_items(plan: RunPlan, rank: RankPlan, stage: StagePlan, phase: int, device: DeviceRates | None) -> list[Item]:
    """Return work and messages of all parts of a stage of one rank."""
    sizes, found, sent = _sizes(plan, rank, rank.sizes.owned, device), list[Item](), 0
    for op in stage.program.ops:
        if isinstance(op.kind, Aggregate):
            for cols, steps in _steps_in_parts(rank, stage, op, op.kind, phase):
                part = _aggregation(sizes, steps, sent, op.kind.op, cols)
                found += _begun([*part, *_relations(sizes, steps, op, op.kind)])
                sent += num_messages(steps)
            continue
        statistics = [Sum(nbytes) for nbytes in op.kind.sums_over_ranks] if rank.ranks > 1 else []
        sent += len(statistics)
        found += _begun([*(_in_parts(work, stage) for work in _work(sizes, op)), *statistics], len(stage.parts))
    return found


def edges_read(plan: RunPlan, rank: RankPlan, stage: StagePlan, phase: int) -> int:
    """Return the bytes of edges that a stage reads, those of every part of its columns once more."""
    edge, nnz = _sizes(plan, rank, rank.sizes.owned, None).edge, 0
    for op in stage.program.ops:
        if isinstance(op.kind, Aggregate):
            for _, steps in _steps_in_parts(rank, stage, op, op.kind, phase):
                nnz += sum(step.nnz for step in steps if isinstance(step, Multiply))
                nnz += sum(sum(step.nnz) for step in steps if isinstance(step, Stages))
    return nnz * edge


def _steps_in_parts(
    rank: RankPlan, stage: StagePlan, op: Op, kind: Aggregate, phase: int
) -> Iterator[tuple[int, tuple[Step, ...]]]:
    """Yield the columns and the steps of an aggregation of a stage, for each part of its columns."""
    plans = rank.training if stage.program.name == "train" else rank.evaluation
    for cols in [min(op.cols, len(part)) for part in stage.parts] if stage.how == "columns" else [op.cols]:
        yield cols, tuple(plans[kind.block].steps(cols, rank.sizes.operand, kind.backward, phase, kind.op))


def _in_parts(work: Work, stage: StagePlan) -> Work:
    """Return the work of all parts of a stage, of an op's over all rows; by columns: over the columns of a part."""
    count = len(stage.parts)
    if stage.how == "rows":  # blocks of rows are as many as over all of them
        return dataclasses.replace(work, span=(work.span or work.streamed) // count, calls=work.calls + count - 1)
    times = stage.total / stage.step if stage.how == "columns" else 1
    streamed, flop, rows = (round(times * number) for number in (work.streamed, work.flop, work.rows))
    span = work.span or work.streamed
    return dataclasses.replace(work, streamed=streamed, span=span, flop=flop, rows=rows, calls=count * work.calls)


def program_items(
    plan: RunPlan, rank: RankPlan, program: Program, phase: int = 0, device: DeviceRates | None = None
) -> list[Item]:
    """Return work and messages of one rank's program, in order, in the epochs e with e mod period = phase.

    After a training program: the sums of gradients and signals, and the optimiser. device: the one whose kernels do the
    work; None: one whose products are kernels of their own.
    """
    items = items_of(plan, rank, program, phase, device)
    return [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]


def items_of(plan: RunPlan, rank: RankPlan, program: Program, phase: int, device: DeviceRates | None) -> list[Item]:
    return [item for _, items in items_by_op(plan, rank, program, phase, device) for item in items]


def items_by_op(
    plan: RunPlan, rank: RankPlan, program: Program, phase: int = 0, device: DeviceRates | None = None
) -> Iterator[tuple[str, list[Item]]]:
    """As `program_items`, with the label of each op, but the stages of a broadcast are one item."""
    sizes_of = {rows: _sizes(plan, rank, count, device) for rows, count in rank.sizes.rows.items()}
    aggregations = iter(rank.steps(program, phase))
    sent = 0
    for op in program.ops:
        # What is added to a set's first rows passes over these.
        sizes = sizes_of[op.sets[1] if isinstance(op.kind, AddOwn) else op.rows]
        if isinstance(op.kind, Aggregate):
            steps = next(aggregations)
            summed = [*_aggregation(sizes, steps, sent, op.kind.op, op.cols)]
            if rank.values.reads_stored and not op.operands[0]:
                summed = [
                    _anywhere(item, plan.shape.num_vertices) if isinstance(item, Work) else item for item in summed
                ]
            yield op.label, [*_begun([*summed, *_relations(sizes, steps, op, op.kind)])]
            sent += num_messages(steps)
        else:
            statistics = [Sum(nbytes) for nbytes in op.kind.sums_over_ranks] if rank.ranks > 1 else []
            sent += len(statistics)
            work = _work(sizes, op)
            if op.out in op.reads:
                work = [dataclasses.replace(one, in_place=one.kind == "elementwise") for one in work]
            yield op.label, [*_begun([*work, *statistics])]
    yield from items_after(plan, rank, program is rank.train, sent)


def _begun(items: Iterable[Item], times: int = 1) -> Iterator[Item]:
    """Yield the items of an op, which begins so many times: with its first work, and again with what follows a wait."""
    begins = times
    for item in items:
        if isinstance(item, Work):
            yield dataclasses.replace(item, begins=begins)
            begins = 0
        else:
            yield item
            begins = begins if isinstance(item, Send) else times


def _anywhere(work: Work, vertices: int) -> Work:
    """Return gathers whose rows lie anywhere among those of all vertices."""
    return dataclasses.replace(work, footprint=vertices * work.row_bytes)


def items_after(plan: RunPlan, rank: RankPlan, training: bool, sent: int) -> Iterator[tuple[str, list[Item]]]:
    """Yield what follows the ops of a program, which has sent as many messages, as `items_by_op`."""
    learned = rank.learned if training else None
    if learned is not None and learned.messages:
        messages = list[Item]()
        for number, send in enumerate(learned_exchanges(plan, rank)):
            messages += [send, Await(sent + number)]
        yield "rows of vertices", messages
    if rank.ranks > 1:
        sums = (rank.gradient_bytes, 8 * SIGNALS) if training else rank.score_bytes
        yield "sums over ranks", [Sum(nbytes) for nbytes in sums]
    if training:
        # Weights and states are read and written, gradients read.
        passes = 3 + 2 * OPTIMIZER_STATES[plan.config.train.optimizer]
        moved = passes * rank.gradient_bytes + (0 if learned is None else learned.bytes_moved)
        calls = AFTER[plan.config.run.device]
        yield "optimizer", [Work(kind="overhead", streamed=moved, in_place=True, calls=calls, begins=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """The sizes that determine the work of a rank's ops."""

    rows: int
    vertices: int
    """Of the whole graph."""
    dtype: str
    operand: str
    precision: str
    block_rows: Callable[[int], int]
    """Rows of a block of so many columns."""
    input_nnz: int
    real: int
    """Bytes of a value of the sparse input."""
    edge: int
    """Bytes of an edge: column, and its weight if there is one."""
    fuses: bool
    """Whether a product of rows and what follows it are one kernel."""
    groups: bool
    """Whether small relations share launches."""
    figures: Figures | None
    """By which a CPU chooses its sparse kernels; None: a GPU, or nothing was measured."""

    @property
    def finishes(self) -> bool:
        """Whether a product of rows does what follows it in the same call, as all of the CPU's own do (cpu/gemm.cpp)."""
        return not self.groups

    def gain(self, rows: int, columns: int, nnz: int, row_bytes: int, reuse: Iterable[float] = ()) -> float:
        """How many times as fast as plain rows the variant of a sparse product is that a CPU chooses.

        reuse: as Multiply's; where it is known the rows' columns ascend, of drawn edges they do not.
        """
        if self.figures is None or not nnz:
            return 1.0
        item, planned = ITEM_BYTES[self.operand], _distances(1, reuse)
        traits = MatrixTraits(rows, min(columns, nnz), nnz, ascending=bool(planned), planned=planned)
        costs = costs_of(traits, row_bytes // item, item, self.figures, summed=self.dtype != "bf16")
        gain = min(s for choice, s in costs.items() if choice.way == "rows") / min(costs.values())
        return gain if gain >= GAIN else 1.0

    def arithmetic(self, op: EdgeOp, cols: int, width: int) -> Arithmetic | None:
        """Return what is computed along an edge in a step that reads `width` columns of an operand, or of some heads."""
        whole = op.arithmetic(cols)
        if whole is None:
            return None
        share = width * self.real / (4 * op.columns(cols).operand)
        return whole._replace(heads=share * whole.heads, columns=share * whole.columns)

    def blocks(self, block: int) -> int:
        return -(-self.rows // block)

    def row(self, cols: int) -> int:
        """Bytes of a padded row."""
        return BufferSpec("", 1, cols, self.dtype).nbytes

    def operand_row(self, cols: int) -> int:
        """Bytes of a padded row of what is multiplied with the graph."""
        return BufferSpec("", 1, cols, self.operand).nbytes

    def result(self, cols: int, rounded: bool) -> int:
        """Bytes of a padded row of a result, which is an operand of the graph if it is rounded."""
        return self.operand_row(cols) if rounded else self.row(cols)

    def dense(self, d: int, e: int, streamed: int, calls: int = 1, shape: DenseShape = "rows") -> Work:
        """A product of (V, D) and (D, E) matrices, in whatever order, that streams V rows of `streamed` bytes."""
        return Work(
            kind="dense",
            streamed=self.rows * streamed,
            flop=2 * self.rows * d * e,
            precision=self.precision,
            shape=shape,
            width=2 * d * e / max(d + e, 1),
            calls=calls,
        )

    def fused(self, d: int, e: int, streamed: int, *, gradient: bool = False, calls: int = 2) -> Work:
        """A product of (V, D) and (D, E) in a kernel that does what follows, too, behind one that packs the weights.

        Whole blocks are computed, whatever they hold (dense_blocks.py).
        """
        inner, cols = packed_shape(d, e, row_blocks(e, ITEM_BYTES[self.dtype], gradient=gradient))
        work = self.dense(inner, cols, streamed, calls)
        return dataclasses.replace(work, fused="gradient" if gradient else "rows")

    def passing(self, row_bytes: int, calls: int = 1, block: int = 0, *, in_place: bool = False) -> Work:
        """A pass that reads and writes `row_bytes` for each row; block: rows of the blocks that it finds in the cache."""
        streamed, span = self.rows * row_bytes, block * row_bytes
        return Work(kind="elementwise", streamed=streamed, span=span, in_place=in_place, calls=calls)

    def finished(self, finish: EpilogueSpec, cols: int, block: int, rounded: bool) -> list[Work]:
        """The epilogue and rounding of a product, block by block; nothing if they do nothing."""
        if self.finishes or (not finish.parts and not rounded):
            return []
        return [self.passing(self.row(cols) + self.result(cols, rounded), self.blocks(block), block)]


def _sizes(plan: RunPlan, rank: RankPlan, rows: int, device: DeviceRates | None) -> _Sizes:
    sizes, shape, precision = rank.sizes, plan.shape, plan.config.run.precision
    nnz = (shape.aggregated_nnz if rank.input.aggregated else shape.feature_nnz) or 0
    real = ITEM_BYTES[REAL[precision]]
    return _Sizes(
        rows=rows,
        vertices=shape.num_vertices,
        dtype=sizes.dtype,
        operand=sizes.operand,
        precision=DENSE[precision],
        block_rows=sizes.block_rows,
        input_nnz=math.ceil(nnz * rows / max(shape.num_vertices, 1)) if rank.input.sparse else 0,
        real=real,
        edge=4 + (real if shape.weighted or rank.values.typed else 0),
        fuses=device is not None and DENSE[precision] in device.fused,
        groups=not DEVICES[plan.config.run.device].is_host,
        figures=plan.figures if plan.figures.measured and DEVICES[plan.config.run.device].is_host else None,
    )


def _aggregation(sizes: _Sizes, steps: Iterable[Step], sent: int, along: EdgeOp, cols: int) -> Iterator[Item]:
    """Turn the steps of one aggregation of `cols` columns into items; `sent` messages of the program went before."""
    for step in steps:
        match step:
            case Multiply():
                row, result = sizes.operand_row(step.width), sizes.row(step.result or step.width)
                reuse = _distances(row, step.reuse)
                work = product(step.rows, step.columns, step.nnz, row, sizes.edge, reuse, result)
                plain = along.name != SUM.name  # other operations read whole rows
                gain = 1.0 if plain else sizes.gain(step.rows, step.columns, step.nnz, row, step.reuse)
                yield dataclasses.replace(work, gain=gain, along=sizes.arithmetic(along, cols, step.width))
            case Stages():
                result = sizes.row(step.result or step.width)
                reuse, of_edge = _distances(step.row_bytes, step.reuse), sizes.arithmetic(along, cols, step.width)
                yield Staged(stages=step, first=sent, edge=sizes.edge, reuse=reuse, result=result, along=of_edge)
            case Copy():
                row = sizes.operand_row(step.width)
                streamed = step.rows * (4 + row)
                yield Work(
                    kind="elementwise", rows=step.rows, row_bytes=row, footprint=sizes.rows * row, streamed=streamed
                )
            case Await():
                yield dataclasses.replace(step, message=step.message + sent)
            case Send():
                yield step


def _relations(s: _Sizes, steps: Iterable[Step], op: Op, kind: Aggregate) -> list[Work]:
    """Return what follows the sums of relations: products with their matrices, with at most one row per edge, and rows
    that are added, tile by tile; nothing without relations.

    Relations of a tile are taken to have equally many rows, for which launches are those that run: of others, those up to
    GROUPED_ROWS rows share some. An aggregation's own product is one of the sums' launches.
    """
    if kind.relations is None or not isinstance(kind.op, Relational):
        return []
    weights = kind.relations
    small = 2 * weights.num_relations * weights.num_bases * kind.op.d_in * kind.op.d_out
    # W_r and the result's zeros; backwards also those of the gradients of W_r, and two products that end with them.
    flop, calls = (3 * small, 5) if kind.backward else (small, 2)
    found = [Work(kind="dense", flop=flop, precision=s.precision, calls=calls)]
    for (rows, nnz), count in _tiles(steps).items():
        for one in _tile_relations(s, rows, nnz, weights.num_relations, kind.op):
            # As long as `count` of them, each of which streams its own bytes.
            streamed, flop, calls = (count * number for number in (one.streamed, one.flop, one.calls))
            span = one.span or one.streamed
            found.append(dataclasses.replace(one, span=span, streamed=streamed, flop=flop, calls=calls))
    return found


def _tiles(steps: Iterable[Step]) -> Counter[tuple[int, int]]:
    """Return how many tiles of an aggregation have so many rows and nonzeros."""
    found = Counter[tuple[int, int]]()
    for step in steps:
        if isinstance(step, Multiply):
            found[step.rows, step.nnz] += 1
        elif isinstance(step, Stages):
            rows = step.counts[step.rank]
            # As `Stages.plain` lists them: neither its own nor the last.
            found.update((rows, nnz) for stage, nnz in enumerate(step.nnz[:-1]) if stage != step.rank)
    return found


def _tile_relations(s: _Sizes, rows: int, nnz: int, relations: int, op: Relational) -> list[Work]:
    """Return the work of one tile's relations beside one product with its edges."""
    d, e = op.d_in, op.d_out
    of = dataclasses.replace(s, rows=min(nnz, rows * relations))
    if not of.rows:
        return []
    there = min(relations, of.rows)
    alone, groups = num_parts(of.rows, there, rows, groups=s.groups)
    parts, together = alone + groups, 0 < groups < there and multiplied_together(of.rows, there, d, e)
    moved, products = s.row(d) + 2 * s.row(e), parts if together or not groups else alone + there
    # What is left of relations in blocks of their own counts as those do.
    plain = dataclasses.replace(of.dense(d, e, moved, products), grouped=together and not alone)
    inner, cols = (e, d) if op.backward else (d, e)
    of_rows = of.fused(inner, cols, moved, calls=2 * products) if s.fuses and not plain.grouped else plain
    # Rows are added, or backwards gathered, part by part; their bytes are among the product's.
    around = of.passing(0, 2 * parts - 1)
    if not op.backward:
        return [of_rows, around]
    return [around, plain, *([of_rows, of.passing(0, parts)] if op.of_rows else [])]


def _distances(row: int, reuse: Iterable[float]) -> tuple[tuple[int, float], ...]:
    """Shares of the gathers by the bytes of the rows of the operand that were used since."""
    return tuple((bound * row, share) for bound, share in zip(BOUNDS, reuse, strict=False))


def _work(s: _Sizes, op: Op) -> list[Work]:
    """Return the work of an op other than an aggregation."""
    kind, e = op.kind, op.cols
    d = op.widths[0] if op.widths else 0
    rounded = op.operand
    if s.fuses and isinstance(kind, Linear | InputGrad | LinearGrad):
        return _fused(s, op, kind)
    match kind:
        case Linear(recomputed=None):
            finished, moved = s.finished(kind.finish, e, kind.block_rows, rounded), s.row(d) + s.result(e, rounded)
            return [s.dense(d, e, moved, s.blocks(kind.block_rows) if finished else 1), *finished]
        case Linear():
            blocks, finished = s.blocks(kind.block_rows), s.finished(kind.finish, e, kind.block_rows, rounded)
            moved = s.row(d) + s.result(e, rounded)
            return [s.passing(2 * s.row(d), blocks), s.dense(d, e, moved, blocks), *finished]
        case Rounded():
            return [s.passing(s.row(e) + s.operand_row(e))]
        case DroppedValues():
            moved = s.input_nnz * (4 + 3 * s.real)
            footprint = s.input_nnz * s.real
            return [
                Work(
                    kind="elementwise", rows=s.input_nnz, row_bytes=s.real, footprint=footprint, streamed=moved, calls=2
                )
            ]
        case SparseLinear():
            return [_sparse(s, d, e, transposed=False)]
        case Score():
            return [s.passing(s.row(d))]
        case Loss():
            return [s.passing(2 * s.row(e), calls=2)]
        case WeightGrad():
            width = op.widths[1]
            moved, blocks = s.row(d) + s.row(width), s.blocks(kind.block_rows) if kind.recomputed else 1
            again = [s.passing(2 * s.row(d), blocks)] if kind.recomputed else []
            return [*again, s.dense(d, width, moved, blocks, "sums")]
        case SparseWeightGrad():
            return [_sparse(s, d, op.widths[1], transposed=True)]
        case InputGrad() if s.finishes:
            return [s.dense(e, d, s.row(d) + s.row(e) + s.result(e, op.operand), 2)]
        case InputGrad():
            # The product's block is passed on in the cache; h is read and overwritten.
            rows = s.block_rows(e)
            block, blocks = s.passing(2 * s.row(e), 0, rows), s.blocks(rows)
            through = s.passing(s.row(e) + s.result(e, op.operand), blocks + 1)
            return [s.dense(e, d, s.row(d), blocks), block, through]
        case LinearGrad():
            finished = s.finished(kind.finish, e, kind.block_rows, rounded)
            moved = s.result(e, rounded) + s.row(d)
            return [s.dense(e, d, moved, s.blocks(kind.block_rows) if finished else 1), *finished]
        case LayerNorm() | LayerNormGrad() | BatchNorm() | BatchNormGrad() | RunningNorm():
            # An instruction takes as long as one of a dense product in double, which does two FLOP.
            passing = s.passing(kind.passes * s.row(e), calls=2 * kind.passes)
            return [dataclasses.replace(passing, flop=2 * kind.operations * s.rows * e, precision="fp64")]
        case ToHost() | OnHost() | FromHost() | Fetched():
            return []  # copies run beside: planning/op_cost.py
        case StoredRows():
            row = s.row(e)
            return [_anywhere(dataclasses.replace(s.passing(row), rows=s.rows, row_bytes=row), s.vertices)]
        case ActivationGrad():
            return [s.passing(2 * s.row(e) + s.result(e, op.operand), calls=2)]
        case BiasGrad():
            return [s.passing(2 * s.row(d), in_place=True)]  # rows are written over themselves and added up on the way
        case Scores():
            # A copy, and two products of heads.
            return [s.passing(3 * s.row(d) + s.result(e, op.operand), calls=3)]
        case ScoresGrad():
            # A copy, and for s and for t what is added to it, and products with the columns of all heads.
            products = s.dense(e, kind.spec.heads, s.row(e), shape="sums")
            added = s.passing(4 * s.row(e), calls=2, in_place=True)
            return [s.passing(2 * s.row(e)), added, products, products]
        case HeadMeanGrad():
            return [s.passing(s.row(d) + s.row(e)), s.passing(2 * s.row(e), in_place=True)]
    # All other kinds read their operands and write their result once.
    return [s.passing(sum(map(s.row, op.widths)) + s.result(e, op.operand))]


def _fused(s: _Sizes, op: Op, kind: Linear | InputGrad | LinearGrad) -> list[Work]:
    """Return the work of a product of rows where one kernel does what follows it, too."""
    d, e, moved = op.widths[0], op.cols, s.row(op.widths[0]) + s.result(op.cols, op.operand)
    if isinstance(kind, InputGrad):
        # h is read, too; a third kernel adds the column sums of all chunks.
        return [s.fused(d, e, moved + s.row(e), gradient=True, calls=3)]
    if isinstance(kind, LinearGrad) or kind.recomputed is None:
        return [s.fused(d, e, moved)]
    blocks = s.blocks(kind.block_rows)
    return [s.passing(2 * s.row(d), blocks), s.fused(d, e, moved, calls=2 * blocks)]


def _sparse(s: _Sizes, d: int, e: int, transposed: bool) -> Work:
    """The sparse input (V, D) times the weight, or its transpose times the gradient (V, E)."""
    row, out = s.row(e), d if transposed else s.rows
    operand = (s.rows if transposed else d) * row
    streamed = s.input_nnz * (4 + s.real) + out * (8 + row)
    gain = s.gain(out, operand // row, s.input_nnz, row)
    return Work(
        kind="sparse",
        rows=s.input_nnz,
        row_bytes=row,
        footprint=operand,
        streamed=streamed,
        results=out,
        gain=gain,
    )
