"""Seconds of gathers by the distances of their reuse."""

from __future__ import annotations

import dataclasses

import pytest

from mggcn.aggregate.edge_op import Arithmetic
from mggcn.aggregate.steps import Stages
from mggcn.cost.machine import DeviceRates, RateTable
from mggcn.cost.work import Staged, Work, product, staged_seconds, work_seconds

DEVICE = DeviceRates(
    kind="cpu",
    count=1,
    shared=True,
    cores=2,
    memory_bytes=10**9,
    copy=RateTable(((1.0, 100.0),)),
    gather=RateTable(((1000.0, 80.0), (64_000.0, 5.0))),
    row_s=0.0,
    call_s=0.0,
    gemm={"fp32": 10.0},
)
FAR = 32_000


def seconds(reuse: tuple[tuple[int, float], ...], footprint: int = FAR, sharing: int = 1) -> float:
    return work_seconds(Work(kind="sparse", rows=10, row_bytes=100, footprint=footprint, reuse=reuse), DEVICE, sharing)[
        0
    ]


@pytest.mark.parametrize("sharing", [1, 2])
def test_equally_frequent_distances_are_a_random_order(sharing: int) -> None:
    """Fails if what the table was measured by, random columns, costs something else once its distances are known."""
    bounds = (500, 1000, 2000, 8000, FAR, 10 * FAR)
    below = (0, *bounds)
    even = tuple((b, max(0, min(b, FAR) - a) / FAR) for a, b in zip(below, bounds, strict=False))
    assert seconds(even, sharing=sharing) == pytest.approx(seconds((), sharing=sharing))
    assert seconds(()) == pytest.approx(10 * 100 / DEVICE.gather.at(FAR))


def test_near_gathers_are_served_by_the_cache() -> None:
    """Fails if short distances do not cost what a small operand does, or long ones less than a random order."""
    assert seconds(((1000, 1.0), (FAR, 0.0))) == pytest.approx(10 * 100 / 80.0)
    assert seconds(((1000, 0.0), (FAR, 1.0))) > seconds(())
    assert seconds(((1000, 0.7), (FAR, 0.3))) < seconds(())


def test_distances_beyond_a_small_operand() -> None:
    """Fails if shares that were found in larger tiles cost more than the whole of a smaller one."""
    near = 10 * 100 / 80.0
    assert seconds(((1000, 0.5), (FAR, 0.5)), footprint=800) == pytest.approx(near)


def test_calls_and_streams_stay_what_they_are() -> None:
    """Fails if reuse changes anything but the gathers."""
    plain = Work(kind="sparse", streamed=400, reuse=((1000, 1.0),))
    assert work_seconds(plain, DEVICE, 1) == work_seconds(dataclasses.replace(plain, reuse=()), DEVICE, 1)


def test_results_are_fetched_from_all_that_a_step_passes_over() -> None:
    """Fails if a small result is priced as if it lay in the cache since the last step, or what is read beside it is."""
    device = dataclasses.replace(DEVICE, copy=RateTable(((1000.0, 100.0), (2000.0, 10.0))))
    work = Work(kind="elementwise", streamed=400)
    assert work_seconds(work, device, 1)[0] == pytest.approx(400 / 100)
    assert work_seconds(dataclasses.replace(work, swept=300), device, 1)[0] == pytest.approx(400 / 100)
    assert work_seconds(dataclasses.replace(work, swept=2000), device, 1)[0] == pytest.approx(200 / 100 + 200 / 10)
    assert work_seconds(dataclasses.replace(work, swept=1000), device, 2)[0] == pytest.approx(400 / 100 + 400 / 10)


def test_dense_products_have_the_rate_of_their_shape_and_width() -> None:
    """Fails if a table counts for the other shape, for products that are fused or of a precision that it has not."""
    rows, sums = RateTable(((16.0, 20.0), (64.0, 40.0))), RateTable(((16.0, 5.0),))
    device = dataclasses.replace(DEVICE, gemm_rows={"fp32": rows}, gemm_sums={"fp32": sums}, fused={"fp32": 50.0})
    product = Work(kind="dense", flop=1000, shape="rows", width=32.0)
    assert work_seconds(product, device, 1)[0] == pytest.approx(1000 / 30)
    assert work_seconds(product, device, 2)[0] == pytest.approx(2000 / 30)
    assert work_seconds(dataclasses.replace(product, shape="sums"), device, 1)[0] == pytest.approx(1000 / 5)
    for plain in (dataclasses.replace(product, shape=""), product):
        assert work_seconds(plain, DEVICE, 1)[0] == pytest.approx(1000 / 10)
    assert work_seconds(dataclasses.replace(product, fused="rows"), device, 1)[0] == pytest.approx(1000 / 50)


def test_an_edge_takes_its_bytes_and_its_arithmetic() -> None:
    """Fails if one of both is left out, a kernel without figures takes time, or cores do not share what one computes."""
    edges = Work(kind="sparse", rows=10, row_bytes=100, footprint=FAR, along=Arithmetic("gat", 4, 64))
    moving = 10 * 100 / DEVICE.gather.at(FAR)
    assert work_seconds(edges, DEVICE, 1)[0] == pytest.approx(moving)
    device = dataclasses.replace(DEVICE, edge_s={"gat": (1.0, 2.0, 3.0)})
    assert work_seconds(edges, device, 1)[0] == pytest.approx(moving + 10 * (1 + 4 * 2 + 64 * 3) / 2)
    shared = 20 * 100 / DEVICE.gather.at(2 * FAR) + 20 * (1 + 4 * 2 + 64 * 3) / 2
    assert work_seconds(edges, device, 2)[0] == pytest.approx(shared)
    other = dataclasses.replace(edges, along=Arithmetic("maximum", 0, 64))
    assert work_seconds(other, device, 1)[0] == pytest.approx(moving)


