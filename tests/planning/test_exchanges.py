"""What is priced of a step's exchanges: the bytes that ranks send, and seconds by the link's rate and delay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mggcn.aggregate.steps import Copy, Send, bytes_sent
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank
from mggcn.assemble.stack import read_rows
from mggcn.config import Config
from mggcn.cost.batches import LOOKED_S, ROW_S
from mggcn.cost.machine import find_machine
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.model.lower import aggregations
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import row_bytes_of
from mggcn.planning.batches import answer_plan, mean_stack
from mggcn.planning.exchanges import learned_exchanges, relay_cost, relays, rows_given
from mggcn.planning.op_cost import batch_cost, epoch_cost
from mggcn.planning.op_work import program_items
from mggcn.planning.run import RunPlan
from tests.aggregate.test_history import history
from tests.feed.test_blocks import MODELS, config_of, graph_of
from tests.feed.test_owner_rows import on_apart, owners_of, with_epochs
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_learned import learning, without_features


def counted(config: Config, graph: Graph) -> RunPlan:
    """The plan of a run with what its batches of a whole epoch read."""
    config = resolve(config, graph)
    plan, partition = plan_graph(config, graph)
    owner = row_owners(partition).owner_of(slice(None))
    read = read_rows(config, graph, plan.shape, owner, (config.sample.macro,), 99)
    assert read.drawn == plan.steps
    return dataclasses.replace(plan, read=read)


def sent(rank: Rank) -> int:
    """The bytes that a rank sends in an epoch."""
    before = rank.comm.bytes_sent
    rank.trainer.step(0)
    return rank.comm.bytes_sent - before


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("macro", "cache"), [(1, 0), (1, 8), (3, 0), (0, 0)])
def test_priced_relays_are_those_of_a_run(macro: int, cache: int, ranks: int) -> None:
    """Fails if a byte that a relay sends has no price, or one has that is not sent."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = with_epochs(sampled(ranks, MODELS["sage"], (3, 2), batch=9, plan="bound", ahead=2), 1)
    alone = sum(on_apart(config, graph, sent, clean=True))
    config = owners_of(config, macro=macro, cache_rows=cache)
    found, plan = sum(on_apart(config, graph, sent)), counted(config, graph)
    of = [send for relay in relays(plan) for exchange in relay for send in exchange]
    assert sum(send.sent for send in of) == found - alone > 0
    assert sum(send.received for send in of) == found - alone


@pytest.mark.parametrize("ranks", [2, 3])
def test_priced_learned_rows_are_those_of_a_run(ranks: int) -> None:
    """Fails if a message of learned rows has another size: all training vertices in one step, whose rows are counted."""
    graph = without_features(graph_of())
    config = with_epochs(learning(sampled(ranks, MODELS["gcn"], batch=1000, plan="bound")), 1)
    found, plan = on_ranks(config, graph, sent), counted(config, graph)
    assert plan.steps == 1
    for rank, nbytes in zip(plan.ranks, found, strict=True):
        exchanges = learned_exchanges(plan, rank)
        assert sum(send.sent for send in exchanges) == nbytes - rank.bytes_summed(rank.train)
        assert rank.learned is not None
        assert len(exchanges) == rank.learned.messages
        items = [item for item in program_items(plan, rank, rank.train) if isinstance(item, Send)]
        assert items[-len(exchanges) :] == list(exchanges)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("delay", [0, 1])
def test_priced_pushes_are_those_of_a_run(delay: int, ranks: int) -> None:
    """Fails if a step's push of rows to caches has no price, or another size."""
    graph = make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, seed=4)
    config = history(ranks, MODELS["gcn"], history_delay=delay, history_rows=5)
    found, (plan, _) = on_ranks(config, graph, sent), plan_graph(resolve(config, graph), graph)
    for rank, nbytes in zip(plan.ranks, found, strict=True):
        priced = sum(item.sent for item in program_items(plan, rank, rank.train) if isinstance(item, Send))
        assert plan.steps * (priced + rank.bytes_summed(rank.train)) == nbytes > 0


