"""What the halo exchange plans: rows that are needed, and no others. Its sums are held by test_contract.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mggcn.aggregate.base import BuildContext, Matrix
from mggcn.aggregate.halo import Exchange, HaloPlan, HaloStrategy
from mggcn.aggregate.steps import Await, Copy, Multiply, Send
from mggcn.assemble.plan import partition_graph
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config, RunConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.partition.locality.reuse import BOUNDS
from mggcn.partition.make import stats_of
from mggcn.partition.rows.partition import RowStats
from mggcn.partition.rows.shard import ShardOptions
from tests.aggregate.test_contract import graph_of
from tests.graphs import make_graph

FIVE = np.zeros((5, 5), np.float32)
"""0 -> 3, 0 -> 4, 1 -> 4, 4 -> 2; under the order none, two ranks have 0, 1 and 2, 3, 4."""
FIVE[0, 3] = FIVE[0, 4] = FIVE[1, 4] = FIVE[4, 2] = 1


def plan_of(graph: Graph, ranks: int, rank: int) -> HaloPlan:
    config = Config(run=RunConfig(ranks=ranks, order="none", strategy="halo"))
    stats = stats_of(graph, partition_graph(config, graph), self_loops=True)
    return HaloStrategy().plan(config.run, stats, rank, graph.symmetric, True)


def test_a_plan_by_hand() -> None:
    """Fails if a rank plans rows that it does not need, mixes up senders and receivers, or A with its transpose."""
    graph = make_graph(FIVE, num_features=2, num_classes=2, seed=1)
    plans = [plan_of(graph, 2, rank) for rank in range(2)]
    # Rank 1 needs the rows of 0 and 1 for A^T, and rank 0 those of 3 and 4 for A.
    assert plans[0].counts == (2, 3)
    assert plans[0].forward == Exchange((0, 2), (0, 0), 2, 0)
    assert plans[1].forward == Exchange((0, 0), (2, 0), 4, 3)
    assert plans[0].backward == Exchange((0, 0), (0, 2), 2, 3)
    assert plans[1].backward == Exchange((2, 0), (0, 0), 4, 0)
    assert plans[1].matrices == (Matrix(3, 4), Matrix(3, 3))
    assert plans[1].matrices_t == (Matrix(3, 4), Matrix(3, 0))
    assert [plan.index_bytes for plan in plans] == [8, 8]
    # 17 columns of float32 take two lines of 64 bytes.
    assert [(b.rows, b.cols, b.nbytes) for b in plans[0].buffers("x", 17, "fp32")] == [(2, 17, 256)] * 2
    near = (1.0, *[0.0] * (len(BOUNDS) - 1))  # five rows lie within the first bound of each other
    products = Multiply(3, 3, 4, 17, near), Multiply(3, 2, 3, 17, near)
    steps = (Copy(0, 17), Send("all_to_all", 0, 256), products[0], Await(0), products[1])
    assert plans[1].steps(17, "fp32", False) == steps


def test_one_rank_needs_nothing() -> None:
    """Fails if a single rank holds slots, sends a message, or keeps a second matrix."""
    plan = plan_of(graph_of("directed", 37), 1, 0)
    assert plan.buffers("x", 9, "fp32") == ()
    assert len(plan.steps(9, "fp32", False)) == len(plan.matrices) == len(plan.matrices_t) == 1
    assert plan.index_bytes == 0


def test_a_symmetric_graph_has_one_side() -> None:
    """Fails if the matrices or lists of an undirected graph are held twice."""
    graph = graph_of("random", 37)
    config = Config(run=RunConfig(ranks=3, order="random", strategy="halo"))
    partition = partition_graph(config, graph)
    stats = stats_of(graph, partition, self_loops=True)
    plan = HaloStrategy().plan(config.run, stats, 1, True, True)
    assert plan.matrices_t == ()
    assert plan.index_bytes == 4 * plan.forward.num_sent > 0
    options = ShardOptions(aggregates=True, norm="mean", self_loops=True, dtype="f4", threads=1)
    made: list[tuple[int, int]] = []

    class Counting(CpuBackend):
        def sparse(self, indptr, indices, values, like=None):  # type: ignore[no-untyped-def]
            made.append((indptr.shape[0] - 1, indices.shape[0]))
            return super().sparse(indptr, indices, values)

    backend = Counting(torch.float32, 1)
    comm = SingleCommunicator()
    plan.build(BuildContext(graph=graph, partition=partition, rank=1, options=options, backend=backend, comm=comm))
    assert made == [(matrix.rows, matrix.nnz) for matrix in plan.matrices]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_plan_of_another_graph_is_refused(direction: str) -> None:
    """Fails if ranks would start messages of other lengths than planned, which a transport answers with an abort."""
    graph = graph_of("directed", 37)
    config = Config(run=RunConfig(ranks=2, order="random", strategy="halo"))
    partition = partition_graph(config, graph)
    plan = HaloStrategy().plan(config.run, stats_of(graph, partition, self_loops=True), 0, False, True)
    exchange: Exchange = getattr(plan, direction)
    wrong = dataclasses.replace(exchange, received=(0, exchange.received[1] + 1))
    context = BuildContext(
        graph=graph,
        partition=partition,
        rank=0,
        options=ShardOptions(aggregates=True, norm="mean", self_loops=True, dtype="f8", threads=1),
        backend=CpuBackend(torch.float64, 1),
        comm=SingleCommunicator(),
    )
    planned = dataclasses.replace(plan, **{direction: wrong})
    with pytest.raises(PlanError, match=r"rank 0 was planned to send .* plan this graph and partition again"):
        planned.build(context)


def test_expected_rows_are_those_of_random_parts() -> None:
    """Fails if a plan of a bare shape reads other figures than that of a graph, by more than the estimate is off."""
    rng = np.random.default_rng(3)
    dense = (rng.random((400, 400)) < 0.01).astype(np.float32)
    np.fill_diagonal(dense, 0)
    graph = make_graph(dense, num_features=2, num_classes=2, seed=1)
    config = Config(run=RunConfig(ranks=4, order="random", strategy="halo"))
    stats = stats_of(graph, partition_graph(config, graph), self_loops=True)
    expected = RowStats.expected(400, graph.num_edges, 4, self_loops=True)
    counted, guessed = (HaloStrategy().plan(config.run, f, 2, False, True).forward for f in (stats, expected))
    assert guessed.num_sent == pytest.approx(counted.num_sent, rel=0.1)
    assert guessed.halo_nnz == pytest.approx(counted.halo_nnz, rel=0.1)
