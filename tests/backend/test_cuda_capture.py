"""Work that is recorded: when it is launched piece by piece, when whole, and what happens if it cannot be recorded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mggcn.backend.cuda_capture import WARM_CALLS, Captured


class Graph:
    """What torch.cuda.CUDAGraph is, as far as Captured knows it."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins for torch's graphs; the options of each recording."""
    found: list[dict[str, Any]] = []

    @contextmanager
    def graph(graph: Graph, **options: Any) -> Iterator[None]:
        found.append(options | {"collecting": gc.isenabled()})
        yield

    Graph.replays = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_warm_calls_then_a_recording_then_replays(recordings: list[dict[str, Any]]) -> None:
    """Fails if a call does no work or does it twice, or another thread's garbage may end up in a recording."""
    calls: list[bool] = []
    lock, stream = threading.Lock(), object()
    run = Captured(lambda: calls.append(lock.locked()), stream, lock)  # type: ignore[arg-type]
    for _ in range(7):
        run()
    assert calls == [False] * WARM_CALLS + [True]
    assert Graph.replays == 7 - WARM_CALLS
    assert recordings == [{"stream": stream, "capture_error_mode": "thread_local", "collecting": False}]
    assert gc.isenabled()
    assert not lock.locked()


def test_what_cannot_be_recorded_goes_on_as_it_was(
    recordings: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a refused recording loses its call, is tried again and again, or is not spoken of."""
    done: list[int] = []

    def work() -> None:
        if len(recordings) == 1 and len(done) == WARM_CALLS:
            recordings.append({})
            raise RuntimeError("operation not permitted when stream is capturing")
        done.append(0)

    lock = threading.Lock()
    run = Captured(work, object(), lock)  # type: ignore[arg-type]
    for _ in range(6):
        run()
    assert len(done) == 6
    assert Graph.replays == 0
    assert len(recordings) == 2
    assert [record.message for record in caplog.records] == [
        "an epoch cannot be captured and is launched op by op: operation not permitted when stream is capturing"
    ]
    assert gc.isenabled()
    assert not lock.locked()
