"""What every op of a program computes and moves, for the cost model: bytes, FLOP and calls by op, in one place.

V rows of this rank, D input width, E output width. Rows are padded to 64 bytes, as in the arena. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mggcn.errors import PlanError
from mggcn.model import backward as bwd
from mggcn.model import forward as fwd
from mggcn.model.lower import Program
from mggcn.model.ops import Finish, Op
from mggcn.partition.locality_estimate import BOUNDS
from mggcn.plan.cost import Cost, mean_cost, predict
from mggcn.plan.description import Machine
from mggcn.plan.device import REAL
from mggcn.plan.memory import ITEM_BYTES, BufferSpec
from mggcn.plan.steps import Await, Copy, Multiply, Send, Stages, Step, num_messages
from mggcn.plan.work import Item, Staged, Sum, Work, product_bytes
from mggcn.train.regions import OPTIMIZER_STATES
from mggcn.train.runplan import SIGNALS, RankPlan, RunPlan

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
    several = "gloo" if run.device == "cpu" else "nccl"
    transport = several if run.transport == "auto" else run.transport
    lists = [_items(plan, rank, program, turn) for rank, program in zip(plan.ranks, programs, strict=True)]
    return predict(machine, transport, lists)


def program_items(plan: RunPlan, rank: RankPlan, program: Program, turn: int = 0) -> list[Item]:
    """Return work and messages of one rank's program, in order, in the epochs e with e mod period = turn.

    After a training program: the sums of gradients and signals, and the optimiser. Raises: PlanError for an unknown op.
    """
    items = _items(plan, rank, program, turn)
    return [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]


def _items(plan: RunPlan, rank: RankPlan, program: Program, turn: int) -> list[Item]:
    """As `program_items`, but the stages of a broadcast are one item."""
    sizes = _sizes(plan, rank, program)
    aggregations = iter(rank.steps(program, turn))
    items: list[Item] = []
    sent = 0
    for op in program.ops:
        if isinstance(op, fwd.Aggregate):
            steps = next(aggregations)
            items += _aggregation(sizes, steps, sent)
            sent += num_messages(steps)
        else:
            items += _work(sizes, op)
    training = program is rank.train
    if rank.ranks > 1:
        items += [Sum(n) for n in ((rank.gradient_bytes, 8 * SIGNALS) if training else (rank.score_bytes,))]
    if training:
        # Weights and states are read and written, gradients read.
        passes = 3 + 2 * OPTIMIZER_STATES[plan.config.train.optimizer]
        items.append(Work("overhead", streamed=passes * rank.gradient_bytes, calls=AFTER[plan.config.run.device]))
    return items


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the work of a rank's ops follows from."""

    rows: int
    dtype: str
    precision: str
    block_rows: int
    widths: dict[int, tuple[int, int]]
    input_nnz: int
    real: int
    """Bytes of a value of the sparse input."""
    edge: int
    """Bytes of an edge: column, and its weight if there is one."""

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    def row(self, cols: int) -> int:
        """Bytes of a padded row."""
        return BufferSpec("", 1, cols, self.dtype).nbytes

    def dense(self, d: int, e: int, streamed: int, calls: int = 1) -> Work:
        """A product of (V, D) and (D, E) matrices, in whatever order, that streams V rows of `streamed` bytes."""
        flop = 2 * self.rows * d * e
        return Work("dense", streamed=self.rows * streamed, flop=flop, precision=self.precision, calls=calls)

    def passing(self, row_bytes: int, blocked: bool = False, calls: int = 1) -> Work:
        """A pass that reads and writes `row_bytes` for each row; blocked: of a block that lies in the cache."""
        span = self.block_rows * row_bytes if blocked else 0
        return Work("elementwise", streamed=self.rows * row_bytes, span=span, calls=calls)

    def finished(self, finish: Finish, cols: int) -> list[Work]:
        """The epilogue of a product, block by block; nothing if it does nothing."""
        if finish == Finish(finish.layer):
            return []
        return [self.passing(2 * self.row(cols), blocked=True, calls=self.blocks)]


