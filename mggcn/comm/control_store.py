"""Control messages of ranks that are processes, apart from the data: their calls, failures, arrivals and departures.

All of it goes through torch.distributed's store: a file for ranks of one machine, TCP under torchrun. Nothing here waits
inside the store, so a rank that waits always notices when another one fails.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn, Protocol, TypeVar, final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, yet not in __all__
from torch.distributed.rendezvous import rendezvous

from mggcn.comm.calls import Call, name_ranks
from mggcn.comm.failure import out_of_memory
from mggcn.comm.network import address_towards
from mggcn.errors import CommError, one_line

T = TypeVar("T")

SLICE_S: Final = 0.25
"""A wait looks for signals and for the abort of another rank this often."""
ROLL_CALL_S: Final = 1.0
"""Seconds that a rank which timed out lets the others answer that they wait in the same call."""
CHECKED_CALLS: Final = 64
"""Number of a rank's calls that are compared with the other ranks' before they start; later calls repeat these."""
LEAVE_S: Final = 3.0
"""Seconds that a rank at its end waits for the others beyond the time in which they time out and call the roll."""
FIRST_POLL_S: Final = 0.0002
LAST_POLL_S: Final = 0.02


class KeyStore(Protocol):
    """What is used of torch.distributed's stores. Any call may raise RuntimeError: their host is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@final