@pytest.mark.parametrize("name", ["halo", "delayed", "history"])
def test_rows_are_packed_before_a_message_and_spread_after_it(name: str) -> None:
    """Fails if what DistGNN and DistGNN-MB call pre- and post-processing of communication has no price: each row that is
    sent is gathered, each that comes is put in its place.
    """
    graph = make_graph(pattern("random", 61, 5), num_features=7, num_classes=4, seed=4)
    config = history(3, MODELS["gcn"]) if name == "history" else config_of(3, MODELS["gcn"])
    if name != "history":
        given: dict[str, Any] = {"strategy": name}
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, **given))
    plan, _ = plan_graph(resolve(config, graph), graph)
    for rank in plan.ranks:
        for op, kind in aggregations(rank.train.ops):
            steps = rank.training[kind.block].steps(op.cols, rank.sizes.operand, kind.backward, 0, kind.op)
            copies = [BufferSpec("", s.rows, s.width, rank.sizes.operand).nbytes for s in steps if isinstance(s, Copy)]
            came = sum(step.received for step in steps if isinstance(step, Send))
            # Rows of a halo come to where the product reads them.
            assert sum(copies) >= bytes_sent(steps) + (0 if name == "halo" else came)


def test_rows_that_labor_passes_over_are_priced_once_where_owners_draw() -> None:
    """Fails if a batch that is drawn again for its relay passes over its rows once, or owners pass over theirs twice."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config, machine = (
        sampled(2, MODELS["sage"], (3, 2), batch=9, plan="bound", draw="labor"),
        find_machine("xeon-cluster"),
    )
    for given, times in ((config, 1), (owners_of(config), 2), (parts_of(config), 1)):
        plan = counted(given, graph)
        assert plan.stack is not None
        dear, cheap = (
            batch_cost(dataclasses.replace(plan, stack=dataclasses.replace(plan.stack, looked=looked)), machine)
            for looked in (1000, 0)
        )
        assert dear is not None
        assert cheap is not None
        assert dear.alone_s - cheap.alone_s == pytest.approx(times * 1000 * LOOKED_S)


def test_a_plan_prices_relays_by_the_link() -> None:
    """Fails if a relay has other seconds than its bytes over the rate and a delay for each message, or hides none of them
    behind computing where ranks draw ahead.
    """
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = owners_of(sampled(2, MODELS["sage"], (3, 2), batch=9, plan="bound", ahead=2))
    plan, machine = counted(config, graph), find_machine("m5.24xlarge")
    link, cost = machine.link(2, "gloo"), relay_cost(plan, machine)
    assert cost is not None
    assert (cost.counted, cost.early, cost.batches, cost.a_step) == (True, True, 1, 1.0)
    most = [[max(max(s.sent, s.received) for s in exchange) for exchange in relay] for relay in relays(plan)]
    for number, seconds in enumerate(cost.exchanges):
        mean = sum(relay[number] for relay in most) / len(most)
        assert seconds == pytest.approx(mean / link.rates["all_to_all"])
    assert cost.latency_s == link.latency_s["all_to_all"]
    slow = dataclasses.replace(machine, links=(dataclasses.replace(link, rates=dict.fromkeys(link.rates, 1.0)),))
    assert epoch_cost(plan, slow).step_s > epoch_cost(plan, machine).step_s
    waits = relay_cost(counted(owners_of(config, ahead=0), graph), machine)
    assert waits is not None
    assert waits.waiting_s(1.0) >= sum(waits.exchanges) + 3 * waits.latency_s
    assert cost.waiting_s(1.0) == cost.served_s < cost.messages_s


def test_what_is_not_counted_is_expected() -> None:
    """Fails if a plan without drawn batches has no price for rows of others, or one beyond what a relay may fetch."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = resolve(owners_of(sampled(3, MODELS["sage"], (3, 2), batch=9, plan="bound"), macro=0), graph)
    plan, _ = plan_graph(config, graph)
    (relay,) = relays(plan)
    assert plan.stack is not None
    for rank, rows in zip(plan.ranks, relay[2], strict=True):
        assert 0 < rows.received <= row_bytes_of(config, 5) * (90 - rank.sizes.owned)
    single = plan_graph(resolve(sampled(3, MODELS["sage"], (3, 2), batch=9), graph), graph)[0]
    machine = find_machine("xeon-cluster")
    assert relay_cost(single, machine) is None
    fetched, read = batch_cost(plan, machine), batch_cost(single, machine)
    assert fetched is not None
    assert read is not None
    assert fetched.sample_s > read.sample_s  # batches are drawn once more


