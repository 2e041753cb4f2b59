"""The plan of a run: per rank, every buffer, byte and message, from the sizes of the graph and the configuration alone.

N vertices, P ranks, V rows of a rank. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from mggcn.aggregate.base import AggregationPlan, Matrix, Strategy
from mggcn.aggregate.steps import Send, Step, bytes_sent, num_messages, num_products
from mggcn.backend.cpu.figures import ASSUMED, Figures
from mggcn.blocks.block import WHOLE, Block, Stack
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.comm.nccl_memory import NcclMemory
from mggcn.comm.nccl_settings import UNMEASURED
from mggcn.config import Config, Rung
from mggcn.cost.work import ring_bytes
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import runs_nccl
from mggcn.memory.units import human
from mggcn.model.builder import Network
from mggcn.model.choices import InputChoice
from mggcn.model.disk import runs_by_columns
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.lower import Plans, aggregations, paper_arena_bytes
from mggcn.model.network import Values
from mggcn.model.program import Program
from mggcn.model.runtime import Sizes
from mggcn.partition.base import PartitionStats
from mggcn.partition.rows.tiles import check_tile_nnz
from mggcn.planning.batch_rows import ReadRows, fetched_bytes
from mggcn.planning.batches import (
    device_bytes,
    feed_bytes,
    gathered_first,
    hops_back,
    packed_bytes,
    pads_batches,
    stack_of,
    steps_of,
)
from mggcn.planning.block_evaluation import BlockEvaluation
from mggcn.planning.decisions import RunDecisions
from mggcn.planning.disk import DiskChoices, DiskPlan, Limits, on_disk
from mggcn.planning.history import history_feed_bytes
from mggcn.planning.hosted import hosted_rows, on_host
from mggcn.planning.learned import LearnedPlan, plan_learned
from mggcn.planning.links import host_pair_bytes, keeps_pairs, pair_bytes, pair_matrix, pair_room, score_sums
from mggcn.planning.programs import Lowering, Programs
from mggcn.planning.pruning import LayerRows, set_bytes
from mggcn.planning.regions import RankSizes, input_bytes, score_bytes
from mggcn.planning.shape import GraphShape, check_shape
from mggcn.planning.sparse_rows import sparse_rows


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank: its model, programs and bytes."""

    rank: int
    values: Values
    """The model, its input that of all ranks together."""
    sizes: Sizes
    input: InputChoice
    """How this rank's input is kept."""
    programs: Programs
    regions: Mapping[str, int]
    """Bytes by purpose: arena, features, graph, vertex data, weights and optimiser, runtime, NCCL."""
    setup_bytes: int
    """Peak of set-up, before the first epoch."""
    training: Plans
    """How training epochs aggregate, by block."""
    evaluation: Plans
    """How evaluation and set-up aggregate, exactly."""
    states: Mapping[str, tuple[BufferSpec, ...]]
    """What the aggregations of training epochs keep, by name of the op."""
    gradient_bytes: int
    ranks: int
    nnz: int
    paper_bytes: int
    score_bytes: tuple[int, ...]
    """What an evaluation sums over ranks: counts of each class, or the scores of all vertices for ROC AUC, or for links
    their embeddings, and counts.
    """
    rows: tuple[LayerRows, ...] = ()
    """What every aggregating layer computes in training epochs."""
    pinned_bytes: int = 0
    """Memory of the host in which batches, or pairs of links, wait for a GPU."""
    by_blocks: BlockEvaluation | None = None
    """How evaluations run by blocks; None: by the whole graph's program."""
    learned: LearnedPlan | None = None
    """Learned rows of vertices; None: a run reads features."""

    @property
    def train(self) -> Program:
        """The program of a training step."""
        return self.programs.train

    @property
    def evaluate(self) -> Program:
        """The program of an evaluation."""
        return self.programs.evaluate

    @property
    def setup(self) -> Program | None:
        """The program of set-up; None if it computes nothing."""
        return self.programs.setup

    @property
    def disk(self) -> DiskPlan | None:
        """How the rank runs from disk; None: values are in memory."""
        return self.programs.disk

    @cached_property
    def hosted(self) -> tuple[BufferSpec, ...]:
        """What training keeps in pinned memory of the host, by slot; () where all rows are in memory, or on disk."""
        return hosted_rows(self.train)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the rank pins for its rows. An epoch sends as many there, and fetches them."""
        return sum(spec.nbytes for spec in self.hosted)

    @property
    def aggregation(self) -> AggregationPlan:
        """How training aggregates in its first block: the strategy's plan, over the whole graph."""
        return next(iter(self.training.values()))

    @property
    def exact(self) -> AggregationPlan:
        """How evaluation and set-up aggregate."""
        return self.evaluation[WHOLE]

    @property
    def pruned(self) -> dict[Block, AggregationPlan]:
        """How training epochs aggregate where they do not compute all rows."""
        return {block: plan for block, plan in self.training.items() if block.hops is not None}

    @property
    def arena_bytes(self) -> int:
        return self.programs.arena_bytes

    @property
    def total_bytes(self) -> int:
        """Predicted peak of the process."""
        return max(sum(self.regions.values()), self.setup_bytes)

    @property
    def scoring_bytes(self) -> int:
        """Predicted peak of a process on a host that evaluates by the whole graph's program and trains nothing: what steps
        alone would touch of the arena takes nothing there.
        """
        if self.disk is not None:
            return self.total_bytes
        used = [program.arena.nbytes for program in (self.evaluate, self.setup) if program is not None]
        return max(sum(self.regions.values()) - self.arena_bytes + max(used), self.setup_bytes)

    @cached_property
    def num_spmm(self) -> int:
        """Sparse products with the graph in one training epoch."""
        return sum(num_products(steps) for steps in self.steps(self.train))

    @property
    def evaluate_spmm(self) -> int:
        """Sparse products with the graph in one evaluation."""
        return sum(num_products(steps) for steps in self.steps(self.evaluate))

    def steps(self, program: Program, phase: int = 0) -> list[tuple[Step, ...]]:
        """Return the steps of every aggregation of a program, in the epochs e with e mod period = phase."""
        plans = self.training if program is self.train else self.evaluation
        operand = self.sizes.operand

        def steps_of(kind: Aggregate, cols: int) -> tuple[Step, ...]:
            disk, plan = self.disk, plans[kind.block]
            by_columns = disk is not None and runs_by_columns(kind, cols, self.sizes, plans)
            widths = (cols,) if disk is None or not by_columns else disk.widths(cols)
            return tuple(step for w in widths for step in plan.steps(w, operand, kind.backward, phase, kind.op))

        return [steps_of(kind, op.cols) for op, kind in aggregations(program.ops)]

    def _phases(self, program: Program) -> range:
        return range(self.aggregation.period if program is self.train else 1)

    def messages(self, program: Program) -> int:
        """Collective operations of a program: broadcasts, and sums of statistics, gradients, loss and counts."""
        if self.ranks == 1:
            return 0
        between = sum(len(op.kind.sums_over_ranks) for op in program.ops)
        after = 2 if program is self.train else len(self.score_bytes)
        after += self.learned.messages if program is self.train and self.learned is not None else 0
        return sum(num_messages(steps) for steps in self.steps(program)) + between + after

    def bytes_sent(self, program: Program) -> int:
        """Bytes that leave this rank in a program; an all-reduce counts as 2 (P - 1) / P of its buffer, as a ring sends.

        Where epochs differ: the average over a period, rounded up.
        """
        if self.ranks == 1:
            return 0
        phases = self._phases(program)
        sent = -(-sum(bytes_sent(steps) for phase in phases for steps in self.steps(program, phase)) // len(phases))
        sent += self.learned.bytes_sent if program is self.train and self.learned is not None else 0
        return sent + self.bytes_summed(program)

    def bytes_summed(self, program: Program) -> int:
        """Bytes that leave this rank in the sums over all ranks of a program: gradients, signals and statistics."""
        sums = (self.gradient_bytes, 8 * SIGNALS) if program is self.train else self.score_bytes
        between = [nbytes for op in program.ops for nbytes in op.kind.sums_over_ranks]
        return sum(ring_bytes(nbytes, self.ranks) for nbytes in (*sums, *between))


SIGNALS = 3
"""Loss, stop flag and seconds, float64, summed over ranks once an epoch."""


@dataclass(frozen=True, slots=True)
class Space:
    """A folder for rows on disk, or the host's memory, as a message names it, and the bytes that are free there."""

    folder: str
    free: int


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What was planned before a plan was taken.

    passed: the plans that do not fit into `limit` bytes of a rank, the one that keeps most in memory first. last: that of
    rows on disk, or of a GPU on the host, for which this machine needs `last_bytes`; None if it was not tried, or is not
    possible, for the reason `missing`.
    """

    limit: int
    passed: tuple[RunPlan, ...]
    space: Space
    last: RunPlan | None = None
    last_bytes: int = 0
    missing: str = ""

    @property
    def has_space(self) -> bool:
        return self.last_bytes <= self.space.free


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of all ranks."""

    config: Config
    shape: GraphShape
    stats: PartitionStats
    strategy: Strategy
    ranks: tuple[RankPlan, ...]
    nccl: NcclMemory = UNMEASURED
    figures: Figures = ASSUMED
    """Measured CPU rates that select kernels, on every rank and on resume."""
    stack: Stack | None = None
    """The blocks of a step; None: the whole graph."""
    limit: int = 0
    """Bytes of a rank for which a run from disk or with rows on the host was planned, 0 for any."""
    again: bool = False
    """Whether run.capacity auto has set run.recompute."""
    ladder: Ladder | None = field(default=None, compare=False)
    """What run.capacity auto chose from; None: it chose nothing, or the plan was read."""
    read: ReadRows | None = field(default=None, compare=False)
    """What drawn batches read of other ranks, by which messages are priced; None: it was not counted."""

    @property
    def steps(self) -> int:
        """Steps of an epoch, as far as the number of training vertices is known."""
        return steps_of(self.config, self.shape)

    @property
    def by_blocks(self) -> bool:
        """Whether evaluations run by blocks: config says so, or left it open and this was chosen."""
        return self.ranks[0].by_blocks is not None

    @property
    def on_disk(self) -> bool:
        """Whether rows are on disk between the ops of an epoch: the settings say so, or left it open and it was chosen."""
        return self.ranks[0].disk is not None

    @property
    def on_host(self) -> bool:
        """Whether rows are on the host between the passes of an epoch, likewise."""
        return self.ranks[0].values.hosted > 0

    @property
    def rung(self) -> Rung:
        """What run.capacity auto chose, or the settings say."""
        return "disk" if self.on_disk else "host" if self.on_host else "recompute" if self.again else "memory"

    @property
    def moved(self) -> int:
        """Bytes that an epoch of all ranks moves to and from where rows are that memory does not hold."""
        programs = [rank.disk.programs["train"] for rank in self.ranks if rank.disk is not None]
        return sum(one.read + one.written for one in programs) + 2 * sum(rank.host_bytes for rank in self.ranks)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk of all ranks."""
        return sum(rank.disk.file_bytes for rank in self.ranks if rank.disk is not None)

    @property
    def elsewhere(self) -> str:
        """Say how many bytes of all ranks are on disk or on the host; "" if none are."""
        if self.on_disk:
            return f"{human(self.disk_bytes)} on disk"
        return f"{human(sum(rank.host_bytes for rank in self.ranks))} on the host" if self.on_host else ""

    @property
    def chosen(self) -> Config:
        """The configuration with what was planned where it leaves that open, from which the same is planned again."""
        config = self.config.on_rung(self.rung) if self.config.run.capacity == "auto" else self.config
        if not config.sample.batch or config.train.evaluate != "auto":
            return config
        return config.evaluating("blocks" if self.by_blocks else "whole")

    @property
    def largest(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def process_bytes(self) -> int:
        """Predicted peak of one process: the largest rank's, or that of all ranks if they are threads of one process."""
        if self.config.run.transport != "threads":
            return self.largest.total_bytes
        runtime = self.ranks[0].regions["runtime"]
        return runtime + sum(rank.total_bytes - runtime for rank in self.ranks)


def plan_run(
    config: Config,
    shape: GraphShape,
    stats: PartitionStats,
    strategy: Strategy,
    nccl: NcclMemory = UNMEASURED,
    network: Network | None = None,
    figures: Figures = ASSUMED,
    stack: Stack | None = None,
    limit: int = 0,
    panel: int = 0,
    hosted: int = 0,
) -> RunPlan:
    """Plan every rank. Cost: no pass over the graph.

    nccl: what is known of its memory, if it moves the messages. network: the model, by default that of model.kind. figures:
    of this machine's CPU. limit: bytes of a rank, by which a run from disk has more or less in memory at a time, 0 for
    those of the configuration; panel: columns of its panels, as wide as messages and so alike on all ranks and machines, 0
    to choose them; hosted: steps in which rows go to the host, 0 to choose them.

    Raises: GraphError for a matrix of 2^31 nonzeros or more; PlanError for an inconsistent program; ConfigError for one
    whose values cannot lie on disk, or on the host.
    """
    check_shape(shape)
    stack = stack or stack_of(config, shape)
    limit = limit or config.run.memory_limit
    ranks = plan_ranks(
        config, shape, stats, strategy, range(len(stats.counts)), nccl, network, figures, stack, limit, panel, hosted
    )
    return RunPlan(
        config=config,
        shape=shape,
        stats=stats,
        strategy=strategy,
        ranks=ranks,
        nccl=nccl,
        figures=figures,
        stack=None if stack is None else gathered_first(stack, ranks[0].values.training),
        limit=limit,
    )


def plan_ranks(
    config: Config,
    shape: GraphShape,
    stats: PartitionStats,
    strategy: Strategy,
    ranks: Iterable[int],
    nccl: NcclMemory = UNMEASURED,
    network: Network | None = None,
    figures: Figures = ASSUMED,
    stack: Stack | None = None,
    limit: int = 0,
    panel: int = 0,
    hosted: int = 0,
) -> tuple[RankPlan, ...]:
    """Plan some ranks of a run: lower, place, and add up their bytes. Raises: as `plan_run`."""
    common = RunDecisions.of(config, shape, stats, strategy, network, stack)
    width = common.panel_width()  # of set-up, as in memory, whatever is on the host
    lowering = Lowering(common.values, width)
    largest = stats.counts.index(max(stats.counts))
    limits = Limits(limit, panel)
    if config.run.capacity == "host":

        def need(of: RunDecisions) -> int:
            return _plan_rank(of, Lowering(of.values, width), largest, nccl, figures, limits).total_bytes

        common = on_host(common, need, limit, hosted)
        lowering = Lowering(common.values, width)
    if config.run.capacity == "disk" and not panel:
        # All ranks have panels of the same columns: their messages are as wide.
        disk = _plan_rank(common, lowering, largest, nccl, figures, limits).disk
        limits = Limits(limit, 0 if disk is None else disk.panel)
    return tuple(_plan_rank(common, lowering, rank, nccl, figures, limits) for rank in ranks)


def _plan_rank(
    common: RunDecisions, lowering: Lowering, rank: int, nccl: NcclMemory, figures: Figures, limits: Limits
) -> RankPlan:
    config, shape, stats, required = common.config, common.shape, common.stats, common.required
    training, evaluation = common.aggregations(rank)
    exact, graph, num_ranks = evaluation.get(WHOLE), config.model.aggregates, len(stats.counts)
    by_blocks = common.by_blocks(rank)
    # Of blocks, evaluation's matrices stay beside those of a step.
    held = (*training.values(), *(() if WHOLE in training or exact is None else (exact,))) if graph else ()
    # P tiles on each of P ranks are many, but often of few sizes.
    tiles = Counter(held[0].matrices if graph else ())
    nnz = sum(matrix.nnz * count for matrix, count in tiles.items())
    forward = tiles + Counter(chain.from_iterable(plan.matrices for plan in held[1:]))
    backward = Counter(chain.from_iterable(plan.matrices_t for plan in held))
    chunks = Counter[Matrix]() if by_blocks is None else Counter([by_blocks.matrix])
    for matrix in (*forward, *backward):
        check_tile_nnz(matrix.nnz, num_ranks)
    inputs = common.inputs(rank, nnz)
    values, rank_sizes = common.values, common.sizes(rank)
    held_bytes = input_bytes(config, values.input, inputs, transposed=values.trains_whole)
    choice = replace(values.input, nbytes=0 if by_blocks else held_bytes)
    programs = lowering.programs(rank_sizes, training, evaluation, by_blocks)
    states = {
        kind.name: training[kind.block].state(kind.name, op.cols, rank_sizes.operand)
        for op, kind in aggregations(programs.train.ops)
    }
    drawn = [plan for plan in held if plan is not exact] if common.stack is not None else ()
    sparse = None if common.stack is None else sparse_rows(config, shape, common.stack, values)
    indices = sum(plan.index_bytes for plan in held)
    assignment = stats.assignment_bytes + set_bytes(training)
    pairs = pair_matrix(config, shape, rank_sizes.owned, common.stack)
    if pairs is not None:
        check_tile_nnz(pairs.nnz, num_ranks)
    sizes = RankSizes(
        config=config,
        shape=shape,
        values=values,
        rows=rank_sizes.owned,
        input=replace(choice, sparse=choice.sparse and by_blocks is None),
        inputs=inputs,
        gathered=() if sparse is None else sparse.matrices,
        forward=forward + chunks,
        backward=backward,
        pairs=pairs,
        drawn=Counter(matrix for plan in drawn for matrix in (*plan.matrices, *plan.matrices_t)) + chunks,
        index_bytes=indices,
        assignment_bytes=assignment,
        figures=figures,
    )
    learned = plan_learned(config, shape, rank_sizes.owned, common.stack)
    regions = {"arena": programs.arena_bytes} | sizes.regions(lowering.panel)
    if runs_nccl(config.run):
        steps = chain.from_iterable(plan.steps(1, rank_sizes.dtype, False) for plan in held)
        p2p = any(isinstance(step, Send) and step.kind == "all_to_all" for step in steps)
        regions["NCCL"] = nccl.nbytes(num_ranks, p2p)
    feeding, pinned = _feeding(common, rank, sizes, sparse, host=rank_sizes.device.is_host)
    regions |= feeding
    if by_blocks is not None:
        regions["evaluation by blocks"] = by_blocks.nbytes
    if learned is not None:
        regions["learned rows, beside themselves"] = learned.nbytes
    if programs.exact:
        regions["exact gradient"] = sizes.compared_bytes
    if kept := sum(spec.nbytes for specs in states.values() for spec in specs):
        regions["messages and sums in flight"] = kept
    if config.run.capacity == "disk":
        keeps = score_bytes(config, shape) > 0
        choices = DiskChoices.of(config, values, rank_sizes, training, evaluation, lowering.panel, keeps)
        disk, changed = on_disk(choices, sizes, regions, lowering.panel, limits)
        programs, regions = replace(programs, disk=disk), regions | changed
    return RankPlan(
        rank=rank,
        values=values,
        sizes=rank_sizes,
        input=choice,
        programs=programs,
        regions=regions,
        setup_bytes=sizes.setup_bytes(regions),
        training=training,
        evaluation=evaluation,
        states=states,
        gradient_bytes=sizes.gradient_bytes,
        ranks=num_ranks,
        nnz=nnz,
        paper_bytes=paper_arena_bytes(values.layers, rank_sizes, num_ranks, max(stats.counts)),
        score_bytes=score_sums(config, shape)
        if pairs is not None
        else (score_bytes(config, shape) or 9 * shape.num_classes * 8,),
        rows=required,
        pinned_bytes=pinned,
        by_blocks=by_blocks,
        learned=learned,
    )


def _feeding(
    common: RunDecisions, rank: int, sizes: RankSizes, sparse: SparseRowsPlan | None, *, host: bool
) -> tuple[dict[str, int], int]:
    """Return the bytes of what feeds a rank's steps: owners, batches on their way, rows of other ranks, pairs; and how many
    bytes a GPU's rank pins on the host for it.
    """
    config, shape, stats, stack, pairs = common.config, common.shape, common.stats, common.stack, sizes.pairs
    found, pinned = dict[str, int](), 0
    if host:
        # By which seeds are dealt: of ranges an array is made.
        dealt = 2 * bool(config.sample.batch and len(stats.counts) > 1 and not stats.kept_bytes)
        found["who holds which rows"] = (stats.kept_bytes + dealt) * shape.num_vertices
    if config.sample.batch and stack is not None:
        back = hops_back(common.values.training, stack)
        fed = feed_bytes(config, shape, stack, back, common.values.inputs, sparse)
        fed += 0 if sparse is None else sparse.dropped_bytes
        if pads_batches(config):
            pinned = fed + packed_bytes(config, shape, stack, common.values)
        # Beside them the gradients of a step's parts.
        found["batches on their way"] = (
            sizes.gradient_bytes
            + (device_bytes(config, shape, stack, common.values) if pinned else fed)
            + history_feed_bytes(config, stats, stack, rank)
        )
    if config.fetches_rows and stack is not None:
        found["rows of other ranks"] = fetched_bytes(config, shape, stack, sizes.rows)
    if pairs is not None:
        room = pair_room(config, shape, sizes.rows, stack) if keeps_pairs(config) else None
        kept = 0 if room is None else room.nbytes
        found["pairs and their scores"] = pair_bytes(config, shape, pairs, kept)
        if not host:
            pinned += host_pair_bytes(config, shape, pairs, kept)
    return found, pinned
