"""Ranks as processes with one GPU each, over NCCL as CuPy binds it: every message is work of the comm stream.

A message starts when the stream comes to it, and its event is a mark behind it: no thread waits for the device, and a
CUDA graph may record all of it. Small host tensors and barriers go through the store (comm/store_collectives.py).

Every rank receives the same sums, by NCCL's design, and they are the same bits in each run on the same GPUs with the same
NCCL: mggcn pins the ring as algorithm (comm/nccl_settings.py), and NCCL chooses protocol and channels by size, type and
topology alone. A user's own settings of NCCL take precedence, and may break that promise. A failed message cannot be
reported on the device itself: the watchdog aborts NCCL's communicator, which frees the stream, and `check` raises the
error.

Verified without a GPU, with a library of the same interface (tests/comm/fake_nccl.py): calls, orders, failures and
messages. On GPUs nothing has been verified yet: tests/comm/test_gpu.py does it (`-m cuda` with one rank, `-m nccl`
with several).
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, Final, cast, final

import torch
from torch import Tensor

from mggcn.backend.host import HostStream
from mggcn.comm.base import CommStream, Event, Moving
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call
from mggcn.comm.control_store import CHECKED_CALLS, ControlStore, meet
from mggcn.comm.nccl_binding import explained, packed_id, unpacked_id
from mggcn.comm.nccl_settings import make_settings
from mggcn.comm.store_collectives import StoreCommunicator
from mggcn.comm.watchdog import DeviceStream, Heartbeat, Watchdog
from mggcn.errors import BackendError, CommError

TYPES: Final = {
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}
IDLE_POLL_S: Final = 0.001
ABORT_POLITELY_S: Final = 1.0
"""An abort waits this long for a call that is just being started, then assumes that the call hangs."""
DESTROY_S: Final = 10.0
"""NCCL releases a communicator once all CUDA graphs that hold its messages are gone: close waits no longer than this."""


@final
class NcclCommunicator:
    """One rank. Until `use_stream` has made NCCL's communicator, all tensors are host tensors.

    library: cupy.cuda.nccl, or a module with the same functions. device_type: that of the tensors that it moves.
    capturing: whether the calling thread records a graph; calls are not compared then, since that would not be recorded.
    environ: where NCCL reads its settings; mggcn's are added before its first call.
    """

    def __init__(
        self,
        control: ControlStore,
        library: Any,
        watchdog: Watchdog,
        *,
        device_type: str = "cuda",
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
        checked_calls: int = CHECKED_CALLS,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._control = control
        self._library = library
        self._small = StoreCommunicator(control)
        self._watchdog = watchdog
        self._device_type = device_type
        self._capturing = capturing
        self._checked_calls = checked_calls
        self._environ = environ
        self._comm_stream: DeviceStream | None = None
        self._moving: Moving = nullcontext
        self._nccl: Any = None
        self._starting = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def size(self) -> int:
        return self._control.size

    def use_stream(self, comm_stream: CommStream, moving: Moving = nullcontext) -> None:
        """Make NCCL's communicator for the current device. All ranks meet first, since ncclCommInitRank has no time
        limit.

        The comm stream is a DeviceStream, as a CudaDevice has one.
        """
        if comm_stream == HostStream():
            raise CommError("NCCL moves device memory; on CPUs use gloo, or threads")
        make_settings(self._environ)
        stream = cast("DeviceStream", comm_stream)
        unique_id = unpacked_id(self._control.exchange("nccl", self._new_id(), "to start NCCL")[0])
        self._watchdog.start(self._free_device)
        with self._watchdog.inside("ncclCommInitRank"), self._measured("start", stream):
            try:
                nccl = self._library.NcclCommunicator(self.size, unique_id, self.rank)
            except (RuntimeError, KeyError) as error:
                self._control.fail(f"rank {self.rank} could not start NCCL: {explained(error)}")
        self._comm_stream, self._moving = stream, moving
        self._nccl = nccl
        self._watchdog.add(self._async_error, Heartbeat(stream, self._control).look)

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        if self._on_host(buf):
            return self._small.broadcast(buf, root, after)
        call = broadcast_call(buf, root, self.size)
        at, kind = buf.data_ptr(), self._kind(buf)
        return self._start(
            call, after, (buf,), lambda nccl, comm_stream: nccl.broadcast(at, at, call.count, kind, root, comm_stream)
        )

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        if self._on_host(buf):
            return self._small.all_reduce(buf, after)
        call = all_reduce_call(buf)
        at, kind, total = buf.data_ptr(), self._kind(buf), self._library.NCCL_SUM
        return self._start(
            call, after, (buf,), lambda nccl, comm_stream: nccl.allReduce(at, at, call.count, kind, total, comm_stream)
        )

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        if self._on_host(buf):
            return self._small.all_to_all(out, buf, out_rows, buf_rows, after)
        call = all_to_all_call(out, buf, out_rows, buf_rows, self.size)
        return self._start(
            call, after, (out, buf), lambda nccl, comm_stream: self._swap(out, buf, call, nccl, comm_stream)
        )

    def barrier(self) -> None:
        """Meet on the control store; the device may still be at work."""
        self._small.barrier()

    def check(self) -> None:
        self._control.check()

    def device_bytes(self) -> dict[str, int]:
        return dict(self._taken)

    def abort(self, reason: str) -> None:
        self._control.abort(reason)
        self._watchdog.hurry()

    def close(self) -> None:
        """Wait for the device, meet once more, and release NCCL's communicator; after an abort nothing is left to do."""
        control = self._control
        if control.failure is not None:
            return
        if self._comm_stream is not None:
            for mark in (self._comm_stream.record(), self._comm_stream.mark()):
                while not mark.done():
                    control.check()
                    time.sleep(IDLE_POLL_S)
        control.leave()
        self._watchdog.stop()
        if self._nccl is not None:
            gc.collect()  # graphs that hold messages may be part of cycles
            releasing = threading.Thread(target=self._nccl.destroy, name="release", daemon=True)
            releasing.start()
            releasing.join(DESTROY_S)

    def _on_host(self, buf: Tensor) -> bool:
        return self._nccl is None or buf.device.type != self._device_type

    def _new_id(self) -> bytes:
        """The id that rank 0 sends the others, so that their NCCL finds its own."""
        if self.rank != 0:
            return b""
        try:
            return packed_id(self._library.get_unique_id())
        except (RuntimeError, KeyError) as error:
            self._control.fail(f"rank 0 could not start NCCL: {explained(error)}")

    def _kind(self, buf: Tensor) -> int:
        return int(getattr(self._library, TYPES[buf.dtype]))

    def _start(
        self, call: Call, after: Event | None, buffers: tuple[Tensor, ...], start: Callable[[Any, int], object]
    ) -> Event:
        """Start a message on the comm stream after the event `after`, once all ranks are known to make the same call."""
        control, comm_stream = self._control, self._comm_stream
        if comm_stream is None:
            raise CommError("no comm stream was given to NCCL")
        recorded = self._capturing()
        control.begin(call, recorded=recorded)
        early = control.number <= self._checked_calls and not recorded
        if early:
            control.compare()
        with comm_stream.working(after), self._watchdog.inside(f"call {control.number} ({call})"):
            if call.count:
                with self._moving(), self._measured(call.op, comm_stream) if early else nullcontext():
                    self._guarded(lambda: start(self._nccl, comm_stream.handle))
            return _NcclEvent(control, comm_stream.record(), buffers)

    @contextmanager
    def _measured(self, what: str, comm_stream: DeviceStream) -> Iterator[None]:
        """Add up what a call of NCCL takes of the device: connections are made, and kernels loaded, by the first ones."""
        before = comm_stream.free_bytes()
        yield
        self._taken[what] += max(0, before - comm_stream.free_bytes())

    def _guarded(self, start: Callable[[], object]) -> None:
        """Call into NCCL, not while its communicator is aborted."""
        control = self._control
        with self._starting:
            control.check()
            try:
                start()
            except (RuntimeError, KeyError) as error:
                if self._capturing():
                    raise  # the recording is abandoned, and the next call reports the error of NCCL
                control.fail(
                    f"rank {self.rank}: NCCL failed in call {control.number} ({control.call}): {explained(error)}"
                )

    def _swap(self, out: Tensor, buf: Tensor, call: Call, nccl: Any, comm_stream: int) -> None:
        """Send and receive in one group, so that no order of ranks can lock; own rows are copied."""
        kind, row_bytes = self._kind(buf), call.count * buf.itemsize
        sent, received = _starts(call.sends), _starts(call.receives)
        me = self.rank
        own = buf[sent[me] : sent[me] + call.sends[me]]
        out[received[me] : received[me] + call.receives[me]].copy_(own)
        self._library.groupStart()
        try:
            for peer in range(self.size):
                if peer != me and call.sends[peer]:
                    at = buf.data_ptr() + sent[peer] * row_bytes
                    nccl.send(at, call.sends[peer] * call.count, kind, peer, comm_stream)
                if peer != me and call.receives[peer]:
                    at = out.data_ptr() + received[peer] * row_bytes
                    nccl.recv(at, call.receives[peer] * call.count, kind, peer, comm_stream)
        finally:
            self._library.groupEnd()

    def _async_error(self) -> str | None:
        try:
            self._nccl.check_async_error()
        except (RuntimeError, KeyError) as error:
            return f"rank {self.rank}: NCCL failed in call {self._control.number} or before: {explained(error)}"
        return None

    def _free_device(self) -> None:
        """Abort NCCL's communicator: what waits for it on the device comes to its end."""
        if self._nccl is None:
            return
        polite = self._starting.acquire(timeout=ABORT_POLITELY_S)
        try:
            self._nccl.abort()
        finally:
            if polite:
                self._starting.release()