class AnsweringStore:
    """A store on another machine, whose calls fail after `limit_s`: behind a cut cable they would last many minutes."""

    def __init__(self, store: KeyStore, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._silent = ""

    def set(self, key: str, value: str, /) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def _ask(self, function: Callable[[], T]) -> T:
        if not self._silent:
            asked = aside(function)
            if wait([asked], self._limit_s).done:
                return asked.result()
            # The thread still holds the store's lock: whoever asks again would wait for it.
            self._silent = f"it has not answered for {self._limit_s:g} s"
        raise RuntimeError(self._silent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """Where the ranks of a run are, by rank; nothing is known of ranks that met elsewhere than in `meet`."""

    hosts: Sequence[str] = ()
    addresses: Sequence[str] = ()
    """By which each reaches the host of the store; "" for loopback's."""
    store: str = ""
    """Name or address of the host of the store, "" for a file."""

    def name(self, ranks: Sequence[int]) -> str:
        """Return ranks in words, with their machines if there are several: `rank 3 on node-1`."""
        if len(set(self.hosts)) < 2:
            return name_ranks(ranks)
        return f"{name_ranks(ranks)} on {', '.join(dict.fromkeys(self.hosts[rank] for rank in ranks))}"

    def at(self, address: str) -> str:
        """Return the ranks with an address in words, "" if there are none, or all have that one."""
        ranks = [rank for rank, own in enumerate(self.addresses) if own and own == address]
        return self.name(ranks) if 0 < len(ranks) < len(self.addresses) else ""


@final
class ControlStore:
    """One rank's view; `store` is seen by exactly the ranks 0 .. size - 1.

    The rank's own thread uses it; any other may abort.
    """

    def __init__(self, store: KeyStore, rank: int, size: int, timeout_s: float, peers: Peers | None = None) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.peers: Peers = peers or Peers()
        self.number: int = 0
        """Calls that this rank has begun."""
        self.call: Call | None = None
        """The last of them."""
        self._store = store
        self.failure: str | None = None
        """The first reason for an abort that this rank has seen."""

    def check(self) -> None:
        """Raises: CommError if a rank is known to have failed. Does not touch the store."""
        if self.failure is not None:
            raise CommError(self.failure)

    def begin(self, call: Call, *, recorded: bool = False) -> None:
        """Count a call, but none that is only recorded: a rank's recording may end early. Raises: CommError as `check`."""
        self.check()
        self.number += not recorded
        self.call = call

    def abort(self, reason: str) -> None:
        """Tell all ranks to abort; they check every SLICE_S seconds. The first reason of any rank counts."""
        if self.failure is not None:
            return
        try:
            # compare_set writes only over nothing and returns what stands there: all ranks give the same reason.
            self.failure = self._store.compare_set("aborted", "", reason).decode()
        except RuntimeError:  # the host that holds the store is gone: the others lose it too
            self.failure = self.failure or reason

    def fail(self, reason: str) -> NoReturn:
        """Abort. Raises: CommError."""
        self.abort(reason)
        self.check()
        raise CommError(reason)

    def look(self, number: int | None = None) -> None:
        """Check whether another rank aborted; answer the roll call of a rank that timed out in call `number`."""
        number = self.number if number is None else number
        try:
            if self.failure is None and self._store.check(["aborted"]):
                self.failure = self._store.get("aborted").decode()
            elif self._store.check([f"roll-{number}"]):
                self._store.set(f"present-{number}-{self.rank}", "")
            elif self._store.check(["roll"]):  # of ranks in another call
                self._store.set(f"alive-{self.rank}", "")
        except RuntimeError as error:
            self.failure = self.failure or self._lost(error)

    def suspects(self, number: int) -> str:
        """Call the roll after a time-out and say whom the ranks in call `number` wait for: those that do not answer at all,
        or else those in other calls. Takes up to ROLL_CALL_S.
        """
        try:
            self._store.set(f"roll-{number}", "")
            self._store.set("roll", "")
            self._store.set(f"alive-{self.rank}", "")  # for another that calls the roll of its own call now
            self._store.set(f"present-{number}-{self.rank}", "")
            missing = await_keys(self._store, [f"present-{number}-{rank}" for rank in range(self.size)], ROLL_CALL_S)
            missing = [rank for rank in missing if not self._store.check([f"alive-{rank}"])] or missing
        except RuntimeError as error:
            return f"and lost {self._holder} ({_first_line(error)})"
        return f"for {self.peers.name(missing)}" if missing else "with all other ranks"

    def exchange(self, topic: str, text: bytes, purpose: str, patience_s: float = 0.0) -> list[bytes]:
        """Post `text` under a topic that is used once; return what every rank posted, in rank order.

        Raises: CommError if a rank fails or does not post within timeout_s (and patience_s, in which others may say what
        they wait for); it says that this one waited `purpose`.
        """
        self.look()
        self.check()
        keys = [f"{topic}-{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], text)  # type: ignore[arg-type]  # takes bytes, whatever its stub says
            give_up_at = time.monotonic() + self.timeout_s + patience_s
            while missing := await_keys(self._store, keys, min(SLICE_S, self.timeout_s)):
                self.look()
                self.check()
                if time.monotonic() > give_up_at:
                    names = self.peers.name(missing)
                    self.fail(f"rank {self.rank} waited {self.timeout_s:g} s for {names} {purpose}")
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:
            self.fail(self._lost(error))

    def leave(self) -> None:
        """Return once every rank is about to close. One that waits in a call for this rank, by mistake, says so first.

        Rank 0, whose process holds the store unless torchrun does, returns last: the others still read there.
        """
        self.exchange("left", b"", "to close", patience_s=LEAVE_S)
        with suppress(RuntimeError):
            if self.rank:
                self._store.set(f"gone-{self.rank}", "")
            else:
                await_keys(self._store, [f"gone-{rank}" for rank in range(1, self.size)], LEAVE_S)

    @property
    def _holder(self) -> str:
        return "the host of the store" + (f", {self.peers.store}" if self.peers.store else "")

    def _lost(self, error: RuntimeError) -> str:
        return f"rank {self.rank} lost {self._holder}: {_first_line(error)}"


def meet(rank: int, size: int, init_method: str, timeout_s: float, problem: str = "") -> tuple[Store, ControlStore]:
    """Join the other ranks at `init_method` (file://, tcp:// or env://); the store is torch's own, for a process group.

    problem: why this rank comes only to say that it cannot begin.
    Raises: CommError naming the ranks that did not come within `timeout_s`; alike on all ranks if one cannot begin.
    """
    host = os.environ.get("MASTER_ADDR", "") if init_method == "env://" else ""
    try:
        root: Any = next(iter(rendezvous(init_method, rank, size, timeout=timedelta(seconds=timeout_s))))[0]

        def within(prefix: str) -> KeyStore:
            store = PrefixStore(prefix, root)
            return store if init_method.startswith("file:") else AnsweringStore(store, timeout_s)

        token, words = agree(within("mggcn"), rank, size, timeout_s, host, problem)
    except (RuntimeError, OSError, ValueError) as error:
        if out_of_memory(error):
            raise MemoryError(f"while the rank connected: {error}") from error
        why = _first_line(error)
        raise CommError(f"rank {rank} of {size} could not connect through {host or init_method}: {why}") from error
    peers = Peers(hosts=[one["host"] for one in words], addresses=[one["address"] for one in words], store=host)
    control = ControlStore(within(f"mggcn-{token}"), rank, size, timeout_s, peers)
    if said := [
        f"{peers.name([peer])} cannot begin: {one['problem']}" for peer, one in enumerate(words) if one["problem"]
    ]:
        with suppress(CommError):
            control.leave()  # the process of rank 0 may hold the store, where the others still read this
        raise CommError(said[0])
    return PrefixStore(f"gloo-{token}", root), control


def agree(
    store: KeyStore, rank: int, size: int, timeout_s: float, host: str, problem: str = ""
) -> tuple[str, list[dict[str, str]]]:
    """Return a token that these ranks alone have, and what each says of itself.

    A launcher that starts ranks again may give them the store of those before, with all of its keys. So a rank believes
    only what answers its own words: rank 0 lists what each rank has said last, and once each has found in the list what it
    said itself, all take the token of that list.
    Raises: CommError naming the ranks that did not come.
    """
    address = address_towards(host) if host else ""
    mine = {"id": uuid.uuid4().hex, "host": platform.node(), "address": address, "problem": problem}
    come = [f"come-{peer}" for peer in range(size)]
    store.set(come[rank], json.dumps(mine))
    missing, token, words = [0], "", list[dict[str, str]]()
    for _ in _polls(timeout_s):
        if rank == 0 and store.check(come):
            now = [json.loads(store.get(key)) for key in come]
            if now != words:  # at first, and when a rank has written over what one before it had left
                token, words = uuid.uuid4().hex, now
                store.set("list", json.dumps([token, words]))
            if not (missing := [peer for peer in range(1, size) if not store.check([f"found-{token}-{peer}"])]):
                store.set(f"begin-{token}", "")
                return token, words
        if rank and store.check(["list"]):
            now_token, now = json.loads(store.get("list"))
            if now_token != token and len(now) == size and now[rank] == mine:
                token, words = now_token, now
                store.set(f"found-{token}-{rank}", "")
            if token and store.check([f"begin-{token}"]):
                return token, words
    missing = [peer for peer, key in enumerate(come) if not store.check([key])] or missing
    raise CommError(f"rank {rank} waited {timeout_s:g} s for {name_ranks(missing)} to start")


def aside(function: Callable[[], T]) -> Future[T]:
    """Call into a library that may never return, in a thread for which no end of the process waits."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return result


def await_keys(store: KeyStore, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Return the indices of the keys that `store` still lacks after `timeout_s`."""
    for _ in _polls(timeout_s):
        if not keys or store.check(list(keys)):
            return []
    return [index for index, key in enumerate(keys) if not store.check([key])]


def _polls(timeout_s: float) -> Iterator[None]:
    """Yield now, then again and again after pauses that grow, until the time is over."""
    give_up_at = time.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
    yield
    while time.monotonic() < give_up_at:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_POLL_S)
        yield


def _first_line(error: Exception) -> str:
    """Return an error of torch without the frames that it lists below its first line."""
    return one_line((str(error).splitlines() or [type(error).__name__])[0])
