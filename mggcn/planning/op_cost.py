"""Work of every op of a program for the cost model: bytes, FLOP and calls by op, in one place.

V rows of this rank, D input width, E output width. Rows are padded to 64 bytes, as in the arena. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Stages, Step, num_messages
from mggcn.cost.epoch import Cost, mean_cost, predict
from mggcn.cost.machine import Machine
from mggcn.cost.work import Item, Staged, Sum, Work, product
from mggcn.errors import PlanError
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import DENSE, REAL
from mggcn.model import backward as bwd
from mggcn.model import forward as fwd
from mggcn.model.lower import Program
from mggcn.model.ops import EpilogueSpec, Op
from mggcn.partition.locality.reuse import BOUNDS
from mggcn.planning.regions import OPTIMIZER_STATES
from mggcn.planning.run import SIGNALS, RankPlan, RunPlan

AFTER: Final = {"cpu": 8, "cuda": 1}
"""Calls of an epoch beside its ops: history, learning rate, optimiser, clock and signals, which a GPU has in one kernel."""
MAX_TURNS: Final = 16
"""Epochs of a period of delayed messages that are costed; their bins are of about equal size."""


@dataclass(frozen=True, slots=True)
class EpochCost:
    """Predicted costs of a run: a training epoch (the average over a period where they differ) and an evaluation."""

    train: Cost
    evaluate: Cost


def epoch_cost(plan: RunPlan, machine: Machine) -> EpochCost:
    """Predict a training epoch and an evaluation of a plan. Raises: PlanError, ConfigError as `predict`."""
    return EpochCost(training_cost(plan, machine), _cost(plan, machine, [rank.evaluate for rank in plan.ranks]))


def training_cost(plan: RunPlan, machine: Machine) -> Cost:
    """Predict a training epoch of a plan alone. Raises: PlanError, ConfigError as `predict`."""
    period = plan.ranks[0].aggregation.period
    turns = range(0, period, -(-period // MAX_TURNS))
    return mean_cost([_cost(plan, machine, [rank.train for rank in plan.ranks], turn) for turn in turns])


def _cost(plan: RunPlan, machine: Machine, programs: Sequence[Program], turn: int = 0) -> Cost:
    """Predict one program of every rank."""
    run = plan.config.run
    transport = run.process_transport if run.transport == "auto" else run.transport
    lists = [_items(plan, rank, program, turn) for rank, program in zip(plan.ranks, programs, strict=True)]
    return predict(machine, transport, lists)


def program_items(plan: RunPlan, rank: RankPlan, program: Program, turn: int = 0) -> list[Item]:
    """Return work and messages of one rank's program, in order, in the epochs e with e mod period = turn.

    After a training program: the sums of gradients and signals, and the optimiser. Raises: PlanError for an unknown op.
    """
    items = _items(plan, rank, program, turn)
    return [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]


def _items(plan: RunPlan, rank: RankPlan, program: Program, turn: int) -> list[Item]:
    return [item for _, items in items_by_op(plan, rank, program, turn) for item in items]


def items_by_op(plan: RunPlan, rank: RankPlan, program: Program, turn: int = 0) -> Iterator[tuple[str, list[Item]]]:
    """As `program_items`, with the label of each op, but the stages of a broadcast are one item."""
    sizes = _sizes(plan, rank, program)
    aggregations = iter(rank.steps(program, turn))
    sent = 0
    for op in program.ops:
        if isinstance(op, fwd.Aggregate):
            steps = next(aggregations)
            yield op.label, list(_aggregation(sizes, steps, sent))
            sent += num_messages(steps)
        else:
            yield op.label, list(_work(sizes, op))
    training = program is rank.train
    if rank.ranks > 1:
        sums = (rank.gradient_bytes, 8 * SIGNALS) if training else (rank.score_bytes,)
        yield "sums over ranks", [Sum(nbytes) for nbytes in sums]
    if training:
        # Weights and states are read and written, gradients read.
        passes = 3 + 2 * OPTIMIZER_STATES[plan.config.train.optimizer]
        yield (
            "optimiser",
            [Work(kind="overhead", streamed=passes * rank.gradient_bytes, calls=AFTER[plan.config.run.device])],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes from which the work of a rank's ops follows."""

    rows: int
    dtype: str
    operand: str
    precision: str
    block_rows: Callable[[int], int]
    """Rows of a block of so many columns."""
    widths: dict[int, tuple[int, int]]
    input_nnz: int
    real: int
    """Bytes of a value of the sparse input."""
    edge: int
    """Bytes of an edge: column, and its weight if there is one."""

    def blocks(self, block: int) -> int:
        return -(-self.rows // block)

    def row(self, cols: int) -> int:
        """Bytes of a padded row."""
        return BufferSpec("", 1, cols, self.dtype).nbytes

    def operand_row(self, cols: int) -> int:
        """Bytes of a padded row of what is multiplied with the graph."""
        return BufferSpec("", 1, cols, self.operand).nbytes

    def result(self, cols: int, rounded: str) -> int:
        """Bytes of a padded row of a result, which is an operand of the graph if it is rounded."""
        return self.operand_row(cols) if rounded else self.row(cols)

    def dense(self, d: int, e: int, streamed: int, calls: int = 1) -> Work:
        """A product of (V, D) and (D, E) matrices, in whatever order, that streams V rows of `streamed` bytes."""
        flop = 2 * self.rows * d * e
        return Work(kind="dense", streamed=self.rows * streamed, flop=flop, precision=self.precision, calls=calls)

    def passing(self, row_bytes: int, calls: int = 1, block: int = 0) -> Work:
        """A pass that reads and writes `row_bytes` for each row; block: rows of the blocks that it finds in the cache."""
        return Work(kind="elementwise", streamed=self.rows * row_bytes, span=block * row_bytes, calls=calls)

    def finished(self, finish: EpilogueSpec, cols: int, block: int, rounded: str) -> list[Work]:
        """The epilogue and rounding of a product, block by block; nothing if they do nothing."""
        if finish == EpilogueSpec(finish.layer) and not rounded:
            return []
        return [self.passing(self.row(cols) + self.result(cols, rounded), self.blocks(block), block)]


def _sizes(plan: RunPlan, rank: RankPlan, program: Program) -> _Sizes:
    model, shape, precision = rank.model, plan.shape, plan.config.run.precision
    nnz = (shape.aggregated_nnz if model.input.aggregated else shape.feature_nnz) or 0
    real = ITEM_BYTES[REAL[precision]]
    return _Sizes(
        rows=model.rows,
        dtype=model.dtype,
        operand=model.operand,
        precision=DENSE[precision],
        block_rows=model.block_rows,
        widths={choice.layer: (choice.d_in, choice.d_out) for choice in model.layers},
        input_nnz=math.ceil(nnz * model.rows / max(shape.num_vertices, 1)) if model.input.sparse else 0,
        real=real,
        edge=4 + (real if shape.weighted else 0),
    )


def _aggregation(sizes: _Sizes, steps: Iterable[Step], sent: int) -> Iterator[Item]:
    """Turn the steps of one aggregation into items; `sent` messages of the program went before."""
    for step in steps:
        match step:
            case Multiply():
                row, result = sizes.operand_row(step.width), sizes.row(step.width)
                reuse = _distances(row, step.reuse)
                yield product(step.rows, step.columns, step.nnz, row, sizes.edge, reuse, result)
            case Stages():
                yield Staged(step, sent, sizes.edge, _distances(step.row_bytes, step.reuse), sizes.row(step.width))
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


def _distances(row: int, reuse: Iterable[float]) -> tuple[tuple[int, float], ...]:
    """Shares of the gathers by the bytes of the rows of the operand that were used since."""
    return tuple((bound * row, share) for bound, share in zip(BOUNDS, reuse, strict=False))


def _work(s: _Sizes, op: Op) -> list[Work]:
    """Return the work of an op that is no aggregation."""
    match op:
        case fwd.Linear():
            d, e = s.widths[op.layer]
            finished, moved = s.finished(op.finish, e, op.block_rows, op.rounded), s.row(d) + s.result(e, op.rounded)
            return [s.dense(d, e, moved, s.blocks(op.block_rows) if finished else 1), *finished]
        case fwd.DroppedLinear():
            d, e = s.widths[op.layer]
            blocks, finished = s.blocks(op.block_rows), s.finished(op.finish, e, op.block_rows, op.rounded)
            moved = s.row(d) + s.result(e, op.rounded)
            return [s.passing(2 * s.row(d), blocks), s.dense(d, e, moved, blocks), *finished]
        case fwd.DroppedInput():
            d = s.widths[op.layer][0]
            return [s.passing(s.row(d) + s.operand_row(d))]
        case fwd.Rounded():
            cols = s.widths[op.layer][0 if op.what == "input" else 1]
            return [s.passing(s.row(cols) + s.operand_row(cols))]
        case fwd.DroppedValues():
            moved = s.input_nnz * (4 + 3 * s.real)
            footprint = s.input_nnz * s.real
            return [
                Work(
                    kind="elementwise", rows=s.input_nnz, row_bytes=s.real, footprint=footprint, streamed=moved, calls=2
                )
            ]
        case fwd.SparseLinear():
            return [_sparse(s, op.layer, transposed=False)]
        case fwd.Score():
            return [s.passing(s.row(max(s.widths.items())[1][1]))]
        case bwd.Loss():
            return [s.passing(2 * s.row(s.widths[op.layer][1]), calls=2)]
        case bwd.WeightGrad():
            d, e = s.widths[op.layer]
            return [s.dense(d, e, s.row(d) + s.row(e))]
        case bwd.DroppedWeightGrad():
            d, e = s.widths[op.layer]
            blocks = s.blocks(op.block_rows)
            return [s.passing(2 * s.row(d), blocks), s.dense(d, e, s.row(d) + s.row(e), blocks)]
        case bwd.SparseWeightGrad():
            return [_sparse(s, op.layer, transposed=True)]
        case bwd.InputGrad():
            d, e = s.widths[op.layer]
            # The product's block is passed on in the cache; h is read and overwritten.
            rows = s.block_rows(d)
            block, blocks = s.passing(2 * s.row(d), 0, rows), s.blocks(rows)
            through = s.passing(s.row(d) + s.result(d, op.rounded), blocks + 1)
            return [s.dense(d, e, s.row(e), blocks), block, through]
        case bwd.ProductGrad():
            d, e = s.widths[op.layer]
            finished = s.finished(op.finish, d, op.block_rows, op.rounded)
            moved = s.result(d, op.rounded) + s.row(e)
            return [s.dense(d, e, moved, s.blocks(op.block_rows)), *finished]
        case bwd.ActivationGrad():
            d = s.widths[op.layer][0]
            return [s.passing(2 * s.row(d) + s.result(d, op.rounded), calls=2)]
    raise PlanError(f"the cost model does not know the op {op.label!r}; add its work to mggcn/planning/op_cost.py")


def _sparse(s: _Sizes, layer: int, transposed: bool) -> Work:
    """The sparse input (V, D) times the weight, or its transpose times the gradient (V, E)."""
    d, e = s.widths[layer]
    row, out = s.row(e), d if transposed else s.rows
    operand = (s.rows if transposed else d) * row
    streamed = s.input_nnz * (4 + s.real) + out * (8 + row)
    return Work(kind="sparse", rows=s.input_nnz, row_bytes=row, footprint=operand, streamed=streamed, results=out)
