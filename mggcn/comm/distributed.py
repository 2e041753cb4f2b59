"""Ranks as processes, over torch.distributed's gloo: asynchronous on the CPU, on one machine or several.

gloo ends the process, past any `except`, when ranks disagree about a size. A rank's calls repeat every epoch, so the
first `checked_calls` of them are compared before they start; a later disagreement ends the rank by SIGABRT.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from mggcn.backend.host import HostStream
from mggcn.comm.base import DONE, CommStream, Event, Moving
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call, disagreement
from mggcn.comm.control_store import CHECKED_CALLS, SLICE_S, ControlStore, loopback_interface, meet
from mggcn.comm.failure import out_of_memory
from mggcn.errors import CommError, one_line

TRANSPORT_SLACK_S: Final = 30.0
"""gloo's own time limit comes this much after ours: a gloo that gives up closes its connections and explains little."""


@final
class DistributedCommunicator:
    """One rank of a gloo process group; `control` is that of exactly the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, control: ControlStore, checked_calls: int = CHECKED_CALLS) -> None:
        self._group = group
        self._control = control
        self._checked_calls = checked_calls
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._table = torch.zeros(control.size, 4 + 2 * control.size, dtype=torch.int64)

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def size(self) -> int:
        return self._control.size

    def use_stream(self, comm_stream: CommStream, moving: Moving = nullcontext) -> None:
        if comm_stream != HostStream():
            raise CommError("gloo moves host memory; with GPUs use nccl, or threads on one GPU")

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        call = broadcast_call(buf, root, self.size)
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
        call = all_to_all_call(out, buf, out_rows, buf_rows, self.size)
        self._begin(call, after)
        # Only the length of a row is common: a rank with no rows at all must still take part.
        if call.count == 0:
            return DONE
        work = dist.all_to_all_single(out, buf, list(out_rows), list(buf_rows), group=self._group, async_op=True)
        return self._event(call, work)

    def barrier(self) -> None:
        call = Call(op="barrier")
        self._begin(call, None)
        self._event(call, dist.all_reduce(self._flag, group=self._group, async_op=True)).wait()

    def check(self) -> None:
        self._control.check()

    def device_bytes(self) -> dict[str, int]:
        return {}

    def abort(self, reason: str) -> None:
        self._control.abort(reason)

    def close(self) -> None:
        """Meet once more, then close the connections; after an abort they are left for the end of the process.

        They meet on the control store: the first to close a socket could take its last message from a slower rank.
        """
        if self._control.failure is not None:
            return
        self._control.leave()
        dist.destroy_process_group(self._group)

    def finish(self, work: dist.Work, number: int, call: Call) -> None:
        """Wait for `work` of call `number`. Raises: CommError after an abort, a broken connection or `timeout_s`."""
        control = self._control
        give_up_at = time.monotonic() + control.timeout_s
        while True:
            control.check()
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError:
                control.look(number)
                control.check()
                if work.is_completed():
                    # The operation may have completed after the time slice: a second wait returns at once, or raises
                    # its error.
                    try:
                        work.wait(timedelta(seconds=SLICE_S))
                        return
                    except RuntimeError as error:
                        control.check()
                        control.fail(f"rank {self.rank} lost its connections in call {number} ({call}): {lost(error)}")
                if time.monotonic() > give_up_at:
                    suspects = control.suspects(number)
                    control.fail(
                        f"rank {self.rank} waited {control.timeout_s:g} s {suspects} in call {number} ({call})"
                    )

    def _begin(self, call: Call, after: Event | None) -> None:
        """Order the call after `after`, and compare it with the calls of the other ranks."""
        (after or DONE).wait()
        self._control.begin(call)
        number = self._control.number
        if number > self._checked_calls:
            return
        # Through gloo rather than the control store, whose keys each take a round trip to one host.
        self._table.zero_()
        self._table[self.rank] = torch.tensor(call.encode(self.size))
        self.finish(dist.all_reduce(self._table, group=self._group, async_op=True), number, call)
        calls = {rank: Call.decode(code) for rank, code in enumerate(self._table.tolist())}
        if problem := disagreement(calls):
            self._control.fail(f"ranks disagree on call {number}: {problem}")

    def _event(self, call: Call, work: dist.Work | None) -> Event:
        return DONE if work is None else _GlooEvent(self, work, self._control.number, call)


def lost(error: RuntimeError) -> str:
    """Return what gloo says of a broken connection, without its addresses and advice on its sources."""
    text = re.sub(r"\[[^]]*\](:\d+)?", "", str(error))
    found = re.search(
        r"[Cc]onnection [a-z ]*[a-z]|reset by peer|timeout [a-z ]*closure|[Tt]imed out|[Bb]roken pipe", text
    )
    return found[0] if found else " ".join(one_line(text).split())[:120]


@final
class _GlooEvent:
    """An operation that gloo performs on a thread of its own; a second wait gives the same result."""

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
    """Join the other ranks at `init_method` and make them torch's default group.

    With `loopback` all traffic stays on this machine. `timeout_s` limits the meeting and later every wait.
    Raises: CommError naming the ranks that did not come.
    """
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    store, control = meet(rank, size, init_method, timeout_s)
    limit = timedelta(seconds=timeout_s + TRANSPORT_SLACK_S)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, OSError, ValueError) as error:
        if out_of_memory(error):
            raise MemoryError(f"while the rank connected: {error}") from error
        raise CommError(f"rank {rank} of {size} could not connect through {init_method}: {error}") from error
    group = dist.group.WORLD
    if group is None:
        raise CommError(f"rank {rank}: torch.distributed made no process group")
    return DistributedCommunicator(group, control)
