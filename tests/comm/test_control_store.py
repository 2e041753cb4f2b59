from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from mggcn.comm.calls import Call
from mggcn.comm.control_store import AnsweringStore, ControlStore, Peers, agree
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


class SilentStore:
    """A store behind a cable that was cut after some calls: those that follow never return."""

    def __init__(self, calls: int) -> None:
        self._store, self._calls = dist.HashStore(), calls

    def __getattr__(self, name: str) -> Any:
        self._calls -= 1
        return getattr(self._store, name) if self._calls >= 0 else lambda *_: time.sleep(60)


def test_a_silent_store_is_lost_in_time() -> None:
    """Fails if a rank waits for TCP to give up, or waits again each time it asks."""
    store = AnsweringStore(SilentStore(2), 0.3)
    store.set("key", "text")
    assert store.get("key") == b"text"
    control = ControlStore(store, 1, 2, 0.3, Peers(store="node-0"))
    began = time.monotonic()
    control.look()
    with pytest.raises(CommError, match=r"^rank 1 lost the host of the store, node-0: it has not answered for 0\.3 s$"):
        control.check()
    assert "lost the host of the store, node-0 (it has not answered" in control.suspects(3)
    ControlStore(store, 1, 2, 0.3).abort("disk full")
    assert time.monotonic() - began < 0.6


def test_peers_are_named_with_their_machines() -> None:
    """Fails if who reads a message must guess which machine is meant, or one machine is named with every rank."""
    peers = Peers(hosts=["a", "a", "b", "c"], addresses=["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert peers.name([2]) == "rank 2 on b"
    assert peers.name([0, 1, 3]) == "ranks 0, 1, 3 on a, c"
    assert peers.at("10.0.0.1") == "ranks 0, 1 on a"
    assert peers.at("10.0.0.9") == peers.at("") == ""
    assert Peers(hosts=["a", "a"], addresses=["10.0.0.1"] * 2).name([1]) == "rank 1"
    assert Peers(hosts=["a", "a"], addresses=["10.0.0.1"] * 2).at("10.0.0.1") == ""
    assert Peers().name([1, 2]) == "ranks 1, 2"


@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_do_not_meet_those_of_an_attempt_before(late: int) -> None:
    """Fails if what an earlier attempt left in a store is taken for a rank of this one, whichever rank comes last."""
    store = dist.HashStore()
    before = in_threads(3, lambda rank: agree(store, rank, 3, 5.0, ""))  # type: ignore[arg-type]  # torch's stubs
    assert len({token for token, _ in before}) == 1

    def again(rank: int) -> tuple[str, float]:
        time.sleep(0.3 * (rank == late))
        came = time.monotonic()
        return agree(store, rank, 3, 5.0, "")[0], came  # type: ignore[arg-type]  # torch's stubs

    began = time.monotonic()
    found = in_threads(3, again)
    assert len({token for token, _ in found}) == 1
    assert found[0][0] != before[0][0]
    assert time.monotonic() - began >= 0.3
    with pytest.raises(CommError, match=r"^rank 0 waited 0\.2 s for ranks 1, 2 to start$"):
        agree(store, 0, 3, 0.2, "")  # type: ignore[arg-type]  # torch's stubs
