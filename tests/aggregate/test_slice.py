"""How feature slices deal columns and share two buffers. Their sums are held by test_contract.py."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mggcn.aggregate.base import Matrix
from mggcn.aggregate.slice import SlicePlan, SliceStrategy
from mggcn.aggregate.slice_columns import LEAST_BYTES, UNIT_BYTES, ColumnPartition, parts
from mggcn.aggregate.steps import Await, Copy, Multiply, Send, Step, bytes_sent, num_messages
from mggcn.assemble.plan import plan_shape
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.threads import ThreadCommunicator
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.epoch import predict
from mggcn.cost.machine import MESSAGES, Link, Machine
from mggcn.cost.work import Item, Work
from mggcn.errors import GraphError
from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES
from mggcn.partition.rows.partition import RowStats
from mggcn.planning.text import render
from tests.aggregate.test_contract import aggregate, assert_dense, drawn, graph_of, looped
from tests.cost.test_epoch import FLAT
from tests.devices import WHERE, Where
from tests.reference import dense_csr
from tests.shapes import PRODUCTS


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_every_column_is_dealt_once(dtype: str) -> None:
    """Fails if a column is lost or comes twice, a slice is uneven by two units, or starts where no vector load may."""
    item = ITEM_BYTES[dtype]
    for cols, ranks in itertools.product((1, 2, 3, 4, 5, 11, 16, 41, 128, 130), (2, 3, 5, 8)):
        deal = ColumnPartition.of(cols, ranks, item)
        slices = deal.columns
        assert [column for part in slices for column in range(part.start, part.stop)] == list(range(cols))
        assert max(deal.units) - min(deal.units) <= 1
        assert sum(deal.units) == -(-cols * item // UNIT_BYTES)
        assert all(part.start * item % UNIT_BYTES == 0 for part in slices if part.stop > part.start)
        assert all(part.stop - part.start <= units * deal.unit for part, units in zip(slices, deal.units, strict=True))
        each = [((cols, sum(deal.units), n, c.stop - c.start),) for n, c in zip(deal.units, slices, strict=True)]
        assert [parts(cols, ranks, item, rank, halved=False) for rank in range(ranks)] == each


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_halves_are_two_parts_of_each_ranks_columns(dtype: str) -> None:
    """Fails if a column goes to another rank than in one piece, a half is too narrow on one, or wide rows stay whole."""
    item = ITEM_BYTES[dtype]
    for cols, ranks in itertools.product(range(1, 700), (2, 3, 5, 8)):
        deal = ColumnPartition.of(cols, ranks, item)
        halves = deal.halves()
        assert len(halves) == (2 if min(deal.units) >= 2 * LEAST_BYTES // UNIT_BYTES else 1)
        for rank, (units, columns) in enumerate(zip(deal.units, deal.columns, strict=True)):
            ends = [(half.columns[rank].start, half.columns[rank].stop) for half in halves]
            assert [ends[0][0], *(stop for _, stop in ends)] == [
                columns.start,
                *(start for start, _ in ends[1:]),
                columns.stop,
            ]
            assert sum(half.units[rank] for half in halves) == units
            assert len(halves) == 1 or min(half.units[rank] for half in halves) * UNIT_BYTES >= LEAST_BYTES
            widths = [sum(c.stop - c.start for c in half.columns) for half in halves]
            mine = [
                (sum(half.units), half.units[rank], stop - start)
                for half, (start, stop) in zip(halves, ends, strict=True)
            ]
            expected = tuple((width, *part) for width, part in zip(widths, mine, strict=True))
            assert parts(cols, ranks, item, rank, halved=True) == expected
        assert len(set(halves[0].units)) == 1 or len(halves) == 1


def test_a_narrower_width_fits_the_slots_of_a_wider_one() -> None:
    """Fails if the last panel of set-up, which is narrower than the others, needs more than was planned for them."""
    for ranks, item in itertools.product((2, 3, 5, 7), (2, 4, 8)):
        before = (0,) * ranks
        for cols in range(1, 200):
            units = ColumnPartition.of(cols, ranks, item).units
            assert all(a <= b for a, b in zip(before, units, strict=True))
            before = units
    for counts, rank in itertools.product(((7, 5, 6), (40, 1, 1), (0, 3, 30)), range(3)):
        plan, taken = SlicePlan(rank, counts, 100, True, overlaps=True), 0
        for cols in range(1, 500):
            (slot, _) = plan.buffers("x", cols, "fp32")
            assert slot.nbytes >= taken
            taken = slot.nbytes


def test_a_plan_by_hand() -> None:
    """Fails if the plan forgets that every rank holds the whole matrix, or a byte of what travels or is held."""
    plans = [SlicePlan(rank, (7, 5, 6), 100, True) for rank in range(3)]
    assert [plan.matrices for plan in plans] == [(Matrix(18, 100),)] * 3
    assert plans[0].matrices_t == ()
    assert SlicePlan(0, (7, 5, 6), 100, False).matrices_t == (Matrix(18, 100),)
    # 17 columns of float32 are 5 units: ranks have 2, 2 and 1 of them, and 8, 8 and 1 columns.
    for plan, rows, units, width in zip(plans, (7, 5, 6), (2, 2, 1), (8, 8, 1), strict=True):
        away, here = 16 * rows * (5 - units), 16 * (18 - rows) * units
        steps = (Copy(rows, 17), Send("all_to_all", away, here), Await(0), Multiply(18, 18, 100, width))
        assert plan.steps(17, "fp32", False) == (*steps, Send("all_to_all", here, away), Await(1), Copy(rows, 17))
        held = 16 * max(rows * (5 - units), 18 * units)
        assert [b.nbytes for b in plan.buffers("x", 17, "fp32")] == [-(-held // ALIGNMENT) * ALIGNMENT] * 2
        assert all(b.cols == b.ld for b in plan.buffers("x", 17, "fp32"))
    # One unit: only rank 0 multiplies.
    assert [any(isinstance(s, Multiply) for s in plan.steps(3, "fp32", True)) for plan in plans] == [True, False, False]
    alone = SlicePlan(0, (18,), 100, True)
    assert alone.steps(17, "fp32", False) == (Multiply(18, 18, 100, 17),)
    assert alone.buffers("x", 17, "fp32") == ()


def test_a_plan_of_halves_by_hand() -> None:
    """Fails if a half is awaited before the other one is on its way, or a byte, a message or a slot is not planned."""
    # 197 columns of float32 are 50 units: 8 of the first half on each of three ranks, then 9, 9 and 8 of the second.
    counts = (7, 5, 6)
    for rank, rows, more, width in zip(range(3), counts, (9, 9, 8), (36, 36, 29), strict=True):
        plan = SlicePlan(rank, counts, 100, True, overlaps=True)
        away = 16 * rows * 16, 16 * rows * (26 - more)
        here = 16 * (18 - rows) * 8, 16 * (18 - rows) * more
        assert plan.steps(197, "fp32", False) == (
            *(Copy(rows, 96), Send("all_to_all", away[0], here[0])),
            *(Copy(rows, 101), Send("all_to_all", away[1], here[1])),
            *(Await(0), Multiply(18, 18, 100, 32), Send("all_to_all", here[0], away[0])),
            *(Await(1), Multiply(18, 18, 100, width), Send("all_to_all", here[1], away[1])),
            *(Await(2), Copy(rows, 96), Await(3), Copy(rows, 101)),
        )
        whole = SlicePlan(rank, counts, 100, True)
        assert bytes_sent(plan.steps(197, "fp32", True)) == bytes_sent(whole.steps(197, "fp32", True))
        assert plan.buffers("x", 197, "fp32") == whole.buffers("x", 197, "fp32")
        assert plan.steps(188, "fp32", False) == whole.steps(188, "fp32", False)


def test_a_gpu_has_halves_and_a_cpu_has_not() -> None:
    """Fails if a CPU, whose cores move the messages, multiplies twice, or a GPU waits for messages that it could hide."""
    stats = RowStats.expected(1000, 5000, 2, self_loops=True)
    for device, messages in (("cpu", 2), ("cuda", 4)):
        plan = SliceStrategy().plan(RunConfig(ranks=2, device=device), stats, 0, True, True)  # type: ignore[arg-type]
        assert num_messages(plan.steps(128, "fp32", False)) == messages


@pytest.mark.parametrize(("wire", "product"), [(6.0, 2.0), (6.0, 6.0), (6.0, 30.0)])
def test_predicted_seconds_of_halves(wire: float, product: float) -> None:
    """Fails if the cost model hides more or less than the shorter of a product and one of its messages."""

    def seconds(*, overlaps: bool) -> float:
        plans = [SlicePlan(rank, (30, 30), 100, True, overlaps=overlaps) for rank in range(2)]
        nbytes = 16 * 30 * 16  # of 128 columns: all rows of the other rank's half
        device = dataclasses.replace(FLAT, gemm={"fp32": 1.0}, count=2)
        rates = dict.fromkeys(MESSAGES, nbytes / wire)
        link = Link(
            transport="nccl", ranks=2, rates=rates, latency_s=dict.fromkeys(MESSAGES, 0.0), pooled=False, busy=0.0
        )
        machine = Machine(name="paper", title="a machine on paper", origin="assumed", device=device, links=(link,))
        return predict(machine, "nccl", [list(items(plan.steps(128, "fp32", False))) for plan in plans]).seconds

    def items(steps: Sequence[Step]) -> Iterator[Item]:
        for step in steps:
            if isinstance(step, Multiply):
                yield Work(kind="dense", flop=round(step.width * product / 64), calls=0)
            elif isinstance(step, Send | Await):
                yield step

    assert seconds(overlaps=False) == pytest.approx(2 * wire + product)
    assert seconds(overlaps=True) == pytest.approx(wire + max(wire, product))


def test_a_plan_says_what_halves_do() -> None:
    """Fails if a printed plan counts the messages or products of whole rows where a GPU has halves."""
    shape = PRODUCTS
    texts = {}
    for device in ("cpu", "cuda"):
        run = RunConfig(ranks=8, strategy="slice", device=device)  # type: ignore[arg-type]
        texts[device] = render(plan_shape(Config(model=ModelConfig(hidden=(512, 512)), run=run), shape))
    # A X is kept: layer 2 aggregates at width 512, 256 bytes on each rank, layer 3 at 47, in both directions.
    (cpu, gpu) = (
        next(line.split() for line in text.splitlines() if line.startswith("  training ")) for text in texts.values()
    )
    assert cpu[1:5] == ["4", "SpMMs,", "10", "messages,"]
    assert gpu[1:5] == ["6", "SpMMs,", "14", "messages,"]
    assert cpu[5:] == gpu[5:]


def test_the_order_is_the_planned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank waits, multiplies or sends at another place than its plan says, and its cost is that of the plan."""
    log: dict[str, list[str]] = defaultdict(list)

    def note(what: str) -> None:
        log[threading.current_thread().name].append(what)

    send, multiply = ThreadCommunicator.all_to_all, CpuBackend.spmm

    def noted_send(self: ThreadCommunicator, *args: Any) -> Any:
        sends = log[threading.current_thread().name].count("send") % 4
        note("send")
        event = send(self, *args)
        return SimpleNamespace(wait=lambda: (note(f"await {sends}"), event.wait()))

    def noted_multiply(self: CpuBackend, *args: Any, **options: Any) -> None:
        note("multiply")
        multiply(self, *args, **options)

    monkeypatch.setattr(ThreadCommunicator, "all_to_all", noted_send)
    monkeypatch.setattr(CpuBackend, "spmm", noted_multiply)
    ones = np.ones((37, 100))
    aggregate("slice", graph_of("random", 37), 3, "random", ones, ones, ones[0], planned_for="cuda")
    steps = SlicePlan(0, (13, 12, 12), 100, True, overlaps=True).steps(100, "fp64", False)
    names = [
        f"await {step.message}" if isinstance(step, Await) else {Send: "send", Multiply: "multiply"}[type(step)]
        for step in steps
        if not isinstance(step, Copy)
    ]
    assert len(names) == 10
    assert dict(log) == {f"rank {rank}": 2 * names for rank in range(3)}


