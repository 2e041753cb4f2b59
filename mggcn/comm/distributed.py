"""Ranks as processes, over torch.distributed's gloo: asynchronous on the CPU, on one machine or several.

gloo ends the process, past any `except`, when ranks disagree about a size. A rank's calls repeat every epoch, so the
first `checked_calls` of them are compared before they start; a later disagreement ends the rank by SIGABRT.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, yet not in __all__
from torch.distributed.rendezvous import rendezvous

from mggcn.comm.base import DONE, Event
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call, disagreement, name_ranks
from mggcn.errors import CommError

SLICE_S: Final = 0.25
"""A wait looks for signals and for the abort of another rank this often."""
TRANSPORT_SLACK_S: Final = 30.0
"""gloo's own time limit comes this much after ours: a gloo that gives up closes its connections and explains little."""
CHECKED_CALLS: Final = 64
"""As many calls are compared before they start; each costs one more all_reduce of a few hundred bytes."""
ROLL_CALL_S: Final = 1.0
"""How long a rank that timed out lets the others answer that they wait in the same call."""


@final
class DistributedCommunicator:
    """One rank of a gloo process group; `store` is seen by exactly the ranks of `group`."""

    def __init__(
        self, group: dist.ProcessGroup, store: Store, timeout_s: float, checked_calls: int = CHECKED_CALLS
    ) -> None:
        self._group = group
        self._store = store
        self._timeout_s = timeout_s
        self._checked_calls = checked_calls
        self._rank = group.rank()
        self._size = group.size()
        self._number = 0
        self._failure: str | None = None
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._table = torch.zeros(self._size, 4 + 2 * self._size, dtype=torch.int64)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        call = broadcast_call(buf, root, self._size)
        self._begin(call, after)
        if call.count == 0:
            return DONE
        return self._event(call, dist.broadcast(buf, group=self._group, group_src=root, async_op=True))

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        call = all_reduce_call(buf)
        self._begin(call, after)
        if call.count == 0:
            return DONE
        return self._event(call, dist.all_reduce(buf, group=self._group, async_op=True))

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        call = all_to_all_call(out, buf, out_rows, buf_rows, self._size)
        self._begin(call, after)
        # Only the length of a row is common: a rank with no rows at all must still take part.
        if call.count == 0:
            return DONE
        work = dist.all_to_all_single(out, buf, list(out_rows), list(buf_rows), group=self._group, async_op=True)
        return self._event(call, work)

    def barrier(self) -> None:
        call = Call("barrier")
        self._begin(call, None)
        self._event(call, dist.all_reduce(self._flag, group=self._group, async_op=True)).wait()

    def abort(self, reason: str) -> None:
        """Tell the other ranks through the store; they look there every SLICE_S while they wait."""
        if self._failure is not None:
            return
        self._failure = reason
        try:
            self._store.set("aborted", reason)
        except RuntimeError:  # the host that holds the store is gone: the others lose their connections
            return

    def close(self) -> None:
        """Meet once more, then close the connections; after an abort they are left for the end of the process.

        They meet in the store: the first to close a socket could take its last message from a slower rank.
        """
        if self._failure is not None:
            return
        keys = [f"left-{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "")
        give_up_at = time.monotonic() + self._timeout_s
        while missing := await_keys(self._store, keys, SLICE_S):
            self._look_around(self._number)
            self._raise_if_aborted()
            if time.monotonic() > give_up_at:
                self._fail(f"rank {self._rank} waited {self._timeout_s:g} s for {name_ranks(missing)} to close")
        dist.destroy_process_group(self._group)

    def finish(self, work: dist.Work, number: int, call: Call) -> None:
        """Wait for `work` of call `number`. Raises: CommError after an abort, a broken connection or `timeout_s`."""
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            self._raise_if_aborted()
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:
                self._look_around(number)
                self._raise_if_aborted()
                if work.is_completed():
                    self._fail(f"rank {self._rank} lost its connections in call {number} ({call}): {error}")
                if time.monotonic() > give_up_at:
                    self._fail(self._explain_timeout(number, call))

    def _begin(self, call: Call, after: Event | None) -> None:
        """Order the call after `after`, and compare it with the calls of the other ranks."""
        (after or DONE).wait()
        self._raise_if_aborted()
        self._number += 1
        if self._number > self._checked_calls:
            return
        self._table.zero_()
        self._table[self._rank] = torch.tensor(call.encode(self._size))
        self.finish(dist.all_reduce(self._table, group=self._group, async_op=True), self._number, call)
        calls = {rank: Call.decode(code) for rank, code in enumerate(self._table.tolist())}
        if problem := disagreement(calls):
            self._fail(f"ranks disagree on call {self._number}: {problem}")

    def _event(self, call: Call, work: dist.Work | None) -> Event:
        return DONE if work is None else _GlooEvent(self, work, self._number, call)

    def _raise_if_aborted(self) -> None:
        if self._failure is not None:
            raise CommError(self._failure)

    def _look_around(self, number: int) -> None:
        """Learn from the store of the abort of another rank; answer one that timed out and calls the roll."""
        try:
            if self._failure is None and self._store.check(["aborted"]):
                self._failure = self._store.get("aborted").decode()
            elif self._store.check([f"roll-{number}"]):
                self._store.set(f"present-{number}-{self._rank}", "")
        except RuntimeError as error:
            self._failure = self._failure or f"rank {self._rank} lost the host of the store: {error}"

    def _fail(self, reason: str) -> None:
        self.abort(reason)
        raise CommError(reason)

    def _explain_timeout(self, number: int, call: Call) -> str:
        """Call the roll, and name the ranks that do not wait in the same call."""
        self._store.set(f"roll-{number}", "")
        self._store.set(f"present-{number}-{self._rank}", "")
        missing = await_keys(self._store, [f"present-{number}-{rank}" for rank in range(self._size)], ROLL_CALL_S)
        suspects = f"for {name_ranks(missing)}" if missing else "with all other ranks"
        return f"rank {self._rank} waited {self._timeout_s:g} s {suspects} in call {number} ({call})"


@final
class _GlooEvent:
    """An operation that gloo performs on a thread of its own; waiting again repeats the answer."""

    def __init__(self, comm: DistributedCommunicator, work: dist.Work, number: int, call: Call) -> None:
        self._comm = comm
        self._work: dist.Work | None = work
        self._number = number
        self._call = call

    def wait(self) -> None:
        if self._work is not None:
            self._comm.finish(self._work, self._number, self._call)
            self._work = None


def connect(rank: int, size: int, init_method: str, timeout_s: float, loopback: bool) -> DistributedCommunicator:
    """Join the other ranks at `init_method` (file://, tcp:// or env://) and make them torch's default group.

    With `loopback` all traffic stays on this machine. `timeout_s` limits the meeting and later every wait.
    Raises: CommError naming the ranks that did not come.
    """
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    limit = timedelta(seconds=timeout_s)
    come = [f"come-{peer}" for peer in range(size)]
    missing = list(range(size))
    try:
        root_store = next(iter(rendezvous(init_method, rank, size, timeout=limit)))[0]
        store = PrefixStore("mggcn", root_store)
        store.set(come[rank], "")
        missing = await_keys(store, come, timeout_s)
        if not missing:
            transport_limit = timedelta(seconds=timeout_s + TRANSPORT_SLACK_S)
            dist.init_process_group("gloo", store=root_store, rank=rank, world_size=size, timeout=transport_limit)
    except (RuntimeError, OSError, ValueError) as error:
        raise CommError(f"rank {rank} of {size} could not connect through {init_method}: {error}") from error
    if missing:
        raise CommError(f"rank {rank} waited {timeout_s:g} s for {name_ranks(missing)} to start")
    group = dist.group.WORLD
    if group is None:
        raise CommError(f"rank {rank}: torch.distributed made no process group")
    return DistributedCommunicator(group, store, timeout_s)


def loopback_interface() -> str:
    """The name that gloo knows the loopback interface by."""
    return "lo" if sys.platform == "linux" else "lo0"


def await_keys(store: Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """The indices of the keys that `store` still lacks after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    missing = list(range(len(keys)))
    while missing and time.monotonic() < give_up_at:
        missing = [index for index in missing if not store.check([keys[index]])]
        if missing:
            time.sleep(0.02)
    return missing
