"""Predicted seconds of lists of work and messages whose answer can be worked out by hand."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

import pytest

from mggcn.aggregate.steps import Await, Send
from mggcn.cost.analysis import aggregation_work, analyse_15d, work_lines
from mggcn.cost.epoch import mean_cost, predict
from mggcn.cost.machine import (
    MESSAGES,
    DeviceRates,
    Link,
    Machine,
    MessageKind,
    RateTable,
    Topology,
    find_machine,
)
from mggcn.cost.work import Item, Sum, Work, work_seconds
from mggcn.errors import ConfigError, PlanError

FLAT = DeviceRates(
    kind="cuda",
    count=8,
    shared=False,
    cores=1,
    memory_bytes=10**9,
    copy=RateTable(((1.0, 100.0),)),
    gather=RateTable(((1000.0, 50.0), (1_000_000.0, 5.0))),
    row_s=0.5,
    call_s=0.25,
    gemm={"fp32": 10.0},
)
"""Rates in bytes and FLOP a second that make round numbers."""
RATES: Mapping[MessageKind, float] = {"broadcast": 10.0, "all_to_all": 20.0, "all_reduce": 40.0}
LINK = Link(transport="nccl", ranks=2, rates=RATES, latency_s=dict.fromkeys(MESSAGES, 1.0), pooled=False, busy=0.0)
MACHINE = Machine(name="paper", title="a machine on paper", origin="assumed", device=FLAT, links=(LINK,))
HOST = dataclasses.replace(MACHINE, device=dataclasses.replace(FLAT, count=1, shared=True, cores=2))


def busy(share: float) -> Machine:
    return dataclasses.replace(MACHINE, links=(dataclasses.replace(LINK, busy=share),))


def compute(seconds: float) -> Work:
    """Work of a dense product that takes so many seconds."""
    return Work(kind="dense", flop=round(10 * seconds), calls=0)


def broadcast(root: int, me: int, nbytes: int, ranks: int = 2) -> Send:
    return Send("broadcast", nbytes * (ranks - 1) if root == me else 0, 0 if root == me else nbytes, root)


def test_work_of_one_rank() -> None:
    """Fails if gathering, streaming, computing or calling is charged at another rate, or moving adds to computing."""
    gathered = Work(kind="sparse", rows=4, row_bytes=100, footprint=1000)
    assert work_seconds(gathered, FLAT, 1) == (pytest.approx(4 * (100 / 50 + 0.5)), 0.25)
    far = dataclasses.replace(gathered, footprint=1_000_000)
    assert work_seconds(far, FLAT, 1)[0] == pytest.approx(4 * (100 / 5 + 0.5))
    streamed = Work(kind="elementwise", streamed=300, calls=3)
    assert work_seconds(streamed, FLAT, 1) == (pytest.approx(3.0), 0.75)
    assert work_seconds(Work(kind="dense", streamed=300, flop=20), FLAT, 1)[0] == pytest.approx(3.0)
    assert work_seconds(Work(kind="dense", streamed=300, flop=50), FLAT, 1)[0] == pytest.approx(5.0)
    assert work_seconds(Work(kind="elementwise", streamed=300, flop=50), FLAT, 1)[0] == pytest.approx(5.0)
    # A pass in double on a machine whose file has products in single alone is not refused.
    assert work_seconds(Work(kind="elementwise", streamed=300, flop=50, precision="fp64"), FLAT, 1)[0] == pytest.approx(
        3.0
    )
    slow = dataclasses.replace(FLAT, least_s=1.5)
    assert work_seconds(streamed, slow, 1) == (pytest.approx(4.5), 0.75)
    assert work_seconds(dataclasses.replace(streamed, streamed=500), slow, 1)[0] == pytest.approx(5.0)
    with pytest.raises(PlanError, match="dense products in fp32, none in bf16"):
        work_seconds(Work(kind="dense", flop=1, precision="bf16"), FLAT, 1)


def test_ranks_of_a_host_share_rates_and_cache() -> None:
    """Fails if P ranks of one host each get all of it, or their operands together find as much cache as one."""
    gathered = Work(kind="sparse", rows=4, row_bytes=100, footprint=1000, calls=0)
    # Three footprints of 1000 bytes are 3000, where the rate has fallen by 45 log 3 / log 1000; a third of it is ours.
    rate = RateTable(FLAT.gather.points).at(3000)
    assert rate < 50
    assert work_seconds(gathered, HOST.device, 3)[0] == pytest.approx(4 * (100 * 3 / rate + 3 * 0.5))
    assert work_seconds(Work(kind="elementwise", streamed=300), HOST.device, 2) == (pytest.approx(6.0), 0.25)
    assert work_seconds(Work(kind="dense", flop=20, calls=1), HOST.device, 4) == (pytest.approx(8.0), 0.5)
    lists = [[compute(6.0)] for _ in range(3)]
    assert predict(MACHINE, "nccl", lists).seconds == pytest.approx(6.0)
    assert predict(HOST, "nccl", lists).seconds == pytest.approx(18.0)
    with pytest.raises(ConfigError, match="got 9 ranks"):
        predict(MACHINE, "nccl", [[]] * 9)


@pytest.mark.parametrize(
    ("works", "total"),
    [
        # Two cores: 6 seconds of the whole device are 12 on one core, whether one or two ranks compute.
        ((6.0, 0.0, 0.0, 0.0), 12.0),
        ((6.0, 2.0, 0.0, 0.0), 12.0),
        ((6.0, 6.0, 6.0, 0.0), 18.0),
        ((6.0, 6.0, 6.0, 6.0), 24.0),
        # Three share until 6 seconds, when one has done 2; the others have 4 left, on a core each.
        ((6.0, 6.0, 2.0, 0.0), 6.0 + 8.0),
        ((6.0, 0.0), 12.0),
        ((6.0, 6.0), 12.0),
    ],
)
def test_ranks_that_wait_leave_their_part_to_others(works: Sequence[float], total: float) -> None:
    """Fails if more ranks than cores keep a core idle while one of them waits, or a rank computes on two."""
    cost = predict(HOST, "nccl", [[compute(work)] for work in works])
    assert cost.seconds == pytest.approx(total)
    waiting = [[compute(work), Sum(0)] for work in works]
    assert predict(HOST, "nccl", waiting).seconds == pytest.approx(total + 1.0)


@pytest.mark.parametrize(("between", "total"), [(0.0, 3.0), (1.0, 3.0), (2.0, 3.0), (3.0, 3.0), (5.0, 5.0)])
def test_a_message_hides_behind_what_lies_between(between: float, total: float) -> None:
    """Fails if a message of 3 seconds is not hidden by the work between its start and its end, and by no more."""
    lists = [[broadcast(0, me, 20), compute(between), Await(0)] for me in range(2)]
    cost = predict(MACHINE, "nccl", lists)
    assert cost.seconds == pytest.approx(total)
    assert cost.parts["messages"] == pytest.approx(total - between)
    assert cost.parts["dense"] == pytest.approx(between)
    assert cost.link_s == pytest.approx(2.0)


def test_a_message_starts_when_the_last_rank_has_come() -> None:
    """Fails if a rank that is late does not delay the others."""
    lists = [[compute(4.0 * me), broadcast(0, me, 20), Await(0)] for me in range(3)]
    cost = predict(MACHINE, "nccl", lists)
    assert cost.seconds == pytest.approx(8.0 + 3.0)
    assert [parts["messages"] for parts in cost.ranks] == pytest.approx([11.0, 7.0, 3.0])
    assert cost.critical == 2


def test_messages_follow_each_other_on_the_link() -> None:
    """Fails if the bytes of two messages are carried at once or out of order, or their latencies add up."""
    lists = [[broadcast(0, me, 20), broadcast(1, me, 40), Await(0), compute(1.0), Await(1)] for me in range(2)]
    assert predict(MACHINE, "nccl", lists).seconds == pytest.approx(2.0 + 4.0 + 1.0)
    late = [[broadcast(0, me, 20), compute(9.0), broadcast(1, me, 40), Await(0), Await(1)] for me in range(2)]
    assert predict(MACHINE, "nccl", late).seconds == pytest.approx(9.0 + 5.0)


def test_two_slots_are_faster_than_one() -> None:
    """Fails if the staged broadcast with two slots in flight is not predicted to beat one that waits for each stage."""

    def staged(me: int, ahead: int) -> list[Item]:
        items: list[Item] = [broadcast(j, me, 20, 4) for j in range(ahead)]
        for j in range(4):
            items += [Await(j), compute(2.0)]
            if j + ahead < 4:
                items.append(broadcast(j + ahead, me, 20, 4))
        return items

    one, two = (predict(MACHINE, "nccl", [staged(me, ahead) for me in range(4)]).seconds for ahead in (1, 2))
    assert one == pytest.approx(4 * (3.0 + 2.0))
    # Blocks arrive after 3, 5, 8, 10 seconds: a slot is free again two seconds after its block has come.
    assert two == pytest.approx(12.0)


def test_all_to_all_and_sums() -> None:
    """Fails if an all-to-all is not as long as its busiest rank, or a sum not as long as a ring takes."""
    sizes = ((60, 20), (20, 60))
    lists: list[list[Item]] = [[Send("all_to_all", *pair), Await(0), Sum(80)] for pair in sizes]
    cost = predict(MACHINE, "nccl", lists)
    # The ring sends 2 (P - 1) / P = 1 time the buffer.
    assert cost.seconds == pytest.approx(1 + 60 / 20 + 1 + 80 / 40)
    assert cost.parts["sums"] == pytest.approx(1 + 80 / 40)
    late: list[list[Item]] = [[compute(5.0 * me), Sum(80)] for me in range(2)]
    waiting = predict(MACHINE, "nccl", late)
    assert [parts["sums"] for parts in waiting.ranks] == pytest.approx([3.0, 3.0])
    assert [parts["messages"] for parts in waiting.ranks] == pytest.approx([5.0, 0.0])


@pytest.mark.parametrize(("share", "total"), [(0.0, 5.0), (0.5, 6.5), (1.0, 8.0)])
def test_what_a_message_takes_from_computing(share: float, total: float) -> None:
    """Fails if messages that need the cores overlap with computing as if they did not."""
    lists = [[broadcast(0, me, 20), compute(5.0), Await(0)] for me in range(2)]
    assert predict(busy(share), "nccl", lists).seconds == pytest.approx(total)


def test_messages_that_nobody_waits_for() -> None:
    """Fails if a message awaited in a later epoch delays this one, costs the cores nothing, or outruns the link."""
    lists = [[broadcast(0, me, 20), compute(5.0)] for me in range(2)]
    assert predict(MACHINE, "nccl", lists).seconds == pytest.approx(5.0)
    assert predict(busy(0.5), "nccl", lists).seconds == pytest.approx(5.0 + 1.5)
    many = [[*(broadcast(0, me, 20) for _ in range(4)), compute(5.0)] for me in range(2)]
    assert predict(MACHINE, "nccl", many).seconds == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[Sum(8)], []], "do not list the same messages"),
        ([[Send("all_to_all", 1, 1)], []], "do not list the same messages"),
        ([[broadcast(0, 0, 8), Await(0)], [broadcast(1, 1, 8), Await(0)]], "disagree about message 0"),
        ([[Sum(8)], [Sum(16)]], "disagree about message 0"),
        ([[Sum(8)], [Send("all_to_all", 1, 1), Await(0)]], "disagree about message 0"),
        ([[Await(0)], [Await(0)]], "waits for message 0, but has started only 0"),
    ],
)
def test_lists_that_cannot_be_run(lists: Sequence[Sequence[Item]], message: str) -> None:
    """Fails if ranks whose messages do not match are given a time, or hang the prediction."""
    with pytest.raises(PlanError, match=message):
        predict(MACHINE, "nccl", lists)


def test_one_rank_and_averages() -> None:
    """Fails if a rank alone waits for something, or epochs that differ are not averaged."""
    short, long = (predict(MACHINE, "single", [[compute(seconds)]]) for seconds in (2.0, 4.0))
    assert (short.seconds, short.link_s) == (pytest.approx(2.0), 0.0)
    mean = mean_cost([short, long])
    assert (mean.seconds, mean.parts["dense"]) == (pytest.approx(3.0), pytest.approx(3.0))


def test_15d_of_the_papers_machines() -> None:
    """Fails if the ratios of MG-GCN 5.1 do not follow from the links in the machines' files."""
    for name, ratio in (("dgx-1", 1.5), ("dgx-a100", 0.75)):
        found = analyse_15d(find_machine(name), 8)
        assert not isinstance(found, str)
        assert found.time_ratio == pytest.approx(ratio, abs=1e-12)
        assert found.replication == 2
        # 3 + 2 blocks of N d / P instead of 7.
        assert found.sent_ratio == pytest.approx(5 / 7)


