"""Batches that are drawn ahead: beside the step, over the end of an epoch, and whatever runs between two of them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.rank import Rank
from mggcn.blocks.sampler import Sampler
from mggcn.feed.seeds import Seeds
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import on_ranks

SEED, EPOCHS = 8123, 4  # of config_of
WAIT_S = 10.0


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the sampler has drawn, in turn."""
    steps, draw = list[int](), Sampler.draw

    def noted(self: Sampler, slot: Any, seeds: Any, seed: int, step: int, *rest: Any) -> Any:
        steps.append(step)
        return draw(self, slot, seeds, seed, step, *rest)

    monkeypatch.setattr(Sampler, "draw", noted)
    return steps


def contents(batches: Iterator[Any]) -> list[Any]:
    """Rows, edges and features of batches, which the next ones overwrite."""
    return [
        [
            *(ids.copy() for ids in batch.rows.values()),
            *(array.copy() for edges in batch.edges.values() for array in (edges.indptr, edges.indices, edges.values)),
            batch.features.clone(),
        ]
        for batch in batches
    ]


def alike(one: list[Any], two: list[Any]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*two), strict=True)
    return len(one) == len(two) and all(bool((a == b).all()) for a, b in pairs)


def waits(steps: list[int], number: int) -> bool:
    """Whether a step is drawn without being asked for."""
    end = time.monotonic() + WAIT_S
    while number not in steps and time.monotonic() < end:
        time.sleep(0.005)
    return number in steps


@pytest.mark.parametrize("batch", [5, 1000])
def test_the_next_epoch_is_drawn_while_something_else_runs(batch: int, drawn: list[int]) -> None:
    """Fails if the first batches of an epoch are drawn once they are asked for, twice, behind the run's last epoch, or
    otherwise than in turn.
    """

    def body(rank: Rank) -> Any:
        feed, found, ahead = rank.feed, list[Any](), list[bool]()
        drawn.clear()
        for epoch in range(EPOCHS):
            found.append(contents(feed.epoch(SEED, epoch)))
            if epoch + 1 < EPOCHS:
                ahead.append(waits(drawn, (epoch + 1) * feed.num_steps))
        return found, ahead, sorted(drawn), feed.num_steps

    config = sampled(1, MODELS["gcn"], batch=batch, ahead=3, plan="bound")
    ((found, ahead, steps, count),) = on_ranks(config, graph_of(), body)
    assert all(ahead)
    assert steps == list(range(EPOCHS * count))
    config = sampled(1, MODELS["gcn"], batch=batch, ahead=0, plan="bound")
    ((expected, *_),) = on_ranks(config, graph_of(), body_in_turn)
    assert all(alike(one, two) for one, two in zip(found, expected, strict=True))


def body_in_turn(rank: Rank) -> Any:
    return [contents(rank.feed.epoch(SEED, epoch)) for epoch in range(EPOCHS)], None


def test_another_step_than_the_next_one_has_its_own_batch() -> None:
    """Fails if a run that continues within an epoch, goes back, has another seed or leaves a loop gets what was drawn ahead
    for another step.
    """

    def body(rank: Rank) -> Any:
        feed = rank.feed
        asked = [(SEED, 0, 2), (SEED, 1, 0), (SEED, 1, 1), (SEED + 1, 2, 0), (SEED, 0, 0)]
        found = []
        for seed, epoch, first in asked:
            left = feed.epoch(seed, epoch, first)
            next(left)
            if epoch == 1:
                left.close()  # type: ignore[attr-defined]  # a generator
            found.append(contents(feed.epoch(seed, epoch, first)))
        return found

    found, expected = (
        on_ranks(sampled(1, MODELS["sage"], batch=7, ahead=ahead), graph_of(), body)[0] for ahead in (2, 0)
    )
    assert all(alike(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_between_epochs_changes_no_step(ranks: int) -> None:
    """Fails if an evaluation or a comparison between two epochs reaches the batches that wait behind it."""

    def body(rank: Rank) -> list[float]:
        losses = []
        for epoch in range(3):
            losses.append(rank.trainer.step(epoch))
            rank.trainer.evaluate()
            rank.trainer.compare(epoch + 1)
        return losses

    settings: list[dict[str, Any]] = [{"ahead": 0}, {"ahead": 2}, {"ahead": 2, "compare_gradient": 1}]
    model = MODELS["sage"] | {"dropout": 0.4}
    found = [on_ranks(sampled(ranks, model, batch=9, **of), graph_of(), body)[0] for of in settings]
    assert found[0] == found[1] == found[2]
    assert np.isfinite(found[0]).all()


def test_an_interrupt_waits_for_what_is_being_drawn_alone(drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Ctrl-C waits for batches that no thread has begun, or leaves one that still writes into a place."""
    begun, draw = threading.Semaphore(0), Sampler.draw

    def slow(self: Sampler, *arguments: Any) -> Any:
        begun.release()
        time.sleep(0.05)
        return draw(self, *arguments)

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        assert all(begun.acquire(timeout=WAIT_S) for _ in range(2))
        raise KeyboardInterrupt

    def body(rank: Rank) -> tuple[list[int], list[Any]]:
        drawn.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Sampler, "draw", slow)
            patched.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(rank.feed.epoch(SEED, 0))
        return sorted(drawn), contents(rank.feed.epoch(SEED, 0))

    (found, batches), (_, expected) = (
        on_ranks(sampled(1, MODELS["gcn"], batch=7, ahead=ahead), graph_of(), of)[0]
        for ahead, of in ((2, body), (0, lambda rank: (None, contents(rank.feed.epoch(SEED, 0)))))
    )
    assert found == [0, 1]
    assert alike(batches, expected)


def test_threads_hold_one_order_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if threads that draw over the ends of short epochs hold an order each."""
    inside, most, of_step = list[int](), list[int](), Seeds.of_step

    def noted(self: Seeds, *arguments: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return of_step(self, *arguments)

    monkeypatch.setattr(Seeds, "of_step", noted)
    config = sampled(1, MODELS["gcn"], batch=1000, ahead=4)
    on_ranks(config, graph_of(), lambda rank: [contents(rank.feed.epoch(SEED, epoch)) for epoch in range(EPOCHS)])
    assert max(most) == 1