def _sizes(plan: RunPlan, rank: RankPlan, program: Program) -> _Sizes:
    model, shape, precision = rank.model, plan.shape, plan.config.run.precision
    nnz = (shape.aggregated_nnz if model.input.aggregated else shape.feature_nnz) or 0
    real = ITEM_BYTES[REAL[precision]]
    return _Sizes(
        model.rows,
        model.dtype,
        precision,
        model.block_rows,
        {choice.layer: (choice.d_in, choice.d_out) for choice in model.layers},
        math.ceil(nnz * model.rows / max(shape.num_vertices, 1)) if model.input.sparse else 0,
        real,
        4 + (real if shape.weighted else 0),
    )


def _aggregation(sizes: _Sizes, steps: Iterable[Step], sent: int) -> Iterator[Item]:
    """Turn the steps of one aggregation into items; `sent` messages of the program went before."""
    for step in steps:
        match step:
            case Multiply():
                row = sizes.row(step.width)
                # No more rows of the operand are touched than there are nonzeros.
                touched = min(step.columns, step.nnz)
                footprint, streamed = product_bytes(step.rows, touched, step.nnz, row, sizes.edge)
                yield Work("sparse", step.nnz, row, footprint, streamed, reuse=_distances(row, step.reuse))
            case Stages():
                yield Staged(step, sent, sizes.edge, _distances(step.row_bytes, step.reuse))
            case Copy():
                row = sizes.row(step.width)
                streamed = step.rows * (4 + row)
                yield Work("elementwise", rows=step.rows, row_bytes=row, footprint=sizes.rows * row, streamed=streamed)
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
        case fwd.Linear() | fwd.DroppedLinear():
            d, e = s.widths[op.layer]
            masked = [s.passing(2 * s.row(d), calls=s.blocks)] if isinstance(op, fwd.DroppedLinear) else []
            finished = s.finished(op.finish, e)
            return [*masked, s.dense(d, e, s.row(d) + s.row(e), s.blocks if finished or masked else 1), *finished]
        case fwd.DroppedInput():
            return [s.passing(2 * s.row(s.widths[op.layer][0]))]
        case fwd.DroppedValues():
            moved = s.input_nnz * (4 + 3 * s.real)
            footprint = s.input_nnz * s.real
            return [Work("elementwise", s.input_nnz, s.real, footprint, streamed=moved, calls=2)]
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
            return [s.passing(2 * s.row(d), calls=s.blocks), s.dense(d, e, s.row(d) + s.row(e), s.blocks)]
        case bwd.SparseWeightGrad():
            return [_sparse(s, op.layer, transposed=True)]
        case bwd.InputGrad():
            d, e = s.widths[op.layer]
            # The product's block is passed on in the cache; h is read and overwritten.
            block = s.passing(2 * s.row(d), blocked=True, calls=0)
            return [s.dense(d, e, s.row(e), s.blocks), block, s.passing(2 * s.row(d), calls=s.blocks + 1)]
        case bwd.ProductGrad():
            d, e = s.widths[op.layer]
            return [s.dense(d, e, s.row(d) + s.row(e), s.blocks), *s.finished(op.finish, d)]
        case bwd.ActivationGrad():
            return [s.passing(3 * s.row(s.widths[op.layer][0]), calls=2)]
    raise PlanError(f"the cost model does not know the op {op.label!r}; add its work to mggcn/train/opwork.py")


def _sparse(s: _Sizes, layer: int, transposed: bool) -> Work:
    """The sparse input (V, D) times the weight, or its transpose times the gradient (V, E)."""
    d, e = s.widths[layer]
    row, out = s.row(e), d if transposed else s.rows
    operand = (s.rows if transposed else d) * row
    streamed = s.input_nnz * (4 + s.real) + out * (8 + row)
    return Work("sparse", rows=s.input_nnz, row_bytes=row, footprint=operand, streamed=streamed)
