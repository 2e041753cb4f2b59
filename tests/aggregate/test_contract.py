"""What every aggregation strategy promises: the product with A^T and its adjoint, with the bytes and slots it planned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mggcn.aggregate.base import BuildContext
from mggcn.aggregate.broadcast import BroadcastPlan
from mggcn.aggregate.edge_op import Target
from mggcn.aggregate.steps import bytes_sent, num_messages, num_products
from mggcn.assemble.plan import STRATEGIES, partition_graph
from mggcn.backend.base import Epilogue, KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cuda.backend import CudaBackend
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.partition.make import stats_of
from mggcn.partition.rows.partition import row_owners, row_stats
from mggcn.partition.rows.required import count_required
from mggcn.partition.rows.shard import ShardOptions, build_shard
from tests.backend.cases import GUARD
from tests.devices import CPU, WHERE, Where
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr

COLS = 11


@dataclass
class Result:
    ids: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    sent: list[tuple[int, int]]
    """Bytes and messages, forwards and backwards."""
    planned: list[tuple[int, int]]


def graph_of(kind: str, n: int) -> Graph:
    weighted = kind == "weighted"
    return make_graph(pattern(kind, n, 12), num_features=2, num_classes=2, weighted=weighted, seed=3)


def backend_of(where: Where, comm: Communicator) -> KernelBackend:
    """The kernels of one rank in float64."""
    if where.device == "cpu":
        return CpuBackend(torch.float64, 1)
    config = Config(run=RunConfig(ranks=comm.size, device="cuda", transport="threads" if comm.size > 1 else "single"))
    return CudaBackend(torch.float64, where.device_of(config, comm), 1 << 20)


def buffer(backend: KernelBackend, rows: int, cols: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A planned buffer on the device, with guards, and the whole of it."""
    ld = -(-cols // 8) * 8
    whole = backend.upload(np.full(64 + rows * ld + 64, GUARD))
    view = whole[64 : 64 + rows * ld]
    view.fill_(fill)
    return view.as_strided((rows, cols), (ld, 1)), whole


def aggregate(
    name: str,
    graph: Graph,
    ranks: int,
    order: str,
    h: np.ndarray,
    g: np.ndarray,
    bias: np.ndarray,
    where: Where = CPU,
    slot_cols: int = 0,
    first: int = 0,
    source_cols: int = 0,
    required: np.ndarray | None = None,
    planned_for: str = "",
) -> list[Result]:
    """forward(h) + bias and backward(g) on every rank, in float64.

    slot_cols: width that the buffers are planned for, if wider. first: place of the result's columns in a wider tensor.
    source_cols: width of the tensor that h and g are columns of, if not that of the buffers.
    required: the rows that are computed, if not all.
    planned_for: run.device of the plan, if not the one that runs it.
    """
    cols = h.shape[1]
    slot_cols = slot_cols or cols
    device = planned_for or where.device
    run = RunConfig(ranks=ranks, order=order, strategy=name, device=device)  # type: ignore[arg-type]
    config = Config(run=run, train=TrainConfig(seed=8))
    strategy = STRATEGIES[name]
    partition = partition_graph(config, graph)
    stats, symmetric = stats_of(graph, partition, self_loops=True), graph.symmetric
    if required is not None:
        level = count_required(graph, row_owners(partition), required, self_loops=True, threads=1)
        stats, symmetric = dataclasses.replace(row_stats(stats), required=(level,)).only(0), False
    options = ShardOptions(aggregates=True, norm="mean", self_loops=True, dtype="f8", threads=1)

    def body(inner: Communicator) -> Result:
        torch.set_num_threads(1)
        comm, backend = CountingCommunicator(inner), backend_of(where, inner)
        comm.use_stream(backend.comm_stream)
        shard = build_shard(graph, partition, inner.rank, options)
        plan = strategy.plan(config.run, stats, inner.rank, symmetric, True)
        context = BuildContext(
            graph=graph,
            partition=partition,
            rank=inner.rank,
            options=options,
            backend=backend,
            comm=comm,
            required=required,
        )
        aggregation = plan.build(context).training
        assert aggregation.exact
        assert plan.exact
        assert stats.counts[inner.rank] == shard.rows
        aggregation.begin_epoch(0)
        specs = plan.buffers("op", slot_cols, "fp64")
        assert plan.state("op", slot_cols, "fp64") == ()
        slots, guards = [], []
        for spec in specs:
            slot, whole = buffer(backend, spec.rows, spec.cols, GUARD)
            slots.append(slot)
            guards.append(whole)
        outs, sent, messages, planned = [], [], [], []
        for backward, dense, epilogue in ((False, h, Epilogue(bias=backend.upload(bias))), (True, g, None)):
            source = buffer(backend, shard.rows, source_cols or slot_cols, 7.0)[0][:, :cols]
            source.copy_(torch.from_numpy(dense[shard.global_ids]))
            if backward and shard.owned is not None:
                source[torch.from_numpy(~shard.owned)] = 0.0  # copies hold parts of a sum
            wide, _ = buffer(backend, shard.rows, first + cols + (24 if first else 0), float("nan"))
            out = wide[:, first : first + cols]
            comm.bytes_sent = comm.messages = 0
            move = aggregation.backward if backward else aggregation.forward
            move(source, Target(out, epilogue), slots, 1)
            steps = plan.steps(cols, "fp64", backward)
            sent.append(comm.bytes_sent)
            messages.append(comm.messages)
            planned.append((bytes_sent(steps), num_messages(steps)))
            outs.append(out.cpu().numpy().copy())
            # Up to 64 bytes from the first column are the result's padding.
            beside = (wide[:, :first], wide[:, first + -(-cols // 8) * 8 :]) if first else ()
            assert all(bool(columns.isnan().all()) for columns in beside)
        inner.barrier()
        for spec, whole in zip(specs, guards, strict=True):
            assert (whole[:64] == GUARD).all()
            assert (whole[64 + spec.rows * spec.ld :] == GUARD).all()
        assert aggregation.state() == {}
        aggregation.load_state({})
        return Result(shard.global_ids, *outs, list(zip(sent, messages, strict=True)), planned)

    return run_threads(ranks, body, 60) if ranks > 1 else [body(SingleCommunicator())]


def summed(results: list[Result], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The forward result, which all copies of a row share, and the sum of the backward results over its copies."""
    cols = results[0].forward.shape[1]
    forward, backward = np.full((n, cols), np.nan), np.zeros((n, cols))
    for result in results:
        known = ~np.isnan(forward[result.ids])
        np.testing.assert_allclose(result.forward[known], forward[result.ids][known], rtol=1e-13, atol=1e-13)
        forward[result.ids] = result.forward
        backward[result.ids] += result.backward
    return forward, backward


def looped(graph: Graph) -> np.ndarray:
    """The adjacency, dense, with ones where it has no self-loop."""
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
    return adj


def drawn(seed: int, n: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands (N, D) of both directions, and a bias (D,)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, cols)), rng.normal(size=(n, cols)), rng.normal(size=cols)


def assert_dense(
    results: list[Result], adj: np.ndarray, h: np.ndarray, g: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare with the dense formula; return what `summed` does."""
    forward, backward = summed(results, h.shape[0])
    np.testing.assert_allclose(forward, adj.T @ h + bias, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(backward, adj @ g, rtol=1e-12, atol=1e-12)
    return forward, backward


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["random", "directed", "weighted", "hub-row", "empty", "disconnected"])
def test_aggregation_contract(where: Where, name: str, ranks: int, kind: str) -> None:
    """Fails if a neighbour is missing, backward is not the adjoint, or slots, bytes or messages differ from the plan."""
    for n, order in ((37, "random"), (37, "none"), (4, "permute")):
        graph = graph_of(kind, max(n, 5)) if n > 4 else graph_of("random" if kind == "directed" else kind, n)
        rng = np.random.default_rng(ranks)
        n = graph.num_vertices
        h, g, bias = rng.normal(size=(n, COLS)), rng.normal(size=(n, COLS)), rng.normal(size=COLS)
        adj = looped(graph)
        results = aggregate(name, graph, ranks, order, h, g, bias, where)
        forward, backward = summed(results, n)
        for result in results:
            assert result.sent == result.planned
        np.testing.assert_allclose(forward, adj.T @ h + bias, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(backward, adj @ g, rtol=1e-12, atol=1e-12)
        assert float(((forward - bias) * g).sum()) == pytest.approx(float((h * backward).sum()), rel=1e-12, abs=1e-10)


ROWS = [name for name, strategy in STRATEGIES.items() if strategy.kind == "rows"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_wanted_rows_alone(where: Where, name: str, ranks: int) -> None:
    """Fails if a row is computed that is not required, backward is not the adjoint, or bytes differ from the plan."""
    for kind, share in (("random", 0.3), ("weighted", 0.5), ("hub-row", 0.0)):
        graph = graph_of(kind, 37)
        rng = np.random.default_rng(ranks)
        required = rng.random(37) < share
        h, g, bias = rng.normal(size=(37, COLS)), rng.normal(size=(37, COLS)), rng.normal(size=COLS)
        adj = looped(graph)
        kept = adj * required
        results = aggregate(name, graph, ranks, "random", h, g, bias, where, required=required)
        forward, backward = summed(results, 37)
        assert all(result.sent == result.planned for result in results)
        np.testing.assert_allclose(forward, kept.T @ h + bias, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(forward[~required], np.tile(bias, ((~required).sum(), 1)))
        np.testing.assert_allclose(backward, kept @ g, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_more_ranks_than_vertices(where: Where, name: str) -> None:
    """Fails if a rank without rows skips a message, or its neighbours wait for rows that it does not have."""
    graph = graph_of("random", 4)
    h, g, bias = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(4, COLS), (4, COLS), (COLS,)]))
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, 1)
    results = aggregate(name, graph, 7, "random", h, g, bias, where)
    assert_dense(results, adj, h, g, bias)
    assert all(result.sent == result.planned for result in results)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_columns_of_wider_tensors(where: Where, name: str) -> None:
    """Fails if a width below the planned one, or a result between other columns, is read or written in another shape."""
    for ranks, cols, kind in ((1, 11, "random"), (2, 1, "directed"), (3, 5, "weighted"), (3, 11, "random")):
        graph = graph_of(kind, 37)
        h, g, bias = drawn(cols, 37, cols)
        adj = looped(graph)
        assert_dense(aggregate(name, graph, ranks, "random", h, g, bias, where, 29, 16), adj, h, g, bias)


@pytest.mark.parametrize("name", ["halo", "slice"])
def test_any_row_stride_is_read(name: str) -> None:
    """Fails if rows that lie apart in a wider tensor than planned for are taken for padded ones."""
    graph = graph_of("weighted", 37)
    h, g, bias = drawn(8, 37, 11)
    adj = looped(graph)
    assert_dense(aggregate(name, graph, 3, "random", h, g, bias, source_cols=50), adj, h, g, bias)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_bits_repeat(where: Where, name: str) -> None:
    """Fails if the order of the sums depends on which message or thread comes first."""
    graph = graph_of("weighted", 37)
    h, g, bias = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(37, COLS), (37, COLS), (COLS,)]))
    runs = [aggregate(name, graph, 3, "random", h, g, bias, where) for _ in range(3)]
    for one, *others in zip(*runs, strict=True):
        assert all(np.array_equal(one.forward, o.forward) and np.array_equal(one.backward, o.backward) for o in others)


def test_slots_are_as_large_as_the_largest_other_part() -> None:
    """Fails if a slot is too small for what arrives, or counts the rank's own rows."""

    def plan(rank: int, *counts: int) -> BroadcastPlan:
        return BroadcastPlan(rank, counts, (1,) * len(counts), (1,) * len(counts), True)

    for rank, rows in ((0, 9), (1, 9), (2, 7)):
        assert [b.rows for b in plan(rank, 7, 5, 9).buffers("x", 3, "fp32")] == [rows, rows]
        steps = plan(rank, 7, 5, 9).steps(3, "fp32", False)
        assert (num_products(steps), num_messages(steps)) == (3, 3)
    assert len(plan(0, 3, 4).buffers("x", 3, "fp32")) == 1
    assert plan(0, 3).buffers("x", 3, "fp32") == ()
    assert num_messages(plan(0, 3).steps(3, "fp32", False)) == 0
