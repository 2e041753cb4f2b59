"""timeline.py: what a run wrote is read back; what is not a timeline is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.errors import RunError
from mggcn.report.timeline import read_timeline
from mggcn.trace.trace_json import FILE
from tests.report.timelines import Made, staged_run, write_timeline


def test_stretches_are_those_that_were_written(tmp_path: Path) -> None:
    """Fails if a stretch changes its rank, row, times or figures between the run and the report."""
    made = Made(0, clock_s=5.0)
    made.epoch(3, 1.0, 9.0)
    made.add("compute", 2.0, 4.5, "spmm", epoch=3, step="aggregate 2", layer=2, stage=0, bytes=700, flop=90)
    made.add("communication", 3.0, 6.0, "broadcast", epoch=3, bytes=80, received=80, stage=1, measured="in flight")
    timeline = read_timeline(write_timeline(tmp_path, [made]))
    one, other = timeline.stretches
    assert (one.rank, one.row, one.op, one.epoch, one.step, one.stage) == (0, "compute", "spmm", 3, "aggregate 2", 0)
    assert (one.start_s, one.end_s, one.nbytes, one.flop) == pytest.approx((2e-3, 4.5e-3, 700, 90))
    assert (other.row, other.stage, other.measured, other.nbytes) == ("communication", 1, "in flight", 80)
    assert timeline.epochs == {(0, 3): pytest.approx((1e-3, 9e-3))}
    assert timeline.notes == ()


def test_only_epochs_of_all_ranks_count(tmp_path: Path) -> None:
    """Fails if figures of a rank that recorded more epochs are set against those of another."""
    parts = staged_run(2, epochs=2)
    parts[1].events = [e for e in parts[1].events if e["args"]["epoch"] == 1]
    timeline = read_timeline(write_timeline(tmp_path, parts))
    assert timeline.common_epochs == (1,)
    assert {s.epoch for s in timeline.of(0, "compute")} == {1}


def test_what_is_missing_or_uncertain_is_noted(tmp_path: Path) -> None:
    """Fails if a reader is not told that calls are missing or that clocks of machines were only aligned."""
    parts = staged_run(2, epochs=1)
    parts[0].lost, parts[1].boot = 1234, "another machine"
    first, second = read_timeline(write_timeline(tmp_path, parts)).notes
    assert first.startswith("1,234 calls are missing")
    assert "several machines" in second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("traceEvents"), "is not a timeline that mggcn wrote: KeyError 'traceEvents'"),
        (lambda c: c["traceEvents"][-2]["args"].pop("op", None), "is not a timeline that mggcn wrote: KeyError 'op'"),
        (lambda c: c["traceEvents"].append(7), "is not a timeline that mggcn wrote: TypeError"),
        (lambda c: c["traceEvents"].clear(), "holds no epoch that all its ranks recorded"),
        (lambda c: c.update(otherData=[]), "is not a timeline that mggcn wrote: AttributeError"),
    ],
)
def test_what_is_no_timeline_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    """Fails if a damaged file shows as a traceback, or as an empty report."""
    path = write_timeline(tmp_path, staged_run(1, epochs=1))
    content = json.loads(path.read_text())
    content["traceEvents"].sort(key=lambda e: e["ph"] == "X")
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=message):
        read_timeline(path)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    """Fails if half a file shows as a traceback."""
    path = write_timeline(tmp_path, staged_run(1))
    path.write_text(path.read_text()[:-300])
    with pytest.raises(RunError, match=rf"cannot read .*{FILE}"):
        read_timeline(path)
