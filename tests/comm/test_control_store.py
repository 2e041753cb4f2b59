from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from mggcn.comm.calls import Call
from mggcn.comm.control_store import ControlStore
from mggcn.errors import CommError
from tests.comm.worlds import in_threads


class LostStore:
    """A store whose host has gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def boards(size: int, timeout_s: float = 10.0) -> list[ControlStore]:
    store = dist.HashStore()
    return [ControlStore(store, rank, size, timeout_s) for rank in range(size)]


def test_exchange_gives_every_rank_all_texts() -> None:
    """Fails if bytes are taken for text, or ranks are confused."""
    made = boards(3)
    texts = [bytes([0, 255, rank]) * rank for rank in range(3)]
    for got in in_threads(3, lambda rank: made[rank].exchange("topic", texts[rank], "")):
        assert got == texts


def test_first_reason_counts_on_all_ranks() -> None:
    """Fails if two ranks that fail at once blame different things."""
    one, two = boards(2)
    one.abort("disk full")
    two.abort("lost rank 0")
    one.abort("again")
    for control in (one, two):
        with pytest.raises(CommError, match=r"^disk full$"):
            control.check()


def test_check_asks_nobody_and_look_does() -> None:
    """Fails if `check` could block in the store, or if `look` does not learn of another rank's failure."""
    one, two = boards(2)
    one.abort("disk full")
    two.check()
    two.look()
    assert two.failure == "disk full"
    with pytest.raises(CommError):
        two.check()


def test_waiting_rank_learns_of_an_abort() -> None:
    """Fails if a rank waits out its time limit although another one has given up."""
    one, two = boards(2, 30.0)

    def rank(number: int) -> float:
        if number == 1:
            time.sleep(0.1)
            two.abort("disk full")
            return 0.0
        started = time.monotonic()
        with pytest.raises(CommError, match="disk full"):
            one.exchange("topic", b"", "for nothing")
        return time.monotonic() - started

    assert max(in_threads(2, rank)) < 3


def test_time_out_names_who_is_missing_and_what_for() -> None:
    """Fails if it is not said for whom a rank waited in vain."""
    control = boards(3, 0.1)[0]
    with pytest.raises(CommError, match=r"^rank 0 waited 0\.1 s for ranks 1, 2 to close$"):
        control.leave()


def test_lost_store_is_an_abort() -> None:
    """Fails if torch's exception gets through, or kills a rank that only looks."""
    control = ControlStore(LostStore(), 1, 2, 1.0)  # type: ignore[arg-type]
    assert "lost the host of the store (Broken pipe)" in control.suspects(3)
    control.look()
    with pytest.raises(CommError, match="rank 1 lost the host of the store: Broken pipe"):
        control.check()
    other = ControlStore(LostStore(), 0, 2, 1.0)  # type: ignore[arg-type]
    other.abort("disk full")
    with pytest.raises(CommError, match="disk full"):
        other.check()


def test_roll_call_spares_who_waits_as_well() -> None:
    """Fails if a rank that is in the same call is suspected, or one in another is not."""
    made = boards(3)
    for control, calls in zip(made, (2, 2, 1), strict=True):
        for _ in range(calls):
            control.begin(Call(op="barrier"))

    def rank(number: int) -> str:
        if number == 0:
            return made[0].suspects(2)
        give_up_at = time.monotonic() + 1.2
        while time.monotonic() < give_up_at:
            made[number].look()
            time.sleep(0.01)
        return ""

    assert in_threads(3, rank)[0] == "for rank 2"