@final
class _NcclEvent:
    """A message on the comm stream; its buffers live until the rank has waited for it.

    A failure that is known before or after the wait is raised.
    """

    def __init__(self, control: ControlStore, event: Event, buffers: tuple[Tensor, ...]) -> None:
        self._control = control
        self._event = event
        self._buffers = buffers

    def wait(self) -> None:
        self._control.check()
        self._event.wait()
        self._control.check()
        self._buffers = ()


def connect_nccl(
    rank: int, size: int, init_method: str, timeout_s: float, end: Callable[[CommError], None]
) -> NcclCommunicator:
    """Join the other ranks at `init_method`; NCCL itself starts in `use_stream`.

    timeout_s limits the meeting, later every wait, and how long the device may stand still in a message.
    end: called by the watchdog if this rank hangs and cannot be freed; it must end the process.
    Raises: BackendError if there is no NCCL; CommError naming the ranks that did not come.
    """
    library = nccl_library()
    _, control = meet(rank, size, init_method, timeout_s)
    return NcclCommunicator(control, library, Watchdog(control, end))


def nccl_library() -> Any:
    """Return cupy.cuda.nccl. Raises: BackendError that says what to install."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise BackendError(
            f'run.transport nccl needs CuPy ({error}); pip install "mggcn[cuda12]" or "[cuda13]"'
        ) from error
    if not nccl.available:
        raise BackendError("CuPy finds no NCCL; pip install nvidia-nccl-cu12 or -cu13, as CuPy's own CUDA version")
    return nccl


def _starts(counts: Sequence[int]) -> list[int]:
    """The first row of each rank."""
    return list(accumulate(counts, initial=0))