def test_more_nonzeros_than_a_matrix_may_have() -> None:
    """Fails if a matrix that cannot be addressed is planned, or more ranks are advised, which would not help."""
    stats = RowStats.expected(10**8, 3 * 10**9, 8, self_loops=True)
    with pytest.raises(GraphError, match=r"nonzeros exceed the limit .*; choose halo or broadcast"):
        SliceStrategy().plan(RunConfig(ranks=8), stats, 0, True, True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("ranks", "cols"), [(5, 1), (5, 2), (5, 3), (7, 11), (3, 6), (2, 17)])
def test_fewer_units_than_ranks(where: Where, ranks: int, cols: int) -> None:
    """Fails if a rank without columns skips a message or multiplies, or a last unit that is not full spoils a column."""
    graph = graph_of("directed", 23)
    h, g, bias = drawn(cols, 23, cols)
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, 1.0)
    results = aggregate("slice", graph, ranks, "permute", h, g, bias, where)
    assert_dense(results, adj, h, g, bias)
    assert all(result.sent == result.planned for result in results)


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_halves_compute_what_one_piece_does(where: Where, ranks: int, sample: Any) -> None:
    """Fails if a half is lost, its bias or its place is another's, backward is not the adjoint, or a bit is another."""
    cols = 32 * ranks + 3
    for kind, n in sample((("weighted", 37), ("directed", 23), ("empty", 9)), 2):
        graph = graph_of(kind, n)
        h, g, bias = drawn(n, n, cols)
        adj = looped(graph)
        halved, whole = (
            aggregate("slice", graph, ranks, "random", h, g, bias, where, slot_cols=cols + 5, planned_for=device)
            for device in ("cuda", "cpu")
        )
        forward, backward = assert_dense(halved, adj, h, g, bias)
        assert float(((forward - bias) * g).sum()) == pytest.approx(float((h * backward).sum()), rel=1e-12, abs=1e-10)
        for result, one in zip(halved, whole, strict=True):
            assert result.sent == result.planned
            assert result.sent == [(nbytes, 2 * messages) for nbytes, messages in one.sent]
            np.testing.assert_array_equal(result.forward, one.forward)
            np.testing.assert_array_equal(result.backward, one.backward)
