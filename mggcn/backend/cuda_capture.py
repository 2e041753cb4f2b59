"""Work of a GPU that repeats: launched piece by piece at first, then recorded as a CUDA graph and launched whole."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

WARM_CALLS = 2
"""Calls made as they are before one is captured: the first loads modules and libraries, the second finds them there."""


class Captured:
    """Device work that is launched piece by piece WARM_CALLS times, then recorded as a CUDA graph and launched whole."""

    def __init__(self, function: Callable[[], None], stream: torch.cuda.Stream, lock: threading.Lock) -> None:
        self._function = function
        self._stream = stream
        self._lock = lock
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._refused = False

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._calls < WARM_CALLS or self._refused:
            self._calls += 1
            self._function()
        else:
            self._record()
            self()

    def _record(self) -> None:
        # thread_local: other threads, such as the watchdog of a transport, may go on asking CUDA about events.
        # What is garbage goes before: a graph or an event that is destroyed meanwhile would break the recording.
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        try:
            with self._lock, torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._function()
        except RuntimeError as error:
            # Nothing of the recording has run: the work goes on op by op, which gives the same results.
            self._refused = True
            log.warning("an epoch cannot be captured and is launched op by op: %s", error.__context__ or error)
            torch.cuda.synchronize()
        else:
            self._graph = graph
        finally:
            gc.enable()
