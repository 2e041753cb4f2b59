"""Predicted seconds of epochs, evaluations and batches, from the work of ops (planning/op_work.py). Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mggcn.aggregate.local import LocalPlan
from mggcn.aggregate.shared import SharedPlan
from mggcn.blocks.block import PAIRS
from mggcn.cost.batches import LOCK_S, MATRIX_CALLS, PAIR_S, BatchCost, Sample, scored_s
from mggcn.cost.disk import DiskCost, StageCost
from mggcn.cost.epoch import Cost, mean_cost, predict
from mggcn.cost.machine import UPLOAD, Machine
from mggcn.cost.work import Item, Staged, Work, work_seconds
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import REAL
from mggcn.memory.pages import PagePlan
from mggcn.model.kinds.hosted import Fetched, FromHost, OnHost, ToHost
from mggcn.model.program import Program
from mggcn.planning.batches import gather_threads, mean_stack, padded_layout, pads_batches
from mggcn.planning.disk import StagePlan
from mggcn.planning.exchanges import relay_cost, rows_given, transport_of
from mggcn.planning.links import pair_rows
from mggcn.planning.op_work import edges_read, items_after, items_by_op, items_of, program_items, stage_items
from mggcn.planning.run import RankPlan, RunPlan

MAX_PHASES: Final = 16
"""Most epochs of a period of delayed messages whose cost is computed; the bins are of about equal size."""
SMALL_ROWS: Final = 2048
SMALL_WORK: Final = 10**10
"""Rows of a rank, and FLOP of its epoch with 8 for each byte moved, up to which one thread computes: 0.2 s at most.
On a core that others use, a second thread holds up each of an epoch's kernels for milliseconds (docs/notes/0022)."""
SHORT_WORK: Final = 10**9
"""FLOP of an epoch, counted likewise, up to which runs begin with one thread: some 10 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCost:
    """Predicted costs of a run: a training epoch (the average over a period where they differ) or a step on a batch, an
    evaluation, and the exact gradient, if steps are compared with it. batch: what a batch takes beside its step. pairs_s:
    seconds in which the host makes the pairs of a step over the whole graph, `beside` the step before on a GPU, which the
    host does not wait for; scores_s: in which an evaluation scores links.
    """

    train: Cost
    evaluate: Cost
    exact: Cost | None = None
    batch: BatchCost | None = None
    pairs_s: float = 0.0
    scores_s: float = 0.0
    beside: bool = False

    @property
    def step_s(self) -> float:
        """Seconds from a step to the next."""
        if self.batch is None:
            return max(self.train.seconds, self.pairs_s) if self.beside else self.train.seconds + self.pairs_s
        return self.batch.step_s(self.train.seconds)

    @property
    def evaluate_s(self) -> float:
        """Seconds of an evaluation with the scores of its links."""
        return self.evaluate.seconds + self.scores_s


def epoch_cost(plan: RunPlan, machine: Machine) -> EpochCost:
    """Predict a training epoch and an evaluation of a plan. Raises: PlanError, ConfigError as `predict`."""
    exact = [rank.programs.exact for rank in plan.ranks if rank.programs.exact is not None]
    config, shape, batch, upload = plan.config, plan.shape, batch_cost(plan, machine), machine.device.upload > 0
    # Every rank scores its share of the pairs.
    pairs = -(-shape.num_scored_pairs // len(plan.ranks))
    return EpochCost(
        train=training_cost(plan, machine),
        evaluate=_evaluation_cost(plan, machine),
        exact=_cost(plan, machine, exact) if exact else None,
        batch=batch,
        pairs_s=PAIR_S * _pairs(plan) if batch is None else 0.0,
        # A GPU multiplies embeddings in less time than the host takes to count what it finds.
        scores_s=scored_s(pairs, 0, ()) if upload else scored_s(pairs, config.links.embedding, config.links.decoder),
        beside=upload,
    )


def _pairs(plan: RunPlan) -> int:
    """Return the pairs of a step on a rank, 0 if no links are predicted."""
    return pair_rows(plan.config, plan.shape).get(PAIRS, 0)


def batch_cost(plan: RunPlan, machine: Machine) -> BatchCost | None:
    """Predict what a batch takes beside its step, of sizes as drawn batches have them, if some were drawn; None for steps
    over the whole graph.
    """
    stack, config, shape, device = plan.stack, plan.config, plan.shape, machine.device
    if stack is None or not config.sample.batch:
        return None
    drawn = mean_stack(stack)
    # Ranks that share a batch each draw all of it.
    edges = sum(size.edges for size in drawn.capacities)
    if stack.together:
        edges = len(plan.ranks) * edges if stack.mean else sum(size.edges for size in stack.together)
    relay = relay_cost(plan, machine)
    padded, values, rows = pads_batches(config), plan.ranks[0].values, drawn.capacities[0].sources
    # Filled up, all but features is sent as long as it is planned.
    layout = padded_layout(config, shape, stack if padded else drawn, values)
    row_bytes = layout.feature_bytes * len(layout.inputs)
    sent = layout.nbytes - (layout.stack.capacities[0].sources - rows) * row_bytes
    # Of sparse features the nonzeros of every row set that products read are written, and transposed.
    read = sum(count for name, count in drawn.rows.items() if name in values.sparse_sets)
    nonzeros = round((shape.feature_nnz or 0) * read / max(shape.num_vertices, 1))
    cut, row_bytes = edges if stack.together else 0, 0 if values.sparse_sets or values.reads_stored else row_bytes
    matrices = num_matrices(plan)
    # What a relay fetches is known from batches that are drawn once more; edges that owners have drawn are read once more.
    entries = edges * (1 + (relay is not None))
    # Owners pass over a row once, and what they have drawn is read.
    looked = stack.looked * (1 + (relay is not None and not config.draws_at_owners))
    sample = Sample(rows + rows_given(plan), entries, row_bytes, _pairs(plan), cut, nonzeros=nonzeros, looked=looked)
    return BatchCost(
        sample_s=sample.seconds_on(gather_threads(config)),
        alone_s=sample.seconds,
        upload_s=sent / device.upload if device.upload else 0.0,
        ahead=config.sample.ahead,
        beside=padded,
        lock_s=LOCK_S
        if device.upload
        else matrices * (device.matrix_s or MATRIX_CALLS * (device.op_s or device.call_s)),
        cores=0.0 if device.upload else device.cores / machine.sharing(len(plan.ranks)),
        relay=relay,
    )


def num_matrices(plan: RunPlan) -> int:
    """Return the sparse matrices of a batch, with their transposes; 0 of steps over the whole graph."""
    return 0 if plan.stack is None else 2 * (len(plan.stack.blocks) + len(plan.ranks[0].values.sparse_sets))


def first_sums_s(plan: RunPlan) -> float:
    """Estimate the seconds in which the ranks compute A X before training (sample.first = full); 0 if they do not."""
    if not plan.config.sample.batch or plan.config.sample.first != "full":
        return 0.0
    shape = plan.shape
    row = BufferSpec("", 1, shape.num_features, REAL[plan.config.run.precision]).nbytes
    return Sample(shape.num_edges, 0, row).seconds / len(plan.ranks)


def _evaluation_cost(plan: RunPlan, machine: Machine) -> Cost:
    if plan.on_disk:
        return disk_cost(plan, machine, "evaluate").cost
    return _cost(plan, machine, [rank.evaluate for rank in plan.ranks])


def training_cost(plan: RunPlan, machine: Machine) -> Cost:
    """Predict a training epoch of a plan alone, or a step on a batch. Raises: PlanError, ConfigError as `predict`."""
    plan = _as_drawn(plan)
    period = plan.ranks[0].aggregation.period
    phases = range(0, period, -(-period // MAX_PHASES))
    if plan.on_disk:
        return mean_cost([disk_cost(plan, machine, "train", phase).cost for phase in phases])
    if plan.on_host:
        cost = mean_cost([_cost(plan, machine, [rank.train for rank in plan.ranks], phase) for phase in phases])
        return dataclasses.replace(cost, seconds=cost.seconds + host_cost(plan, machine).waiting_s)
    return mean_cost([_cost(plan, machine, [rank.train for rank in plan.ranks], phase) for phase in phases])


def _as_drawn(plan: RunPlan) -> RunPlan:
    """Return a plan with the sizes that steps on drawn batches have on average, as far as some were drawn and steps
    compute no more than a batch has: buffers are as large as the largest may be, views are cut to the batch.
    """
    if plan.stack is None or not plan.stack.mean or pads_batches(plan.config):
        return plan
    drawn = mean_stack(plan.stack)
    of_block = dict(zip(drawn.blocks, drawn.capacities, strict=True))

    def rank_as_drawn(rank: RankPlan) -> RankPlan:
        training = {
            block: dataclasses.replace(how, size=of_block[block]) if isinstance(how, LocalPlan | SharedPlan) else how
            for block, how in rank.training.items()
        }
        sizes = dataclasses.replace(rank.sizes, rows={**rank.sizes.rows, **drawn.rows})
        return dataclasses.replace(rank, sizes=sizes, training=training)

    return dataclasses.replace(plan, ranks=tuple(map(rank_as_drawn, plan.ranks)))


def epoch_threads(plan: RunPlan, threads: int) -> int:
    """Return the threads of every rank's epochs: `threads`, or one if all ranks are small. No result depends on it."""
    if max(rank.sizes.owned for rank in plan.ranks) > SMALL_ROWS:
        return threads
    return threads if epoch_work(plan) > SMALL_WORK else 1


