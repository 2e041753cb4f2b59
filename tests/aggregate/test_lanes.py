"""Every strategy on devices: no access of a buffer without an event that orders it. See tests/comm/races.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.aggregate.base import BuildContext
from mggcn.aggregate.edge_op import Target
from mggcn.assemble.plan import STRATEGIES, partition_graph
from mggcn.backend.base import Epilogue
from mggcn.backend.events import DONE, Event
from mggcn.comm.base import Communicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig
from mggcn.partition.make import stats_of
from mggcn.partition.rows.shard import ShardOptions, build_shard
from tests.comm.races import Races
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr

GRAPH = make_graph(pattern("directed", 29, 12), num_features=2, num_classes=2, seed=3)
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

    def sparse(self, indptr: np.ndarray, indices: np.ndarray, values: np.ndarray | None, like: Any = None) -> Any:
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


class Careless:
    """A rank's communicator, but for one message of each aggregation: it starts at once, or is not waited for."""

    def __init__(self, inner: Communicator, races: Races, message: int, lacks: str, messages: int) -> None:
        self._inner = inner
        self._races = races
        self._message = message
        self._lacks = lacks
        self._messages = messages
        self._number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        careless = self._number % self._messages == self._message
        self._number += 1
        start = DONE if careless and self._lacks == "start" else after
        arrival = self._inner.all_to_all(out, buf, out_rows, buf_rows, start)
        return Unordered(self._races, arrival) if careless and self._lacks == "wait" else arrival


class Unordered:
    """An event that the host waits for, and the rank's stream does not."""

    def __init__(self, races: Races, event: Event) -> None:
        self._races = races
        self._event = event

    def wait(self) -> None:
        stream = self._races.here.stream
        seen = dict(stream.clock)
        self._event.wait()
        stream.clock = seen


def on_lanes(
    name: str, ranks: int, guarded: bool, cols: int = COLS, careless: tuple[int, str, int] | None = None
) -> tuple[list[tuple[np.ndarray, list[Tensor]]], Races]:
    """Forward twice and backward once, in the same buffers; ids and results of every rank.

    careless: which message of an aggregation lacks what, and of how many.
    """
    config = Config(run=RunConfig(ranks=ranks, strategy=name, device="cuda"))  # type: ignore[arg-type]
    strategy, partition, races = STRATEGIES[name], partition_graph(config, GRAPH), Races()
    stats = stats_of(GRAPH, partition, self_loops=True)
    options = ShardOptions(aggregates=True, norm="mean", self_loops=True, dtype="f4", threads=1)

    def rank(inner: Communicator) -> tuple[np.ndarray, list[Tensor]]:
        comm: Any = Careless(inner, races, *careless) if careless else inner
        torch.set_num_threads(1)
        shard = build_shard(GRAPH, partition, comm.rank, options)
        with races.rank(comm.rank) as comm_stream:
            comm.use_stream(comm_stream)
            backend: Any = TorchBackend(races, guarded)
            plan = strategy.plan(config.run, stats, comm.rank, GRAPH.symmetric, True)
            context = BuildContext(
                graph=GRAPH, partition=partition, rank=comm.rank, options=options, backend=backend, comm=comm
            )
            aggregation = plan.build(context).training
            slots = [torch.zeros(spec.rows, spec.ld)[:, : spec.cols] for spec in plan.buffers("op", cols, "fp32")]
            ids = torch.from_numpy(shard.global_ids)
            h, out, results = torch.zeros(shard.rows, 2 * cols)[:, :cols], torch.zeros(shard.rows, cols), []
            for turn, backward in enumerate((False, False, True)):
                h.copy_((ids + turn)[:, None] * torch.ones(cols))
                if backward and shard.owned is not None:
                    h[torch.from_numpy(~shard.owned)] = 0.0
                (aggregation.backward if backward else aggregation.forward)(h, Target(out), slots, 1)
                results.append(out.clone())
        return shard.global_ids, results

    return run_threads(ranks, rank, 30.0), races


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_access_is_ordered(name: str, ranks: int) -> None:
    """Fails if a message may overwrite rows that are still read, or a product starts before its rows are there."""
    results, races = on_lanes(name, ranks, guarded=True)
    assert races.found == []
    check_sums(results, COLS)


def check_sums(results: list[tuple[np.ndarray, list[Tensor]]], cols: int) -> None:
    """Compare what `on_lanes` computed with dense products."""
    adj = dense_csr(GRAPH.adj)
    np.fill_diagonal(adj, 1.0)
    sums = np.zeros(29)
    for ids, (first, second, third) in results:
        np.testing.assert_array_equal(first.numpy(), np.tile((adj.T @ np.arange(29.0))[ids, None], cols))
        np.testing.assert_array_equal(second.numpy(), np.tile((adj.T @ np.arange(1.0, 30.0))[ids, None], cols))
        sums[ids] += third[:, 0].numpy()
    np.testing.assert_array_equal(sums, adj @ np.arange(2.0, 31.0))


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_its_events_it_races(name: str) -> None:
    """Fails if the events with which a strategy guards its buffers do not matter to the test above."""
    assert on_lanes(name, 4, guarded=False)[1].found


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_access_of_halves_is_ordered(ranks: int) -> None:
    """Fails if a half may overwrite what the other one sends, multiplies or unpacks, or what the last aggregation did."""
    results, races = on_lanes("slice", ranks, guarded=True, cols=64 * ranks + 4)
    assert races.found == []
    check_sums(results, 64 * ranks + 4)


@pytest.mark.parametrize("lacks", ["start", "wait"])
@pytest.mark.parametrize("message", range(4))
def test_halves_need_each_of_their_events(message: int, lacks: str) -> None:
    """Fails if the test above would let a message start too early, or its rows be used before the stream waited."""
    assert on_lanes("slice", 3, guarded=True, cols=196, careless=(message, lacks, 4))[1].found
