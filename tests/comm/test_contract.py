"""One contract for every communicator: the cases are in cases.py, the ways to run them in worlds.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mggcn.comm.base import Communicator
from tests.comm import cases
from tests.comm.worlds import HANGING_S, World

PLAIN: tuple[Callable[[Communicator], None], ...] = (
    cases.broadcast_from_each_root,
    cases.several_in_flight,
    cases.buffers_are_free_after_wait,
    cases.uneven_all_to_all,
    cases.row_order_in_all_to_all,
    cases.empty_tensors,
    cases.starts_after_the_given_event,
    cases.refuses_what_no_transport_carries,
)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.__name__)
def test_contract(world: World, case: Callable[[Communicator], None]) -> None:
    """Each case asserts on each rank; see there for what makes it fail."""
    assert world.run(case) == [None] * world.size


def test_allocates_nothing_large(world: World) -> None:
    """Fails if a transport makes room of its own for a message."""
    assert world.run(cases.allocates_nothing_large) == [None] * world.size


def test_all_reduce_gives_every_rank_the_same_bits(world: World) -> None:
    """Fails on a wrong sum, or on an order of summation that differs between ranks."""
    bits = world.run(cases.all_reduce_sums)
    assert bits == [bits[0]] * world.size


def test_texts_of_all_ranks(world: World) -> None:
    """Fails if a text is cut, lost, taken for another rank's, or one without letters stops the others."""
    texts = [f"{'ä' * 300} of rank {rank}" if rank != 1 else "" for rank in range(world.size)]
    assert world.run(cases.gathered_texts) == [texts] * world.size


def test_barrier_holds_back_the_fast(world: World) -> None:
    """Fails if a rank leaves the barrier before the last has called it."""
    times = world.run(cases.barrier_times)
    assert max(called for called, _ in times) <= min(left for _, left in times)


@pytest.mark.parametrize("kind", cases.MISMATCHES)
def test_mismatch_names_ranks_and_wishes(world_of_many: World, kind: str) -> None:
    """Fails if a difference goes unnoticed, hangs, or does not reach every rank."""
    last = world_of_many.size - 1
    messages = world_of_many.run(cases.mismatch, kind, timeout_s=2 * HANGING_S)
    assert len(messages) == world_of_many.size
    for message in messages:
        assert "ranks disagree on call 1" in message
        assert f"rank {last}" in message
    wishes = {"size": "4 x float32", "dtype": "3 x float64", "root": "from rank 1", "operation": "all_reduce of 3"}
    if kind in wishes:
        assert any(f"rank {last} asked for" in message and wishes[kind] in message for message in messages)


def test_timeout_names_the_missing_rank(world_of_many: World, tmp_path: Path) -> None:
    """Fails if a rank waits for ever, too long or not long enough, or blames the wrong one."""
    timeout_s = 1.0
    answers = world_of_many.run(cases.last_rank_comes_too_late, tmp_path, timeout_s=timeout_s)
    last = world_of_many.size - 1
    for message, seconds in answers[:last]:
        assert "waited 1 s for rank" in message
        assert f"for rank {last} in call 1 (all_reduce of 5 x float32)" in message
        assert seconds < timeout_s + HANGING_S
    # Who began to wait later may hear of it sooner.
    assert max(seconds for _, seconds in answers[:last]) > 0.9 * timeout_s
    assert "waited 1 s" in answers[last][0]


@pytest.mark.parametrize("in_flight", [True, False])
def test_abort_wakes_everybody(failing_world: World, in_flight: bool) -> None:
    """Fails if a rank sleeps on, if the second reason replaces the first, or if abort blocks."""
    answers = failing_world.run(cases.last_rank_aborts, in_flight, timeout_s=2 * HANGING_S)
    assert [message for message, _ in answers] == ["disk full"] * failing_world.size
    assert max(seconds for _, seconds in answers) < HANGING_S
