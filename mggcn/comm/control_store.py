"""Control messages of ranks that are processes, apart from the data: their calls, failures, arrivals and departures.

All of it goes through torch.distributed's store: a file for ranks of one machine, TCP under torchrun. Nothing here waits
inside the store, so a rank that waits always notices when another one fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NoReturn, final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, yet not in __all__
from torch.distributed.rendezvous import rendezvous

from mggcn.comm.calls import Call, name_ranks
from mggcn.comm.failure import out_of_memory
from mggcn.errors import CommError

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


@final
class ControlStore:
    """One rank's view; `store` is seen by exactly the ranks 0 .. size - 1.

    The rank's own thread uses it; any other may abort.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
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
        except RuntimeError as error:
            self.failure = self.failure or f"rank {self.rank} lost the host of the store: {error}"

    def suspects(self, number: int) -> str:
        """Call the roll after a time-out and say whom the ranks in call `number` wait for. Takes up to ROLL_CALL_S."""
        try:
            self._store.set(f"roll-{number}", "")
            self._store.set(f"present-{number}-{self.rank}", "")
            missing = await_keys(self._store, [f"present-{number}-{rank}" for rank in range(self.size)], ROLL_CALL_S)
        except RuntimeError as error:
            return f"and lost the host of the store ({error})"
        return f"for {name_ranks(missing)}" if missing else "with all other ranks"

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
                    self.fail(f"rank {self.rank} waited {self.timeout_s:g} s for {name_ranks(missing)} {purpose}")
            return [self._store.get(key) for key in keys]
        except RuntimeError as error:
            self.fail(f"rank {self.rank} lost the host of the store: {error}")

    def leave(self) -> None:
        """Return once every rank is about to close. One that waits in a call for this rank, by mistake, says so first."""
        self.exchange("left", b"", "to close", patience_s=LEAVE_S)


def meet(rank: int, size: int, init_method: str, timeout_s: float) -> tuple[Store, ControlStore]:
    """Join the other ranks at `init_method` (file://, tcp:// or env://); the store is torch's own, for a process group.

    Raises: CommError naming the ranks that did not come within `timeout_s`.
    """
    come = [f"come-{peer}" for peer in range(size)]
    try:
        root_store = next(iter(rendezvous(init_method, rank, size, timeout=timedelta(seconds=timeout_s))))[0]
        store = PrefixStore("mggcn", root_store)
        store.set(come[rank], "")
        missing = await_keys(store, come, timeout_s)
    except (RuntimeError, OSError, ValueError) as error:
        if out_of_memory(error):
            raise MemoryError(f"while the rank connected: {error}") from error
        raise CommError(f"rank {rank} of {size} could not connect through {init_method}: {error}") from error
    if missing:
        raise CommError(f"rank {rank} waited {timeout_s:g} s for {name_ranks(missing)} to start")
    return root_store, ControlStore(store, rank, size, timeout_s)


def loopback_interface() -> str:
    """The name of the loopback interface, which keeps messages on this machine."""
    return "lo" if sys.platform == "linux" else "lo0"


def await_keys(store: Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Return the indices of the keys that `store` still lacks after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    pause_s = FIRST_POLL_S
    while not store.check(list(keys)):
        if time.monotonic() >= give_up_at:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_POLL_S)
    return []
