"""What is recorded of a run, and how much; messages in flight on a clock that a test moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.host import HostTime
from mggcn.comm.base import Event
from mggcn.comm.single import SingleCommunicator
from mggcn.trace import recorder as recorder_module
from mggcn.trace.timeline import Timeline, recorded_epochs
from mggcn.trace.trace_json import FILE
from tests.trace.recorded import events_of


@pytest.mark.parametrize(
    ("first", "epochs", "expected"),
    [
        (0, 200, range(2, 5)),
        (0, 5, range(2, 5)),
        (0, 4, range(1, 4)),
        (0, 3, range(3)),
        (0, 1, range(1)),
        (90, 200, range(92, 95)),
        (198, 200, range(198, 200)),
    ],
)
def test_which_epochs_are_recorded(first: int, epochs: int, expected: range) -> None:
    """Fails if a short or continued run records nothing, or a long one its first epochs."""
    assert recorded_epochs(first, epochs) == expected


def test_only_the_first_repeat_is_recorded(tmp_path: Path) -> None:
    """Fails if a second run through the same epochs is recorded over the first."""
    timeline = Timeline(CpuBackend(torch.float32, 1), SingleCommunicator(), tmp_path, 3)
    for repeat in ("first", "second"):
        for number in range(3):
            with timeline.epoch(number), timeline.doing(repeat):
                pass
        timeline.close()
    assert [(e["args"]["epoch"], e["args"]["op"]) for e in events_of(tmp_path)] == [(n, "first") for n in (1, 2, 3)]


def test_the_number_of_marks_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a file grows without bound: no epoch begins that would not fit, and one that is too long is cut."""
    for marks, limit, expected, lost in ((4, 7, [1] * 4, {}), (9, 7, [1] * 7, {"0": 2})):
        monkeypatch.setattr(recorder_module, "MAX_MARKS", limit)
        monkeypatch.setattr("mggcn.trace.timeline.MAX_MARKS", limit)
        timeline = Timeline(CpuBackend(torch.float32, 1), SingleCommunicator(), tmp_path, 3)
        for number in range(3):
            with timeline.epoch(number):
                for _ in range(marks):
                    with timeline.doing("optimizer"):
                        pass
        assert [e["args"]["epoch"] for e in events_of(tmp_path)] == expected
        assert json.loads((tmp_path / FILE).read_text())["otherData"]["lost"] == lost


class Clock:
    """A backend as far as time goes, which passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 10.0

    def timestamp(self) -> HostTime:
        return HostTime(self.now)

    def synchronize(self) -> None:
        return


class Wire:
    """Two ranks' communicator, seen from rank 1; a message arrives 3 s after it is waited for."""

    rank, size = 1, 2

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def broadcast(self, buf: torch.Tensor, root: int, after: Event | None = None) -> Event:
        self._clock.now += 1.0
        return Arrival(self._clock)

    def barrier(self) -> None:
        return


class Arrival:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self) -> None:
        self._clock.now += 3.0


def test_messages_in_flight_do_not_overlap(tmp_path: Path) -> None:
    """Fails if gloo's messages, several of which are on their way at a time, hide each other, or claim a rate."""
    clock: Any = Clock()
    wire: Any = Wire(clock)
    timeline = Timeline(clock, wire, tmp_path, 1, in_flight=True)
    with timeline.epoch(0):
        first, second = timeline.comm.broadcast(torch.zeros(6), 0), timeline.comm.broadcast(torch.zeros(2), 1)
        first.wait()
        clock.now += 0.5
        second.wait()
        timeline.comm.broadcast(torch.zeros(1), 0).wait()
    part = json.loads((tmp_path / "timeline-1.json").read_text())
    found = [e for e in part["events"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in found] == [(0, 5e6), (5e6, 3.5e6), (8.5e6, 4e6)]
    assert [(e["args"]["bytes"], e["args"]["received"], e["args"]["stage"]) for e in found] == [
        (24, 24, 0),
        (8, 0, 1),
        (4, 4, 0),
    ]
    assert all(e["args"]["measured"] == "in flight" and "GB/s" not in e["args"] for e in found)
