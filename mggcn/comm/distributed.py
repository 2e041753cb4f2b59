"""Ranks as processes, over torch.distributed: host tensors by gloo and, once `use_stream` names a GPU, its tensors by NCCL.

The two differ in who waits. gloo moves a message on threads of its own, and the host waits for it. A message of NCCL is
work of the comm stream: it starts when the stream comes to it, its event is a mark behind it, no thread waits for it, and
a CUDA graph may record it. In both cases a failure interrupts the wait of the host, for a message or, in `synchronize`,
for the device: it looks at the control store four times a second.

gloo ends the process, past any `except`, when ranks disagree about a size, and NCCL hangs. A rank's calls repeat every
epoch, so the first `checked_calls` of them are compared, over gloo, before they start. A later disagreement ends the rank
by SIGABRT, or by the time limit. Sums are the same bits on every rank and in each run: gloo's by its algorithm, NCCL's on
the same GPUs with the same NCCL, whose algorithm is pinned (comm/nccl_settings.py).
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from mggcn.backend.events import Mark, MessageStream
from mggcn.backend.host import HostStream
from mggcn.comm.base import CommStream, Event
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call, disagreement
from mggcn.comm.control_store import CHECKED_CALLS, SLICE_S, ControlStore, Peers, aside, meet
from mggcn.comm.failure import out_of_memory
from mggcn.comm.nccl import Nccl
from mggcn.comm.network import address_towards, interface_of, loopback_interface
from mggcn.errors import CommError, one_line

TRANSPORT_SLACK_S: Final = 30.0
"""The transport's own time limit comes this much after ours: gloo then closes its connections and explains little, torch's
watchdog of NCCL ends the process by SIGABRT."""
IDLE_POLL_S: Final = 0.0002
DESTROY_S: Final = 10.0
"""NCCL releases a communicator once all CUDA graphs that hold its messages are gone: close waits no longer than this."""


class DeviceBackend(Protocol):
    """A torch backend that moves a device's tensors between processes: `nccl`."""

    def open(self, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
        """Return a group of all ranks that is connected. Collective; it may never return."""
        ...

    def close(self, group: dist.ProcessGroup) -> None:
        """Release the group."""
        ...


@dataclass(frozen=True, slots=True)
class _Lane:
    """What moves the tensors of one kind of device."""

    group: dist.ProcessGroup
    stream: MessageStream


@final
class DistributedCommunicator:
    """One rank of the process group `host`, which is gloo's; `control` is that of exactly its ranks.

    device: moves tensors of GPUs; None: no transport for them.
    """

    def __init__(
        self,
        host: dist.ProcessGroup,
        control: ControlStore,
        checked_calls: int = CHECKED_CALLS,
        device: DeviceBackend | None = None,
    ) -> None:
        self.rank: int = control.rank
        self.size: int = control.size
        self._host = host
        self._control = control
        self._checked_calls = checked_calls
        self._device = device
        self._device_group: dist.ProcessGroup | None = None
        self._lanes = {"cpu": _Lane(host, HostStream())}
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._table = torch.zeros(control.size, 4 + 2 * control.size, dtype=torch.int64)
        self._taken: Counter[str] = Counter()
        self._looked_s = time.monotonic()

    def use_stream(self, comm_stream: CommStream) -> None:
        """Connect the GPUs, in a thread, since NCCL's start has no time limit. The comm stream is a MessageStream."""
        if self._device is None:
            if comm_stream != HostStream():
                raise CommError("gloo moves host memory; with GPUs use nccl, or threads on one GPU")
            return
        if comm_stream == HostStream():
            raise CommError("NCCL moves device memory; on CPUs use gloo, or threads")
        backend, stream, control = self._device, cast("MessageStream", comm_stream), self._control
        device, limit = torch.device(stream.device), _limit(control.timeout_s)
        control.exchange("device", b"", "to start NCCL")
        with self._measured("start", stream):
            opening = aside(lambda: backend.open(device, limit))
            self._await(lambda seconds: bool(wait([opening], seconds).done), control.number, " to start NCCL")
            try:
                self._device_group = opening.result()
            except (RuntimeError, ValueError) as error:
                control.fail(f"rank {self.rank} could not start NCCL: {one_line(str(error))}")
        self._lanes[device.type] = _Lane(self._device_group, stream)

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        call = broadcast_call(buf, root, self.size)
        return self._start(call, (buf,), after, partial(dist.broadcast, buf, group_src=root))

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        return self._start(all_reduce_call(buf), (buf,), after, partial(dist.all_reduce, buf))

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        # Only the length of a row is common: a rank with no rows at all must still take part.
        call = all_to_all_call(out, buf, out_rows, buf_rows, self.size)
        send = partial(dist.all_to_all_single, out, buf, list(out_rows), list(buf_rows))
        return self._start(call, (out, buf), after, send)

    def barrier(self) -> None:
        """Meet over gloo; the device may still be at work."""
        call = Call(op="barrier")
        self._begin(call)
        self.finish(dist.all_reduce(self._flag, group=self._host, async_op=True), self._control.number, call)

    def check(self) -> None:
        now = time.monotonic()
        if now > self._looked_s + SLICE_S:
            self._looked_s = now
            self._control.look()
        self._control.check()

    def synchronize(self) -> None:
        number, call = self._control.number, self._control.call
        streams = [lane.stream for lane in self._lanes.values()]
        marks: list[Mark] = [mark for stream in streams for mark in (stream.record(), stream.mark())]
        where = f": its device stands still, after or in call {number} ({call})"
        self._await(lambda seconds: _passed(marks, seconds), number, where)

    def device_bytes(self) -> dict[str, int]:
        return dict(self._taken)

    def abort(self, reason: str) -> None:
        """Tell all ranks. What a device waits for ends with the process."""
        self._control.abort(reason)

    def close(self) -> None:
        """Wait for the device, meet once more, and release the groups; after an abort they end with the process.

        Ranks meet on the control store: the first to close a socket could take its last message from a slower rank.
        """
        if self._control.failure is not None:
            return
        self.synchronize()
        self._control.leave()
        backend, group = self._device, self._device_group
        if backend is not None and group is not None:
            gc.collect()  # graphs that hold messages may be part of cycles
            if not wait([aside(lambda: backend.close(group))], DESTROY_S).done:
                return
        dist.destroy_process_group(self._host)

    def finish(self, work: dist.Work, number: int, call: Call) -> None:
        """Wait for `work`, that of call `number`. Raises: CommError after an abort, a lost connection, or `timeout_s`."""
        self._await(lambda seconds: _over(work, seconds), number, f" in call {number} ({call})")

    def _await(self, done: Callable[[float], bool], number: int, where: str) -> None:
        """Return once `done`, which takes so many seconds at most to say whether that is so.

        where: of the message, what the rank waits for. Raises: CommError after an abort, or after `timeout_s`.
        """
        control = self._control
        give_up_at = time.monotonic() + control.timeout_s
        while True:
            control.check()
            try:
                if done(SLICE_S):
                    return
            except ConnectionError as error:
                control.look(number)
                control.check()
                peer = control.peers.at(_address(error))
                whose = f" to {peer}" if peer else ""
                control.fail(f"rank {self.rank} lost its connections{whose}{where}: {error}")
            control.look(number)
            control.check()
            if time.monotonic() > give_up_at:
                suspects = control.suspects(number)
                control.fail(f"rank {self.rank} waited {control.timeout_s:g} s {suspects}{where}")

    def _begin(self, call: Call, *, recorded: bool = False) -> bool:
        """Count a call, and compare it with those of the other ranks; return whether it was compared."""
        control = self._control
        control.begin(call, recorded=recorded)
        number = control.number
        if recorded or number > self._checked_calls:
            return False
        # Through gloo rather than the control store, whose keys each take a round trip to one host.
        self._table.zero_()
        self._table[self.rank] = torch.tensor(call.encode(self.size), device="cpu")
        self.finish(dist.all_reduce(self._table, group=self._host, async_op=True), number, call)
        calls = {rank: Call.decode(code) for rank, code in enumerate(self._table.tolist())}
        if problem := disagreement(calls):
            control.fail(f"ranks disagree on call {number}: {problem}")
        return True

    def _start(
        self,
        call: Call,
        buffers: tuple[Tensor, ...],
        after: Event | None,
        send: Callable[..., dist.Work | None],
    ) -> Event:
        """Start a message after the event `after`, once all ranks are known to make the same call.

        send: starts it in a group, and returns its work if the host is to wait for that.
        """
        control, lane = self._control, self._lanes.get(buffers[0].device.type)
        if lane is None:
            raise CommError(f"no transport moves tensors on {buffers[0].device}: call use_stream first")
        stream, work = lane.stream, None
        compared = self._begin(call, recorded=stream.recording)
        with stream.working(after):
            with self._measured(call.op, stream) if compared else nullcontext():
                try:
                    work = send(group=lane.group, async_op=stream.host_waits) if call.count else None
                except RuntimeError as error:
                    # A recording is abandoned, and the next call reports the error.
                    if stream.recording or out_of_memory(error):
                        raise
                    where, text = f"in call {control.number} ({call})", one_line(str(error))
                    control.fail(f"rank {self.rank}: the transport failed {where}: {text}")
            return _Message(
                comm=self,
                control=control,
                number=control.number,
                work=work,
                mark=stream.record(),
                call=call,
                buffers=buffers,
            )

    @contextmanager
    def _measured(self, what: str, stream: MessageStream) -> Iterator[None]:
        """Add up what a call takes of the device: connections are made, and kernels loaded, by the first ones."""
        before = stream.free_bytes()
        yield
        if taken := max(0, before - stream.free_bytes()):
            self._taken[what] += taken


def _over(work: dist.Work, seconds: float) -> bool:
    """Wait so long for gloo's work; return whether it is done. Raises: ConnectionError if it failed."""
    limit = timedelta(seconds=seconds)
    try:
        return bool(work.wait(limit))
    except RuntimeError:
        if not work.is_completed():
            return False
    # It may have completed after the time slice: a second wait returns at once, or raises its error.
    try:
        return bool(work.wait(limit))
    except RuntimeError as error:
        raise ConnectionError(lost(error)) from error


def _passed(marks: Sequence[Mark], seconds: float) -> bool:
    """Wait so long for the device; return whether it has passed the marks."""
    give_up_at = time.monotonic() + seconds
    while not all(mark.done() for mark in marks):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(IDLE_POLL_S)
    return True


def lost(error: RuntimeError) -> str:
    """Return gloo's message about a broken connection, without addresses and advice on gloo's source files."""
    text = re.sub(r"\[[^]]*\](:\d+)?", "", str(error))
    found = re.search(
        r"[Cc]onnection [a-z ]*[a-z]|reset by peer|timeout [a-z ]*closure|[Tt]imed out|[Bb]roken pipe", text
    )
    return found[0] if found else " ".join(one_line(text).split())[:120]


def _address(error: ConnectionError) -> str:
    """Return the address of the peer that gloo names in what `error` was raised from, "" without one."""
    found = re.search(r"\[([0-9a-f.:]+)\]:\d+", str(error.__cause__))
    return found[1] if found else ""


@final
@dataclass(eq=False, kw_only=True, slots=True)
class _Message:
    """A message, of gloo with work for which the host waits, or on a stream; a second wait gives the same result.

    Its buffers live until the rank has waited for it.
    """

    comm: DistributedCommunicator
    control: ControlStore
    number: int
    work: dist.Work | None
    mark: Event
    call: Call
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        self.control.check()
        if self.work is not None:
            self.comm.finish(self.work, self.number, self.call)
            self.work = None
        self.mark.wait()
        self.buffers = ()


def connect(
    rank: int, size: int, init_method: str, timeout_s: float, loopback: bool, transport: str = "gloo"
) -> DistributedCommunicator:
    """Join the other ranks at `init_method` and make them torch's default group; NCCL itself starts in `use_stream`.

    With `loopback` all traffic stays on this machine. `timeout_s` limits the meeting, later every wait, and how long the
    device may stand still in a message.
    Raises: BackendError if there is no NCCL; CommError naming the ranks that did not come.
    """
    device = Nccl() if transport == "nccl" else None
    store, control = meet(rank, size, init_method, timeout_s)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    elif found := _interface(control.peers):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_limit(timeout_s))
    except (RuntimeError, OSError, ValueError) as error:
        if out_of_memory(error):
            raise MemoryError(f"while the rank connected: {error}") from error
        raise CommError(f"rank {rank} of {size} could not connect through {init_method}: {error}") from error
    group = dist.group.WORLD
    if group is None:
        raise CommError(f"rank {rank}: torch.distributed made no process group")
    return DistributedCommunicator(group, control, device=device)


def _interface(peers: Peers) -> str:
    """Return the interface that faces the other machines of a run, "" if that is not known.

    Left alone gloo takes the address that the machine's name has, which many systems make one of loopback.
    """
    known = [address for address in peers.addresses if address]
    return interface_of(address_towards(peers.store) or address_towards(known[0])) if known else ""


def _limit(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s + TRANSPORT_SLACK_S)
