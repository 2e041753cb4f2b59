"""What every aggregation strategy promises: the product with A^T and its adjoint, with the bytes and slots it planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mggcn.aggregate.broadcast import Broadcast, BroadcastPlan
from mggcn.backend.base import Epilogue, KernelBackend
from mggcn.backend.cpu import CpuBackend
from mggcn.backend.cuda import CudaBackend
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig
from mggcn.graph.csr import Graph
from mggcn.partition.order import assign
from mggcn.partition.shard import ShardOptions, build_shard
from mggcn.train.inputs import upload_tiles
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
    bytes_sent: list[int]
    messages: int
    planned_bytes: int
    planned_messages: int


def graph_of(kind: str, n: int) -> Graph:
    weighted = kind == "weighted"
    return make_graph(pattern(kind, n, 12), num_features=2, num_classes=2, sparse=False, weighted=weighted, seed=3)


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
    graph: Graph, ranks: int, order: str, h: np.ndarray, g: np.ndarray, bias: np.ndarray, where: Where = CPU
) -> list[Result]:
    """forward(h) + bias and backward(g) on every rank, in float64."""
    owners = assign(graph.num_vertices, ranks, order, 8)
    options = ShardOptions(True, "mean", True, "main", 0, "f8", 1)

    def body(inner: Communicator) -> Result:
        torch.set_num_threads(1)
        comm, backend = CountingCommunicator(inner), backend_of(where, inner)
        comm.use_lane(backend.lane)
        shard = build_shard(graph, owners, inner.rank, options)
        plan = BroadcastPlan(inner.rank, owners.counts)
        strategy = Broadcast(plan, *upload_tiles(backend, shard), comm, backend)
        assert strategy.exact
        strategy.begin_epoch(0)
        specs = plan.buffers("op", COLS, "fp64")
        slots, guards = [], []
        for spec in specs:
            assert spec.ld == 16
            slot, whole = buffer(backend, spec.rows, spec.cols, GUARD)
            slots.append(slot)
            guards.append(whole)
        outs, sent = [], []
        for move, dense, epilogue in (
            (strategy.forward, h, Epilogue(bias=backend.upload(bias))),
            (strategy.backward, g, None),
        ):
            source, _ = buffer(backend, shard.rows, COLS, 7.0)
            source.copy_(torch.from_numpy(dense[shard.global_ids]))
            out, _ = buffer(backend, shard.rows, COLS, float("nan"))
            comm.bytes_sent = comm.messages = 0
            move(source, out, slots, 1, epilogue)
            sent.append(comm.bytes_sent)
            outs.append(out.cpu().numpy().copy())
        inner.barrier()
        for spec, whole in zip(specs, guards, strict=True):
            assert (whole[:64] == GUARD).all()
            assert (whole[64 + spec.rows * 16 :] == GUARD).all()
        rows = type(specs[0])("h", shard.rows, COLS, "fp64") if specs else None
        planned = plan.bytes_sent(rows) if rows else 0
        assert strategy.state() == {}
        strategy.load_state({})
        return Result(shard.global_ids, *outs, sent, comm.messages, planned, plan.messages)

    return run_threads(ranks, body, 60) if ranks > 1 else [body(SingleCommunicator())]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["random", "directed", "weighted", "hub-row", "empty", "disconnected"])
def test_aggregation_contract(where: Where, ranks: int, kind: str) -> None:
    """Fails if a neighbour is missing, backward is not the adjoint, or slots, bytes or messages differ from the plan."""
    for n, order in ((37, "random"), (37, "none"), (4, "permute")):
        graph = graph_of(kind, max(n, 5)) if n > 4 else graph_of("random" if kind == "directed" else kind, n)
        rng = np.random.default_rng(ranks)
        n = graph.num_vertices
        h, g, bias = rng.normal(size=(n, COLS)), rng.normal(size=(n, COLS)), rng.normal(size=COLS)
        adj = dense_csr(graph.adj)
        np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
        results = aggregate(graph, ranks, order, h, g, bias, where)
        forward, backward = np.full((n, COLS), np.nan), np.full((n, COLS), np.nan)
        for result in results:
            forward[result.ids], backward[result.ids] = result.forward, result.backward
            assert result.bytes_sent == [result.planned_bytes] * 2
            assert result.messages == result.planned_messages
        np.testing.assert_allclose(forward, adj.T @ h + bias, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(backward, adj @ g, rtol=1e-12, atol=1e-12)
        assert float(((forward - bias) * g).sum()) == pytest.approx(float((h * backward).sum()), rel=1e-12, abs=1e-10)


@pytest.mark.parametrize("where", WHERE)
def test_more_ranks_than_vertices(where: Where) -> None:
    """Fails if a rank without rows skips a message, or its neighbours wait for rows that it does not have."""
    graph = graph_of("random", 4)
    h, g, bias = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(4, COLS), (4, COLS), (COLS,)]))
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, 1)
    for result in aggregate(graph, 7, "random", h, g, bias, where):
        np.testing.assert_allclose(result.forward, (adj.T @ h + bias)[result.ids], rtol=1e-12)
        np.testing.assert_allclose(result.backward, (adj @ g)[result.ids], rtol=1e-12)
        assert result.bytes_sent == [result.planned_bytes] * 2


@pytest.mark.parametrize("where", WHERE)
def test_bits_repeat(where: Where) -> None:
    """Fails if the order of the sums depends on which message or thread comes first."""
    graph = graph_of("weighted", 37)
    h, g, bias = (np.random.default_rng(i).normal(size=s) for i, s in enumerate([(37, COLS), (37, COLS), (COLS,)]))
    runs = [aggregate(graph, 3, "random", h, g, bias, where) for _ in range(3)]
    for one, *others in zip(*runs, strict=True):
        assert all(np.array_equal(one.forward, o.forward) and np.array_equal(one.backward, o.backward) for o in others)


def test_slots_are_as_large_as_the_largest_other_part() -> None:
    """Fails if a slot is too small for what arrives, or counts the rank's own rows."""
    for rank, rows in ((0, 9), (1, 9), (2, 7)):
        plan = BroadcastPlan(rank, (7, 5, 9))
        assert [b.rows for b in plan.buffers("x", 3, "fp32")] == [rows, rows]
        assert (plan.num_spmm, plan.messages) == (3, 3)
    assert len(BroadcastPlan(0, (3, 4)).buffers("x", 3, "fp32")) == 1
    assert BroadcastPlan(0, (3,)).buffers("x", 3, "fp32") == ()
    assert BroadcastPlan(0, (3,)).messages == 0