def parts_of(config: Config, **more: Any) -> Config:
    return dataclasses.replace(config, sample=dataclasses.replace(config.sample, rows="parts", **more))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("macro", "cache"), [(1, 0), (1, 8), (2, 0), (3, 0), (0, 0)])
def test_priced_letters_are_those_of_a_run(macro: int, cache: int, ahead: int, ranks: int) -> None:
    """Fails if a byte of letters or of what announces them has no price; tests/feed/test_waves.py has those of a run."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = parts_of(sampled(ranks, MODELS["sage"], (3, 2), batch=9, plan="bound", ahead=ahead), macro=macro)
    plan, machine = counted(parts_of(config, cache_rows=cache), graph), find_machine("xeon-cluster")
    link = dataclasses.replace(machine.link(ranks, "gloo"), pooled=True)  # whose seconds are those of all ranks' bytes
    cost = relay_cost(plan, dataclasses.replace(machine, links=(link,)))
    assert cost is not None
    assert plan.read is not None
    size = macro or plan.steps
    nbytes = plan.read.letter_bytes(size, row_bytes_of(config, 5), answer_plan(config, plan.shape))
    relays_counted = -(-plan.steps // size)
    assert relays_counted * sum(cost.exchanges) * link.rates["all_to_all"] == pytest.approx(nbytes)
    # Letters are announced, sent, and answered, six of them: all share a message a step, or wait for each other.
    messages = {1: 1, 2: 2, 3: 2, 0: min(plan.steps, 12)}[macro] if ahead else 12
    if macro or not ahead:
        assert len(cost.exchanges) == messages
    assert (cost.counted, cost.edges, cost.early) == (True, True, ahead > 0)
    assert cost.a_step == relays_counted / plan.steps


@pytest.mark.parametrize("ahead", [0, 2])
def test_letters_cost_what_a_hand_count_says(ahead: int) -> None:
    """Fails if a plan without drawn batches has another price than the letters of two ranks that own half of all: 10 GB/s
    and 50 microseconds a message, of which a step has one, or, if nothing is made beside it, two for each of six letters.
    """
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = resolve(parts_of(sampled(2, MODELS["gcn"], (3, 2), batch=9, plan="bound", ahead=ahead)), graph)
    plan, machine = plan_graph(config, graph)[0], find_machine("xeon-cluster")
    assert plan.stack is not None
    hops = mean_stack(plan.stack).capacities
    nbytes = 6 * 8  # announcements
    for hop in hops:
        targets, edges = hop.targets // 2, hop.edges // 2
        nbytes += 8 * math.ceil((4 + 4 * targets) / 8)
        nbytes += 8 * (2 * math.ceil(4 * targets / 8) + math.ceil(4 * edges / 8))  # counts, degrees, ids
    rows = min(hops[0].sources // 2, 90 - max(rank.sizes.owned for rank in plan.ranks))
    nbytes += 8 * (7 + math.ceil((4 + 4 * rows) / 8)) + 8 * rows * 5
    cost = relay_cost(plan, machine)
    assert cost is not None
    assert not cost.counted
    assert cost.messages_s == pytest.approx(nbytes / 10e9 + (1 if ahead else 12) * 50e-6)
    assert cost.waiting_s(1.0) == (0.0 if ahead else pytest.approx(cost.messages_s))
    # Where messages are late, a step takes the longer of computing and one of them, or waits for all.
    link = machine.link(2, "gloo")
    late = dataclasses.replace(link, latency_s=dict.fromkeys(link.latency_s, 0.2))
    slow = epoch_cost(plan, dataclasses.replace(machine, links=(late,)))
    assert slow.batch is not None
    waiting_s = slow.batch.waiting_s(0.01 + 2 * 0.2)  # with two sums, which are late, too
    assert waiting_s < 0.2 if ahead else waiting_s > 12 * 0.2


def test_owners_gather_for_others_beside_a_step() -> None:
    """Fails if rows that are gathered for others, or edges that are read a second time, cost nothing."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    single, machine = sampled(3, MODELS["sage"], (3, 2), batch=9, plan="bound"), find_machine("xeon-cluster")
    parts = counted(parts_of(single), graph)
    here, there = batch_cost(counted(single, graph), machine), batch_cost(parts, machine)
    assert here is not None
    assert there is not None
    assert parts.read is not None
    assert rows_given(parts) == parts.read.num_fetched(1) // (3 * parts.steps) > 0
    assert there.alone_s > here.alone_s + rows_given(parts) * ROW_S
