"""What the plans of all ranks share: nothing of another rank's gets into a rank's plan, and nothing counts once too few."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from mggcn.aggregate.base import Matrix
from mggcn.assemble.plan import STRATEGIES, plan_graph, plan_shape, resolve
from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cuda import sizes as cuda_sizes
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.work import Work
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.partition.locality.reuse import BOUNDS, Reuse
from mggcn.partition.rows.partition import RowStats
from mggcn.partition.statistics import TileStatistics
from mggcn.planning.op_work import program_items
from mggcn.planning.run import RankPlan, RunPlan, plan_ranks, plan_run
from tests.graphs import make_graph
from tests.planning.test_pruning import config_of, graph_of
from tests.shapes import shape_of

RANKS = 5
SHAPE = shape_of(10_000, 90_000, 24, 6, symmetric=False, num_training=100)


def ring(n: int = 400) -> Graph:
    """Every rank of four has equally many rows and neighbours of other ranks; the training vertices are the first's."""
    dense = np.zeros((n, n), np.float32)
    for step in (1, n // 4):
        dense[np.arange(n), (np.arange(n) + step) % n] = 1
    graph = make_graph(np.maximum(dense, dense.T), num_features=8, num_classes=3, seed=2)
    training = np.zeros((1, n), bool)
    training[0, :30] = True
    return dataclasses.replace(graph, splits=dict(graph.splits) | {"train": ArrayRows(training)})


def planned(graph: Graph, name: str, ranks: int, **run: Any) -> RunPlan:
    return plan_graph(resolve(config_of(name, ranks, run), graph), graph)[0]


def alone(plan: RunPlan, rank: int) -> RankPlan:
    """A rank's plan, made without the others'."""
    return plan_ranks(plan.config, plan.shape, plan.stats, plan.strategy, [rank])[0]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("graph", [ring(), graph_of(symmetric=True), graph_of()], ids=["ring", "symmetric", "directed"])
def test_no_rank_gets_the_programs_of_another(name: str, graph: Graph) -> None:
    """Fails if ranks that differ in what any of their aggregations keeps share programs."""
    for ranks, order in ((4, "none"), (3, "random")):
        plan = planned(graph, name, ranks, order=order)
        assert [alone(plan, rank) for rank in range(ranks)] == list(plan.ranks)


def test_the_ring_is_the_case_it_should_be() -> None:
    """Fails if the ring no longer has ranks that differ in pruned layers alone."""
    plan = planned(ring(), "halo", 4, order="none")
    assert len({rank.sizes.owned for rank in plan.ranks}) == 1
    assert len({rank.exact.buffers("", 16, "fp32") for rank in plan.ranks}) == 1
    assert len({tuple(p.buffers("", 16, "fp32") for p in rank.pruned.values()) for rank in plan.ranks}) > 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_nonzero_is_counted(name: str) -> None:
    """Fails if the nonzeros of equal tiles count once."""
    plan = plan_shape(Config(run=RunConfig(ranks=8, strategy=name)), SHAPE, replication=2.0)
    for rank in plan.ranks:
        assert rank.nnz == sum(matrix.nnz for matrix in rank.aggregation.matrices)
    # Of slices of columns, every rank has the whole graph.
    copies = 8 if name == "slice" else 1
    assert sum(rank.nnz for rank in plan.ranks) == copies * plan.stats.num_entries


def regions_of(device: str, spmm: str) -> tuple[Sequence[RankPlan], Iterable[list[Matrix]]]:
    """Plans of ranks whose tiles are equal, and every matrix of each, as often as it is there."""
    run = RunConfig(ranks=RANKS, device=device, spmm=spmm, prune="off")  # type: ignore[arg-type]
    plan = plan_shape(Config(model=ModelConfig(hidden=(16,)), run=run), SHAPE)
    plans = [rank.aggregation for rank in plan.ranks]
    matrices = [[*aggregation.matrices, *aggregation.matrices_t] for aggregation in plans]
    assert all(len(of_rank) == 2 * RANKS > 2 * len(set(of_rank)) for of_rank in matrices)
    return plan.ranks, matrices


def test_bytes_of_equal_matrices_on_the_cpu() -> None:
    """Fails if matrices of one size, or their schedules, are kept once in the plan and P times in the run."""
    for rank, matrices in zip(*regions_of("cpu", "own"), strict=True):
        assert rank.regions["graph"] == sum(4 * m.nnz + 8 * (m.rows + 1) for m in matrices)
        assert rank.regions["kernel schedules"] == sum(cpu_sizes.schedule_bytes(m.rows, m.nnz) for m in matrices)


@pytest.mark.parametrize("spmm", ["own", "cusparse"])
def test_bytes_of_equal_matrices_on_a_gpu(spmm: str) -> None:
    """Fails as the test above."""
    for rank, matrices in zip(*regions_of("cuda", spmm), strict=True):
        assert rank.regions["kernel schedules"] == sum(cuda_sizes.schedule_bytes(m.rows, m.nnz) for m in matrices)
        if spmm == "cusparse":
            kept = [cuda_sizes.cusparse_bytes(m.rows, m.nnz, False, 4) for m in matrices]
            assert rank.regions["cuSPARSE, but for its work space"] == sum(kept)


def stats_of(counts: tuple[int, ...], entries: int, reuse: Reuse) -> RowStats:
    """Of ranks with so many rows each, whose entries are spread evenly."""
    shares = np.array(counts) / sum(counts)
    nnz = (entries * np.outer(shares, shares)).astype(np.int64)
    needed = np.minimum(nnz, np.array(counts))
    return RowStats(counts, TileStatistics(nnz, needed, needed), reuse=reuse)


@pytest.mark.parametrize("weighted", [False, True])
def test_products_of_stages_by_hand(weighted: bool) -> None:
    """Fails if a stage's product is costed without the edges' weights, or as if its gathers were at random."""
    own, others = (0.5, 0.25, 0.25), (0.125, 0.875)
    shape = dataclasses.replace(SHAPE, weighted=weighted)
    counts = (2000, 3000, 5000)
    config = Config(model=ModelConfig(hidden=(16,)), run=RunConfig(ranks=3, precision="fp32", prune="off"))
    stats = stats_of(counts, 100_000, Reuse(own, others))
    plan = plan_run(config, shape, stats, STRATEGIES["broadcast"])
    row, edge = 64, 8 if weighted else 4
    for rank in plan.ranks:
        items = program_items(plan, rank, rank.evaluate)
        products = [item for item in items if isinstance(item, Work) and item.kind == "sparse"]
        nnz = stats.tiles.nnz[rank.rank]
        stages = [rank.rank, *(stage for stage in range(3) if stage != rank.rank)]
        wide = [work for work in products if work.row_bytes == row]
        assert len(wide) % 3 == 0 < len(wide)
        for work, stage in zip(wide, stages * (len(wide) // 3), strict=True):
            shares = own if stage == rank.rank else others
            assert work.rows == nnz[stage]
            assert work.streamed == nnz[stage] * edge + counts[rank.rank] * (8 + 2 * row)
            assert work.footprint == min(counts[stage], nnz[stage]) * row
            assert work.reuse == tuple((bound * row, share) for bound, share in zip(BOUNDS, shares, strict=False))


def test_panels_of_set_up_fit_the_largest_rank() -> None:
    """Fails if set-up of the rank with most rows takes more than its epochs do, though narrower panels would not."""
    model = ModelConfig(hidden=(16,))
    for counts in ((100, 9900), (9900, 100), (3000, 7000)):
        shape = dataclasses.replace(SHAPE, num_features=512)
        stats = stats_of(counts, 100_000, Reuse((), ()))
        config = Config(model=model, run=RunConfig(ranks=2))
        plan = plan_run(config, shape, stats, STRATEGIES["broadcast"])
        largest = max(plan.ranks, key=lambda rank: rank.sizes.owned)
        assert largest.setup is not None
        epochs = max(largest.train.arena.nbytes, largest.evaluate.arena.nbytes)
        assert largest.setup.arena.nbytes <= epochs, counts
