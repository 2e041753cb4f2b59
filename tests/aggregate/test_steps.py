"""The stages of a broadcast in one step, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mggcn.aggregate.steps import Await, Multiply, Send, Stages, Step, bytes_sent, num_messages, num_products

COUNTS = (7, 5, 9, 4, 6)
NNZ = (30, 20, 0, 11, 8)


def stages(rank: int, size: int) -> Stages:
    return Stages(rank, COUNTS[:size], NNZ[:size], 3, 64)


def counted(steps: Sequence[Step]) -> tuple[int, int, int]:
    return num_products(steps), num_messages(steps), bytes_sent(steps)


def test_stages_by_hand() -> None:
    """Fails if a rank multiplies its own tile again, or a block starts before its slot is free."""
    assert list(stages(1, 4).plain()) == [
        Await(0),
        Multiply(5, 7, 30, 3),
        Send("broadcast", 0, 9 * 64, 2),
        Await(1),
        Send("broadcast", 0, 4 * 64, 3),
        Await(2),
        Multiply(5, 9, 0, 3),
        Await(3),
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_stages_count_as_what_they_stand_for(size: int) -> None:
    """Fails if a plan's products, messages or bytes sent are not those of the steps one by one."""
    for rank in range(size):
        assert counted([stages(rank, size)]) == counted(list(stages(rank, size).plain()))