def first_threads(plan: RunPlan, threads: int) -> int:
    """Return how many of `threads` threads a run begins with: one if epochs are short."""
    return threads if epoch_work(plan) > SHORT_WORK else 1


def epoch_work(plan: RunPlan) -> float:
    """Return the FLOP of a training epoch of the busiest rank, counting 8 for each byte moved."""
    works = [[item for item in program_items(plan, r, r.train) if isinstance(item, Work)] for r in plan.ranks]
    return max(sum(w.flop + 8 * (w.streamed + w.rows * w.row_bytes) for w in work) for work in works)


def _cost(plan: RunPlan, machine: Machine, programs: Sequence[Program], phase: int = 0) -> Cost:
    """Predict one program of every rank."""
    device = machine.device
    lists = [items_of(plan, rank, program, phase, device) for rank, program in zip(plan.ranks, programs, strict=True)]
    if not device.upload:  # a processor
        lists = [
            [_among(item, rank.regions["arena"]) for item in items]
            for items, rank in zip(lists, plan.ranks, strict=True)
        ]
    return predict(machine, transport_of(plan), lists)


def _among(item: Item, swept: int) -> Item:
    """Return an item whose results lie in so many bytes, all of which a step passes over."""
    return dataclasses.replace(item, swept=swept) if isinstance(item, Work) else item