def test_the_last_edges_of_rows_take_as_long_as_eight() -> None:
    """Fails if rows of few edges cost no more for each edge, columns count for places without an edge, or an edge for more
    than a group of its own.
    """
    device = dataclasses.replace(DEVICE, edge_s={"gat": (16.0, 0.0, 2.0)})
    bare = Work(kind="sparse", rows=80, row_bytes=100, footprint=FAR)

    def computing(results: int) -> float:
        edges = dataclasses.replace(bare, results=results, along=Arithmetic("gat", 1, 1, 8))
        return (
            work_seconds(edges, device, 1)[0] - work_seconds(dataclasses.replace(bare, results=results), device, 1)[0]
        )

    assert computing(0) == pytest.approx(80 * (16 + 2) / 2)
    assert computing(4) == pytest.approx((8 * (10 + 4 * 7 / 16) * 16 + 80 * 2) / 2)
    assert computing(40) == pytest.approx((8 * 40 * 16 + 80 * 2) / 2)
    assert computing(400) == pytest.approx((8 * 80 * 16 + 80 * 2) / 2)


@pytest.mark.parametrize("column_s", [0.01, 1000.0])
def test_some_kernels_compute_while_rows_come(column_s: float) -> None:
    """Fails if both times are added, or a row of which a part is read is read whole; nothing is known without figures."""
    along = Arithmetic("maximum_grad", 0, 64, read=0.5, beside=True)
    edges = Work(kind="sparse", rows=10, row_bytes=100, footprint=FAR, along=along)
    moving = 10 * 100 / DEVICE.gather.at(FAR)
    assert work_seconds(edges, DEVICE, 1)[0] == pytest.approx(moving)
    device = dataclasses.replace(DEVICE, edge_s={"maximum_grad": (0.0, 0.0, column_s)})
    assert work_seconds(edges, device, 1)[0] == pytest.approx(max(moving / 2, 10 * 64 * column_s / 2))


def test_a_pass_in_place_has_its_own_rate() -> None:
    """Fails if a pass over two matrices has it, or one in place pays for where others lie."""
    device = dataclasses.replace(DEVICE, in_place=RateTable(((1000.0, 200.0), (2000.0, 20.0))))
    assert work_seconds(Work(kind="elementwise", streamed=1000, in_place=True), device, 1)[0] == pytest.approx(5.0)
    assert work_seconds(Work(kind="elementwise", streamed=1000), device, 1)[0] == pytest.approx(10.0)
    assert work_seconds(Work(kind="elementwise", streamed=1000, in_place=True), DEVICE, 1)[0] == pytest.approx(10.0)
    swept = Work(kind="elementwise", streamed=1000, in_place=True, swept=9000)
    assert work_seconds(swept, device, 1)[0] == pytest.approx(5.0)


def test_a_variant_gathers_faster_and_streams_alike() -> None:
    """Fails if what a kernel gains is not of its gathers alone."""
    plain = Work(kind="sparse", rows=10, row_bytes=100, footprint=FAR, streamed=400)
    gathers = 10 * 100 / DEVICE.gather.at(FAR)
    assert work_seconds(plain, DEVICE, 1)[0] == pytest.approx(gathers + 4.0)
    assert work_seconds(dataclasses.replace(plain, gain=2.0), DEVICE, 1)[0] == pytest.approx(gathers / 2 + 4.0)


@pytest.mark.parametrize("sharing", [1, 4])
def test_an_op_begins_later_than_a_call(sharing: int) -> None:
    """Fails if an op's beginning counts for each of its calls, or for work that begins none, or in files that have none."""
    device = dataclasses.replace(DEVICE, call_s=0.5)
    work = Work(kind="elementwise", streamed=400, calls=3, begins=1)
    late = dataclasses.replace(device, op_s=2.0)
    crowd = max(1.0, sharing / device.cores)
    assert work_seconds(work, device, sharing)[1] == 3 * 0.5 * crowd
    assert work_seconds(work, late, sharing)[1] == (2.0 + 2 * 0.5) * crowd
    assert work_seconds(dataclasses.replace(work, begins=0), late, sharing)[1] == 3 * 0.5 * crowd
    assert work_seconds(dataclasses.replace(work, begins=3), late, sharing)[1] == 3 * 2.0 * crowd


def test_work_is_as_much_slower_as_the_machine_says() -> None:
    """Fails if the pace counts for calls, too, or not for whatever takes longest."""
    slow = dataclasses.replace(DEVICE, call_s=0.5, pace=1.5)
    gathers = Work(kind="sparse", rows=10, row_bytes=100, footprint=FAR, streamed=400)
    for work in (gathers, Work(kind="dense", flop=1000), Work(kind="elementwise", streamed=400)):
        plain = work_seconds(work, DEVICE, 1)[0]
        assert work_seconds(work, slow, 1) == (pytest.approx(1.5 * plain), 0.5)


def test_stages_have_the_pace_of_their_products() -> None:
    """Fails if the stages of a broadcast, whose seconds are worked out at once, are those of a machine without a pace."""
    slow = dataclasses.replace(DEVICE, pace=1.5)
    counts, nnz = (3, 4, 5), ((0, 7, 9), (6, 0, 8), (5, 4, 0))
    ranks = [Staged(stages=Stages(rank, counts, nnz[rank], 16, 64), first=0, edge=8) for rank in range(3)]
    found = staged_seconds(ranks, slow, 1)
    for stage in range(2):
        for rank in range(3):
            if stage != rank:
                work = product(counts[rank], counts[stage], nnz[rank][stage], 64, 8)
                assert found[stage, rank] == work_seconds(work, slow, 1)[0]
