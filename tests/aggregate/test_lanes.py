"""Every strategy on devices: no access of a buffer without an event that orders it. See tests/comm/races.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.aggregate.base import Site
from mggcn.assemble import STRATEGIES, partition_graph
from mggcn.backend.base import Epilogue
from mggcn.backend.events import DONE
from mggcn.comm.base import Communicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig
from mggcn.partition.make import figures_of
from mggcn.partition.shard import ShardOptions, build_shard
from tests.comm.races import Races
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr

GRAPH = make_graph(pattern("directed", 29, 12), num_features=2, num_classes=2, sparse=False, weighted=False, seed=3)
COLS = 8


class TorchBackend:
    """The kernels of a strategy as tensor operations, which the race detector sees."""

    def __init__(self, races: Races, guarded: bool) -> None:
        self._races = races
        self._guarded = guarded

    def record(self) -> Any:
        return self._races.record() if self._guarded else DONE

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def sparse(self, indptr: np.ndarray, indices: np.ndarray, values: np.ndarray | None) -> Any:
        rows = np.repeat(np.arange(indptr.shape[0] - 1), np.diff(indptr))
        columns = indices.astype(np.int64)
        return SimpleNamespace(nnz=len(indices), rows=torch.from_numpy(rows), indices=torch.from_numpy(columns))

    def spmm(self, adj: Any, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        product = torch.zeros_like(out).index_add_(0, adj.rows, h[adj.indices])
        out.add_(product) if accumulate else out.copy_(product)

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        out.copy_(z)

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        out.copy_(source[index.long()])

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        out[index.long()] = source

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        out.index_add_(0, index.long(), source)


def on_lanes(name: str, ranks: int, guarded: bool) -> tuple[list[tuple[np.ndarray, list[Tensor]]], Races]:
    """Forward twice and backward once, in the same buffers; ids and results of every rank."""
    config = Config(run=RunConfig(ranks=ranks, strategy=name))  # type: ignore[arg-type]
    strategy, partition, races = STRATEGIES[name], partition_graph(config, GRAPH), Races()
    figures = figures_of(GRAPH, partition, self_loops=True)
    options = ShardOptions(True, "mean", True, "main", 0, "f4", 1)

    def rank(comm: Communicator) -> tuple[np.ndarray, list[Tensor]]:
        torch.set_num_threads(1)
        shard = build_shard(GRAPH, partition, comm.rank, options)
        with races.rank(comm.rank) as lane:
            comm.use_lane(lane)
            backend: Any = TorchBackend(races, guarded)
            plan = strategy.plan(config.run, figures, comm.rank, GRAPH.symmetric, True)
            site = Site(GRAPH, partition, comm.rank, options, backend, comm, {})
            aggregation = strategy.build(plan, plan, site).training
            slots = [torch.zeros(spec.rows, spec.ld)[:, : spec.cols] for spec in plan.buffers("op", COLS, "fp32")]
            ids = torch.from_numpy(shard.global_ids)
            h, out, results = torch.zeros(shard.rows, 16)[:, :COLS], torch.zeros(shard.rows, COLS), []
            for turn, backward in enumerate((False, False, True)):
                h.copy_((ids + turn)[:, None] * torch.ones(COLS))
                if backward and shard.owned is not None:
                    h[torch.from_numpy(~shard.owned)] = 0.0
                (aggregation.backward if backward else aggregation.forward)(h, out, slots, 1, None)
                results.append(out.clone())
        return shard.global_ids, results

    return run_threads(ranks, rank, 30.0), races


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_access_is_ordered(name: str, ranks: int) -> None:
    """Fails if a message may overwrite rows that are still read, or a product starts before its rows are there."""
    results, races = on_lanes(name, ranks, guarded=True)
    assert races.found == []
    adj = dense_csr(GRAPH.adj)
    np.fill_diagonal(adj, 1.0)
    sums = np.zeros(29)
    for ids, (first, second, third) in results:
        np.testing.assert_array_equal(first.numpy(), np.tile((adj.T @ np.arange(29.0))[ids, None], COLS))
        np.testing.assert_array_equal(second.numpy(), np.tile((adj.T @ np.arange(1.0, 30.0))[ids, None], COLS))
        sums[ids] += third[:, 0].numpy()
    np.testing.assert_array_equal(sums, adj @ np.arange(2.0, 31.0))


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_its_events_it_races(name: str) -> None:
    """Fails if the events with which a strategy guards its buffers do not matter to the test above."""
    assert on_lanes(name, 4, guarded=False)[1].found
