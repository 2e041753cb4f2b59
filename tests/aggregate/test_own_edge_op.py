"""What every strategy promises an edge operation, held with one that the package lacks: the maximum of neighbours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mggcn.aggregate.base import AggregationPlan, BuildContext, padded_rows
from mggcn.aggregate.broadcast import BroadcastPlan
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.halo import Exchange, HaloPlan
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Stages, Step, bytes_sent, num_messages
from mggcn.assemble.plan import STRATEGIES, partition_graph, plan_shape
from mggcn.backend.base import Epilogue
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.blocks.block import WHOLE
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.cost.work import Work
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.partition.make import stats_of
from mggcn.partition.rows.partition import row_owners, row_stats
from mggcn.partition.rows.required import count_required
from mggcn.partition.rows.shard import ShardOptions, build_shard
from mggcn.planning.op_work import program_items
from tests.aggregate.own_edge_op import Faulty, Maximum, Watched, gradient_of, maximum_of, to_tensor
from tests.aggregate.test_contract import Result, buffer, graph_of, summed
from tests.backend.cases import GUARD
from tests.reference import dense_csr
from tests.shapes import shape_of

COLS = 5
MAXIMUM = Maximum()
CASES = [(name, ranks) for name in STRATEGIES for ranks in (1, 2, 3) if name != "slice" or ranks == 1]


@dataclass(frozen=True)
class Case:
    """A strategy with a graph, what it aggregates, and the fault that it has."""

    name: str
    ranks: int
    graph: Graph
    op: EdgeOp = MAXIMUM
    required: np.ndarray | None = None
    fault: str = ""

    def adjacency(self) -> np.ndarray:
        """Edges u -> v that count, dense."""
        adj: np.ndarray = dense_csr(self.graph.adj) != 0
        return adj if self.required is None else adj * self.required

    def run(self, h: np.ndarray, g: np.ndarray, bias: np.ndarray) -> list[Result]:
        """op(h) + bias and, if the op trains or is a sum, its adjoint of g, on every rank, in float64."""
        run = RunConfig(ranks=self.ranks, order="random", strategy=self.name)  # type: ignore[arg-type]
        partition = partition_graph(Config(run=run, train=TrainConfig(seed=8)), self.graph)
        stats, symmetric = stats_of(self.graph, partition, self_loops=False), self.graph.symmetric
        if self.required is not None:
            owners = row_owners(partition)
            level = count_required(self.graph, owners, self.required, self_loops=False, threads=1)
            stats, symmetric = dataclasses.replace(row_stats(stats), required=(level,)).only(0), False
        options = ShardOptions(aggregates=True, norm="none", self_loops=False, dtype="f8", threads=1)

        def body(inner: Communicator) -> Result:
            torch.set_num_threads(1)
            comm, backend = CountingCommunicator(inner), CpuBackend(torch.float64, 1)
            comm.use_stream(backend.comm_stream)
            shard = build_shard(self.graph, partition, inner.rank, options)
            plan = STRATEGIES[self.name].plan(run, stats, inner.rank, symmetric, True)
            context = BuildContext(
                graph=self.graph,
                partition=partition,
                rank=inner.rank,
                options=options,
                backend=backend,
                comm=comm,
                required=self.required,
            )
            aggregation = plan.build(context).training
            aggregation.begin_epoch(0)
            rank = _Aggregations(self, plan, comm, backend, shard.rows)
            ids = shard.global_ids
            trains = bool(self.op.kept("op", 1, COLS, "fp64"))
            operand = np.column_stack([h[ids], ids]) if trains else h[ids]
            local = [rank.buffer(spec.rows, spec.cols) for spec in self.op.kept("op", shard.rows, COLS, "fp64")]
            seen, epilogue = rank.watch(self.op), Epilogue(bias=to_tensor(bias))
            # Twice: nothing may stay of the first.
            _, forward = (rank.move(aggregation.forward, seen, operand, epilogue, local, False) for _ in range(2))
            mine = g[ids] if shard.owned is None else g[ids] * shard.owned[:, None]  # copies hold parts of a sum
            backward = np.zeros_like(forward)
            if self.op.additive:
                backward = rank.move(aggregation.backward, rank.watch(self.op.adjoint), mine, None, [], True)
            elif trains:
                vertices = [to_tensor(ids[:, None].astype(np.float64))]
                operand = np.column_stack([mine, local[0].numpy()])
                backward = rank.move(aggregation.backward, rank.watch(self.op.adjoint), operand, None, vertices, True)
            rank.check_guards()
            return Result(ids, forward, backward, rank.sent, rank.planned)

        return run_threads(self.ranks, body, 60) if self.ranks > 1 else [body(SingleCommunicator())]


class Seen(NamedTuple):
    """An op that is watched, and as the strategy sees it: the same, or calls it with a fault."""

    watched: Watched
    by_strategy: Any


class _Aggregations:
    """Aggregations of a rank, each in buffers as planned, between guards, watched."""

    def __init__(
        self, case: Case, plan: AggregationPlan, comm: CountingCommunicator, backend: CpuBackend, rows: int
    ) -> None:
        self._case, self._plan, self._comm, self._backend, self._rows = case, plan, comm, backend, rows
        self._guarded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[tuple[int, int]] = []
        self.planned: list[tuple[int, int]] = []

    def buffer(self, rows: int, cols: int, fill: float = GUARD) -> torch.Tensor:
        view, whole = buffer(self._backend, rows, cols, fill)
        self._guarded.append((view, whole))
        return view

    def watch(self, op: EdgeOp) -> Seen:
        watched = Watched(op)
        return Seen(watched, Faulty(watched, self._case.fault) if self._case.fault else watched)

    def move(
        self, move: Any, seen: Seen, operand: np.ndarray, epilogue: Any, local: list[torch.Tensor], backward: bool
    ) -> np.ndarray:
        op = seen.watched.inner
        specs = self._plan.buffers("op", COLS, "fp64", op)
        slots = [self.buffer(spec.rows, spec.cols) for spec in specs]
        dense = self.buffer(*operand.shape, 7.0)
        dense.copy_(to_tensor(operand))
        out = self.buffer(self._rows, COLS, float("nan"))
        before = self._comm.bytes_sent, self._comm.messages
        move(dense, Target(out, epilogue, local), slots, 1, seen.by_strategy)
        self.sent.append((self._comm.bytes_sent - before[0], self._comm.messages - before[1]))
        steps = self._plan.steps(COLS, "fp64", backward, 0, op)
        self.planned.append((bytes_sent(steps), num_messages(steps)))
        products = [step for step in plain(steps) if isinstance(step, Multiply)]
        # A slice has some columns of all rows of the graph, everywhere else a rank has all columns of its own.
        sliced = self._case.name == "slice" and self._case.ranks > 1
        elements = sum(step.rows * step.width for step in products) if sliced else self._rows * COLS
        seen.watched.check(sum(step.nnz for step in products), elements)
        return out.numpy().copy()

    def check_guards(self) -> None:
        for view, whole in self._guarded:
            assert (whole[:64] == GUARD).all()
            assert (whole[64 + padded_rows(view).numel() :] == GUARD).all()


def plain(steps: tuple[Step, ...]) -> list[Step]:
    return [one for step in steps for one in (step.plain() if isinstance(step, Stages) else (step,))]


def data_of(graph: Graph, seed: int, *, ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (graph.num_vertices, COLS)
    h = rng.integers(-2, 2, shape).astype(np.float64) if ties else rng.normal(size=shape)
    return h, rng.normal(size=shape), rng.normal(size=COLS)


def holds(case: Case, *, ties: bool) -> None:
    """Compare what a strategy computes with the definition."""
    h, g, bias = data_of(case.graph, case.ranks, ties=ties)
    z, winners = maximum_of(case.adjacency(), h)
    results = case.run(h, g, bias)
    forward, backward = summed(results, case.graph.num_vertices)
    assert all(result.sent == result.planned for result in results)
    np.testing.assert_array_equal(forward, z + bias)
    np.testing.assert_allclose(backward, gradient_of(winners, g), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "ranks"), CASES)
@pytest.mark.parametrize("kind", ["random", "directed", "hub-row", "empty", "disconnected"])
def test_the_contract_holds_for_an_op_of_ones_own(name: str, ranks: int, kind: str) -> None:
    """Fails if a strategy adds instead of asking the op, forgets its columns or rows, a tile, a begin or an end, or sends
    other bytes than it planned for the op.
    """
    holds(Case(name, ranks, graph_of(kind, 29)), ties=False)
    holds(Case(name, ranks, graph_of(kind, 29)), ties=True)


@pytest.mark.parametrize("name", [name for name, ranks in CASES if ranks == 3])
def test_more_ranks_than_vertices(name: str) -> None:
    """Fails if a rank without rows, or a range without rows, is not one to begin and end."""
    holds(Case(name, 7, graph_of("random", 5)), ties=False)


@pytest.mark.parametrize("name", [name for name, ranks in CASES if ranks == 3 and STRATEGIES[name].kind == "rows"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pruned_rows_are_rows_without_edges(name: str, ranks: int) -> None:
    """Fails if a row that nothing requires is not zero, or a gradient comes from it."""
    required = np.random.default_rng(4).random(31) < 0.4
    holds(Case(name, ranks, graph_of("random", 31), required=required), ties=True)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_an_op_that_acts_column_by_column_runs_everywhere(name: str, ranks: int) -> None:
    """Fails if slices take sums for granted, or any strategy does where nothing but the operand's columns travels."""
    case = Case(name, ranks, graph_of("directed", 29), Maximum(trains=False))
    h, g, bias = data_of(case.graph, 9, ties=False)
    forward, _ = summed(case.run(h, g, bias), 29)
    np.testing.assert_array_equal(forward, maximum_of(case.adjacency(), h)[0] + bias)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_gradient_is_the_adjoint_of_the_derivative(name: str, ranks: int) -> None:
    """Fails if <f'(h) d, g> is not <d, b(g)>, f' being a difference quotient: the gradient went to another neighbour."""
    case, step = Case(name, ranks, graph_of("directed", 23)), 1e-6
    h, g, bias = data_of(case.graph, 5, ties=False)
    d = np.random.default_rng(6).normal(size=h.shape)
    ahead, behind = (summed(case.run(x, g, bias), 23)[0] for x in (h + step * d, h - step * d))
    backward = summed(case.run(h, g, bias), 23)[1]
    assert float(((ahead - behind) / (2 * step) * g).sum()) == pytest.approx(float((d * backward).sum()), rel=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_sum_is_called_alike(name: str, ranks: int) -> None:
    """Fails if a strategy calls the sum otherwise than the contract says, which the sum itself may not show."""
    case = Case(name, ranks, graph_of("directed", 29), SUM)
    h, g, bias = data_of(case.graph, 9, ties=False)
    forward, backward = summed(case.run(h, g, bias), 29)
    np.testing.assert_allclose(forward, case.adjacency().T @ h + bias, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(backward, case.adjacency() @ g, rtol=1e-12, atol=1e-12)


FAULTS = {
    "ends twice": "ended twice",
    "skips begin": "changed after its end|followed the last tile",
    "forgets the end": "not ended",
    "drops a tile": "a tile came twice, or never",
    "repeats a tile": "a tile came twice, or never|followed the last tile",
    "calls a tile the last too early": "followed the last tile",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["broadcast", "halo", "delayed"])
def test_planted_faults_are_seen(name: str, fault: str) -> None:
    """The contract fails a strategy that ends twice, skips a begin, forgets an end, or loses, repeats or closes a tile."""
    case = Case(name, 2, graph_of("random", 29), fault=fault)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        holds(case, ties=False)


def plan_of(name: str, ranks: int, **run: Any) -> AggregationPlan:
    graph = graph_of("random", 29)
    config = Config(run=RunConfig(ranks=ranks, strategy=name, **run))  # type: ignore[arg-type]
    stats = stats_of(graph, partition_graph(config, graph), self_loops=False)
    return STRATEGIES[name].plan(config.run, stats, 0, True, True)


def test_slices_refuse_an_op_that_needs_whole_rows() -> None:
    """Fails if an op whose columns depend on each other is cut into columns, or refused where nothing is cut."""
    for op in (Maximum(), Maximum().adjoint):
        with pytest.raises(PlanError, match=rf"slice deals .* operation {op.name} needs whole rows; choose broadcast"):
            plan_of("slice", 2).buffers("op", COLS, "fp32", op)
    assert plan_of("slice", 1).buffers("op", COLS, "fp32", Maximum()) == ()
    assert plan_of("slice", 2).buffers("op", COLS, "fp32", Maximum(trains=False))


@pytest.mark.parametrize("delay", ["none", "2"])
def test_delays_refuse_an_op_that_does_not_add_up(delay: str) -> None:
    """Fails if a part of a maximum is scaled, kept or subtracted as if it were a sum."""
    for op in (Maximum(), Maximum(trains=False)):
        with pytest.raises(PlanError, match=rf"run.delay {delay} uses .* maximum do not add up; use run.delay 0"):
            plan_of("delayed", 2, delay=delay).buffers("op", COLS, "fp32", op)
    assert plan_of("delayed", 2, delay=delay).buffers("op", COLS, "fp32") == ()


class Named:
    """A rank's plan for another op than the sum."""

    def __init__(self, plan: AggregationPlan, op: EdgeOp) -> None:
        self._plan, self._op = plan, op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, _: EdgeOp = SUM) -> tuple[Step, ...]:
        return self._plan.steps(cols, dtype, backward, phase, self._op)


@pytest.mark.parametrize("name", ["broadcast", "halo"])
def test_an_op_is_priced_by_its_columns(name: str) -> None:
    """Fails if the cost of a tile is that of a sparse product as wide as the result, in a stage or by itself."""
    run = RunConfig(ranks=3, strategy=name)  # type: ignore[arg-type]
    shape = shape_of(3000, 40_000, 50, 32)
    plan = plan_shape(Config(model=ModelConfig(hidden=(32,)), run=run), shape)
    rank = plan.ranks[0]
    own = dataclasses.replace(rank, training={WHOLE: Named(rank.aggregation, MAXIMUM)})
    sums, found = (
        [item for item in program_items(plan, one, one.train) if isinstance(item, Work) and item.kind == "sparse"]
        for one in (rank, own)
    )
    assert len(sums) == len(found) >= 4
    # 32 columns of float32 are two lines of 64 bytes, 33 are three and 64 are four; the result is read and written.
    assert [(work.rows, work.row_bytes) for work in found] == [(work.rows, 192) for work in sums]
    assert [work.streamed for work in found] == [work.streamed + 2 * 128 * work.results for work in sums]


def test_plans_of_an_op_by_hand() -> None:
    """Fails if a plan reckons with the columns of the result where others travel, are read or are added to."""
    op, grad = Maximum(), Maximum().adjoint
    broadcast = BroadcastPlan(0, (7, 5, 9), (30, 20, 10), (30, 20, 10), True)
    # 16 columns of float32 are one line of 64 bytes; with the vertex they are 17, and with the winners 32.
    assert [(b.rows, b.cols) for b in broadcast.buffers("x", 16, "fp32", op)] == [(9, 17)] * 2
    assert plain(broadcast.steps(16, "fp32", False, 0, op)) == [
        *(Send("broadcast", 2 * 7 * 128, 0, 0), Send("broadcast", 0, 5 * 128, 1), Multiply(7, 7, 30, 17, result=32)),
        *(Await(0), Send("broadcast", 0, 9 * 128, 2), Await(1), Multiply(7, 5, 20, 17, result=32), Await(2)),
        Multiply(7, 9, 10, 17, result=32),
    ]
    halo = HaloPlan(0, (7, 5), Exchange((0, 3), (0, 4), 30, 20), Exchange((0, 3), (0, 4), 30, 20), True)
    assert [(b.rows, b.cols) for b in halo.buffers("x", 16, "fp32", grad)] == [(3, 32), (4, 32)]
    assert halo.steps(16, "fp32", True, 0, grad) == (
        *(Copy(3, 32), Send("all_to_all", 3 * 128, 4 * 128), Multiply(7, 7, 30, 32, result=16)),
        *(Await(0), Multiply(7, 4, 20, 32, result=16)),
    )
    delayed = plan_of("delayed", 3)
    sums = delayed.buffers("x", 16, "fp32")
    assert [(b.rows, b.cols) for b in delayed.buffers("x", 16, "fp32", op)] == [(b.rows, 32) for b in sums]
    # Backwards parts of gradients are summed, and nothing else.
    assert delayed.buffers("x", 16, "fp32", grad) == sums
    assert bytes_sent(delayed.steps(16, "fp32", False, 0, op)) == 2 * bytes_sent(delayed.steps(16, "fp32", False))
    assert bytes_sent(delayed.steps(16, "fp32", True, 0, grad)) == bytes_sent(delayed.steps(16, "fp32", True))
