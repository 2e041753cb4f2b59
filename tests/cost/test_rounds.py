"""Rounds of all ranks at once against one event after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mggcn.aggregate.steps import Await, Send
from mggcn.cost import simulation
from mggcn.cost.epoch import predict
from mggcn.cost.machine import Machine, find_machine
from mggcn.cost.rounds import Round, run_round
from mggcn.cost.work import Item, Work

MESSAGES = 12


def lists_of(ranks: int, spread: float, nbytes: int, seed: int) -> list[list[Item]]:
    """Messages, two under way at a time, with work between: about as much on all ranks, some times as much, or none."""
    rng = np.random.default_rng(seed)
    flop = rng.integers(10**8, 10**8 + int(spread * 10**8) + 1, (ranks, MESSAGES))
    idle = rng.random((ranks, MESSAGES)) < 0.1
    lists: list[list[Item]] = [[] for _ in range(ranks)]
    for rank, items in enumerate(lists):
        sends = [send(number % ranks, rank, nbytes, ranks) for number in range(MESSAGES)]
        items += sends[:2]
        for number in range(MESSAGES):
            items.append(Await(number))
            if not idle[rank, number]:
                items.append(Work(kind="dense", flop=int(flop[rank, number])))
            items += sends[number + 2 : number + 3]
    return lists


def send(root: int, me: int, nbytes: int, ranks: int) -> Send:
    return Send("broadcast", nbytes * (ranks - 1) if root == me else 0, 0 if root == me else nbytes, root)


def machine_of(name: str, busy: float) -> Machine:
    machine = find_machine(name)
    return dataclasses.replace(machine, links=tuple(dataclasses.replace(link, busy=busy) for link in machine.links))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every round that is tried, whether it was one."""
    found: list[bool] = []

    def counted(*arguments: Any) -> Round | None:
        result = run_round(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(simulation, "run_round", counted)
    return found


@pytest.mark.parametrize("name", ["xeon-cluster", "assumed-cpu"])
@pytest.mark.parametrize("busy", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("nbytes", [10**4, 10**9])
@pytest.mark.parametrize("spread", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("ranks", [2, 3, 17])
def test_rounds_give_what_events_give(
    name: str, busy: float, nbytes: int, spread: float, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the order of the sums, a rank without work, or who ends first among equals changes a single bit."""
    machine, lists = machine_of(name, busy), lists_of(ranks, spread, nbytes, seed=ranks)
    cost = predict(machine, "gloo", lists)
    monkeypatch.setattr(simulation, "run_round", lambda *_: None)
    assert predict(machine, "gloo", lists) == cost


def test_slow_messages_make_rounds_of_all_stages(rounds: list[bool]) -> None:
    """Fails if ranks that all wait for slow messages are run one by one: of a thousand, each has a thousand stages."""
    predict(machine_of("xeon-cluster", 0.0), "gloo", lists_of(17, 0.1, 10**9, seed=3))
    assert sum(rounds) >= MESSAGES - 2


def test_no_round_where_ranks_overtake(rounds: list[bool]) -> None:
    """Fails if a rank that has long begun its next work is taken to wait for the last one."""
    predict(machine_of("xeon-cluster", 0.0), "gloo", lists_of(17, 5.0, 10**4, seed=3))
    assert sum(rounds) < MESSAGES // 2