def disk_cost(plan: RunPlan, machine: Machine, name: str, phase: int = 0) -> DiskCost:
    """Predict a program of a plan from disk, stage by stage, in the epochs e with e mod period = phase: "train", or
    "evaluate". Raises: PlanError, ConfigError as `predict`.
    """
    transport, found = transport_of(plan), list[StageCost]()
    programs = [(rank, rank.disk.programs[name], rank.disk.pages) for rank in plan.ranks if rank.disk is not None]
    # Ranks that share a device share its disk.
    sharing = machine.sharing(len(plan.ranks))
    for number, first in enumerate(programs[0][1].stages):
        stages = [(rank, program.stages[number], pages) for rank, program, pages in programs]
        items = [stage_items(plan, rank, stage, phase, machine.device) for rank, stage, _ in stages]
        moved = [
            tuple(sum(pages[one.page].spec.nbytes for one in some) for some in (stage.reads, stage.writes))
            for _, stage, pages in stages
        ]
        edges = sharing * max(_edges_from_disk(plan, rank, stage, phase) for rank, stage, _ in stages)
        parts = len(first.parts) if first.turns > 1 else 1  # nothing is read beside what is computed
        read, written = (sharing * max(some) for some in zip(*moved, strict=True))
        copied = sharing * max(_copied(stage, pages) for _, stage, pages in stages)
        copied_s = copied / machine.device.copy.at(copied) if copied else 0.0
        computed = predict(machine, transport, items)
        found.append(
            StageCost(compute=computed, read=read, written=written, parts=parts, edges=edges, copied_s=copied_s)
        )
    after = [[one for _, items in items_after(plan, rank, name == "train", 0) for one in items] for rank in plan.ranks]
    return DiskCost(tuple(found), predict(machine, transport, after), machine.disk_rates)


class HostCost(NamedTuple):
    """Seconds of an epoch in which a rank's rows are copied to the host and back, and in which computing waits for it."""

    copying_s: float
    waiting_s: float


def host_cost(plan: RunPlan, machine: Machine) -> HostCost:
    """Predict the copies of the rank that waits longest for them. Raises: PlanError as `predict`.

    Copies run in order, at the rate of uploads in either direction, beside the ops that are queued behind their beginning.
    Messages between ranks, which copies run beside, too, are left out: computing waits no longer than is said.
    """
    return max((_copies(plan, rank, machine) for rank in plan.ranks), key=lambda cost: (cost.waiting_s, cost.copying_s))


def _copies(plan: RunPlan, rank: RankPlan, machine: Machine) -> HostCost:
    sharing = machine.sharing(len(plan.ranks))
    slots = [spec.nbytes * sharing / (machine.device.upload or UPLOAD) for spec in rank.hosted]
    ended, now, waited, copied = dict[int, float](), 0.0, 0.0, 0.0
    for op, (_, items) in zip(rank.train.ops, items_by_op(plan, rank, rank.train, 0, machine.device), strict=False):
        match op.kind:
            case ToHost(slot) | FromHost(slot):
                copied = ended[slot] = max(copied, now) + slots[slot - 1]
            case OnHost(slot) | Fetched(slot):
                waited += max(0.0, ended[slot] - now)
                now = max(now, ended[slot])
            case _:
                plain = (one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,)))
                now += sum(sum(work_seconds(one, machine.device, sharing)) for one in plain if isinstance(one, Work))
    return HostCost(2 * sum(slots), waited)


def _copied(stage: StagePlan, pages: PagePlan) -> int:
    """Return the bytes that are read and written where rows of all panels meet in memory: a panel moves without a copy."""
    if stage.how == "columns":
        return 0
    specs = [pages[one.page].spec for one in (*stage.reads, *stage.writes)]
    return 2 * sum(spec.nbytes for spec in specs if spec.panels > 1)


def _edges_from_disk(plan: RunPlan, rank: RankPlan, stage: StagePlan, phase: int) -> int:
    """Return the bytes of edges that a stage reads from disk: none where the limit leaves room for all beside the plan."""
    edges = 0 if rank.disk is None else rank.disk.edge_bytes
    cached = not plan.limit or plan.limit - rank.total_bytes >= edges
    return 0 if cached else edges_read(plan, rank, stage, phase)
