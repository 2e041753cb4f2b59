"""Work of a GPU that repeats: launched piece by piece at first, then recorded as a CUDA graph and launched whole.

A recording that cannot be made is no error: nothing of it has run, and the work continues piece by piece. NCCL requires
that all ranks capture a message or none does (its user guide, "Using NCCL with CUDA Graphs"), so the ranks decide
together.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mggcn.backend.events import Agree, alone
from mggcn.errors import CommError

log: logging.Logger = logging.getLogger(__name__)

WARM_CALLS = 2
"""Calls made as they are before one is captured: the first loads modules and libraries, the second finds them there."""
Pool = tuple[int, int]


class Refusals:
    """Refused recordings of a process: after one, it makes no other.

    A failed recording may leave torch's allocator, one for the process, as if it still ran; `end_pool` ends it as
    far as torch lets it. The graphs stay: torch's allocator of pinned memory may still ask them.
    """

    def __init__(self) -> None:
        self.reason: str = ""
        """Why one was refused, "" if none was."""
        self._graphs: list[Any] = []

    def add(self, reason: str, graph: Any = None) -> None:
        self.reason = reason
        if graph is not None:
            self._graphs.append(graph)


PROCESS = Refusals()
"""The refusals of this process: state that cannot belong to a run, because all runs share torch's allocator."""


class Captured:
    """Device work that is launched piece by piece WARM_CALLS times, then recorded as a CUDA graph and launched whole.

    agree: makes all ranks give up if one does; a collective call, made once, before the third launch.
    """

    def __init__(
        self,
        function: Callable[[], None],
        stream: torch.cuda.Stream,
        agree: Agree = alone,
        refusals: Refusals = PROCESS,
    ) -> None:
        self._function = function
        self._stream = stream
        self._agree = agree
        self._refusals = refusals
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self.state: str = "eager"

    def __call__(self) -> None:
        if self._calls == WARM_CALLS:
            self._settle()
        self._calls += 1
        if self._graph is not None:
            self._graph.replay()
        else:
            self._function()

    def _settle(self) -> None:
        """Record the work, or learn that it is launched piece by piece for good: on all ranks alike."""
        earlier = self._refusals.reason
        graph, reason = (None, earlier) if earlier else self._record()
        refused, speaks = self._agree(reason)
        if not refused:
            self._graph, self.state = graph, "captured"
            return
        self.state = f"refused: {earlier or refused}"
        if graph is not None:
            graph.reset()
        if not earlier:
            self._refusals.add(refused)
            if speaks:
                log.warning("a CUDA graph cannot be captured; epochs are launched op by op: %s", refused)

    def _record(self) -> tuple[torch.cuda.CUDAGraph | None, str]:
        """Return the graph, or why there is none; nothing of the work has run. Raises: CommError."""
        # thread_local: other threads, such as torch's watchdog of NCCL, may still query CUDA events.
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        reason = "interrupted"
        found: list[BaseException] = []
        try:
            with (
                _uncollected(),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._noting(found)
            reason = ""
        except Exception as error:  # CUDA's, torch's, CuPy's, cuSPARSE's: each has classes of its own
            cause = found[0] if found else error
            if isinstance(cause, CommError) or not isinstance(cause, Exception):
                raise cause from None  # another rank failed, or Ctrl-C: no launch is to go on
            reason = _one_line(cause)
        finally:
            found.clear()  # tracebacks keep what lies in the pool
            if reason:
                self._refusals.add(reason, graph)
                end_pool(graph, pool, self._stream.device_index)
        if reason:
            torch.cuda.synchronize()
        return (None if reason else graph), reason

    def _noting(self, found: list[BaseException]) -> None:
        """Do the work; remember the error that ends it, since the error that ends the recording hides it."""
        try:
            self._function()
        except BaseException as error:
            found.append(error)
            raise


def end_pool(graph: torch.cuda.CUDAGraph, pool: Pool, device: int) -> None:
    """Let torch's allocator forget a recording that failed, and give back what lies in its pool.

    Until torch 2.11 a failure leaves the recording under way in the allocator: it then frees no cached memory, and does not
    try again after freeing some. Until 2.13 it leaves the pool in use (pytorch#180395, #190348, #190308).
    """
    for step in (graph.reset, lambda: torch._C._cuda_endAllocateToPool(device, pool), torch.cuda.empty_cache):
        # What torch has done by itself cannot be done again; a torch without these functions has nothing to mend.
        with contextlib.suppress(RuntimeError, AttributeError):
            step()
    # A pool whose free memory stays is still in use. Releasing one that is not would break torch's count of its users.
    with contextlib.suppress(RuntimeError, AttributeError):
        left = [segment for segment in torch.cuda.memory_snapshot() if segment.get("segment_pool_id") == pool]
        if left and not any(segment["active_size"] for segment in left):
            torch._C._cuda_releasePool(device, pool)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector out: a graph or an event that is destroyed meanwhile would break the recording."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:200]}"