def test_15d_follows_links_and_ranks() -> None:
    """Fails if the ratio is a constant rather than the formula: 2 / c rounds and a reduction over the links given."""
    machine = dataclasses.replace(MACHINE, topology=Topology(8, 2, 4, 1))
    found = analyse_15d(machine, 16)
    assert not isinstance(found, str)
    assert found.time_ratio == pytest.approx(8 * (1 / (2 * 4) + 2 / (16 * 1)))
    assert "multiple of 4 ranks, got 6" in str(analyse_15d(machine, 6))
    assert "has no [topology]" in str(analyse_15d(MACHINE, 8))


def test_distgnns_work_counts() -> None:
    """Fails if Table 8 of DistGNN is not met: ogbn-products on one socket and on 16."""
    products = (2_449_029, 123_718_280, (100, 256, 256))
    one = aggregation_work(*products)
    assert one.degree == 51.5
    assert [round(hop / 1e9, 2) for hop in one.hops] == [12.61, 32.29, 32.29]
    assert round(one.total / 1e9, 2) == 77.19
    sixteen = aggregation_work(*products, ranks=16, replication=3.897)
    assert sixteen.vertices == pytest.approx(596_499, abs=10)
    assert [round(hop / 1e9, 2) for hop in sixteen.hops] == [3.07, 7.86, 7.86]
    assert round(sixteen.total / 1e9, 2) == 18.80
    assert "18.80 billion operations on each of 16 ranks" in work_lines(sixteen, 16)[0]
    assert aggregation_work(10, 0, (3,)).total == 30


def calls_of(ranks: int) -> int:
    """Calls of functions, built-in ones among them, that a prediction of one broadcast from each of its ranks makes."""
    lists: list[list[Item]] = []
    # The last rank is the slowest: all others have posted a message when it does.
    for me in range(ranks):
        items: list[Item] = []
        for root in range(ranks):
            items += [broadcast(root, me, 8, ranks), compute(1 + me), Await(root)]
        lists.append(items)
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        predict(dataclasses.replace(HOST, links=(dataclasses.replace(LINK, ranks=ranks),)), "nccl", lists)
    finally:
        sys.setprofile(before)
    return found


def test_the_work_of_a_prediction_grows_as_its_messages() -> None:
    """Fails if all ranks are looked at whenever one goes on: a plan of 200 ranks would then take minutes."""
    few, many = calls_of(24), calls_of(96)
    # P ranks take part in each of P messages: 16 times as many, and the logarithm of the queues.
    assert few > 24 * 24
    assert many < 1.2 * 16 * few
