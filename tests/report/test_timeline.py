"""timeline.py: what a run wrote is read back; what is not a timeline is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.errors import RunError
from mggcn.report.timeline import read_timeline
from tests.report.timelines import Event, block, event, write_trace


def staged(rank: int = 0, begin: float = 0.0, number: int = 3) -> list[Event]:
    """An epoch of one of two ranks: a product in two stages, then a sum outside the ops; sends before and beside it."""
    other = 1 - rank
    sent = [f"message {10 + root}: broadcast from {root}, 800 bytes" for root in range(2)]
    blocks = [
        block(f"rank {rank}, epoch {number}", 0, 20, rank),
        block("aggregate 2", 1, 10, rank, op="spmm", bytes=700, flop=90),
        block(sent[0], 1, 2, rank),
        block(sent[1], 2, 3, rank),
        block(f"wait: {sent[rank]}", 5, 5.5, rank),
        block(f"wait: {sent[other]}", 5.5, 7, rank),
        event("cpu_op", "aten::copy_", 6, 6.75, rank, 4000 + rank),
        block("message 12: all_reduce, 64 bytes", 12, 13, rank),
        block("wait: message 12: all_reduce, 64 bytes", 13, 17, rank),
        event("cpu_op", "aten::add_", 14, 14.5, rank, 4000 + rank),
        event("cpu_op", "aten::copy_", 16, 16.5, rank, 4000 + rank),
        block("optimizer", 17, 18, rank, op="optimizer", bytes=40, flop=0),
        event("cpu_op", "aten::copy_", 17.5, 17.75, rank, 4000 + rank),
    ]
    return [one | {"ts": one["ts"] + 1e3 * begin} for one in blocks]


def rows(found: Any, row: str, rank: int = 0) -> list[tuple[Any, ...]]:
    """Op, stage, start and end in milliseconds, and bytes of every stretch."""
    return [(s.op, s.stage, round(1e3 * s.start_s, 6), round(1e3 * s.end_s, 6), s.nbytes) for s in found.of(rank, row)]


def test_a_rank_computes_in_ops_outside_of_its_messages(tmp_path: Path) -> None:
    """Fails if a wait counts as computation, a stage is not what arrived last, or an op's bytes count twice."""
    found = read_timeline(write_trace(tmp_path, [*staged(0), *staged(1)]))
    assert rows(found, "compute") == [
        ("spmm", 0, 3, 5, 700),
        ("spmm", 1, 7, 10, 0),
        ("optimizer", None, 17, 18, 40),
    ]
    assert [row[:2] for row in rows(found, "compute", 1)] == [("spmm", 1), ("spmm", 0), ("optimizer", None)]
    assert rows(found, "communication") == [
        ("broadcast", 1, 6, 6.75, 800),
        ("all_reduce", None, 14, 14.5, 64),
        ("all_reduce", None, 16, 16.5, 0),
    ]
    assert [(s.step, s.flop, s.epoch) for s in found.of(0, "compute")] == [
        ("aggregate 2", 90, 3),
        ("aggregate 2", 0, 3),
        ("optimizer", 0, 3),
    ]
    assert [s.step for s in found.of(0, "communication")] == ["aggregate 2", "", ""]
    assert found.epochs == {(rank, 3): pytest.approx((0.0, 20e-3)) for rank in (0, 1)}
    assert found.notes == ()


def test_messages_in_flight_do_not_overlap(tmp_path: Path) -> None:
    """Fails if gloo's messages, several of which are on their way at a time, hide each other."""
    found = read_timeline(write_trace(tmp_path, staged(0), in_flight=True))
    assert rows(found, "communication") == [
        ("broadcast", 0, 1, 5.5, 800),
        ("broadcast", 1, 5.5, 7, 800),
        ("all_reduce", None, 12, 17, 64),
    ]
    assert {s.measured for s in found.of(0, "communication")} == {"in flight"}


def test_work_of_a_gpu_belongs_to_what_launched_it(tmp_path: Path) -> None:
    """Fails if the host's time counts as the GPU's, or a kernel is of another op, stage or epoch than its launch."""
    launches = [(3.5, 31, 35, 7), (5.75, 32, 36, 20), (8, 36, 40, 7), (17.5, 41, 42, 7), (19, 43, 44, 7)]
    events = staged(0)
    for number, (called, start, end, stream) in enumerate(launches):
        events.append(event("cuda_driver", "cuLaunchKernel", called, called + 0.1, 0, 4000, correlation=number))
        events.append(event("kernel", "spmm_csr_warp", start, end, 0, stream, correlation=number))
    events.append(event("gpu_memset", "of nobody", 50, 60, 0, 7, correlation=99))
    overhead = event("overhead", "Activity Buffer Request", 3, 4, 0, 0)
    events.append({key: value for key, value in overhead.items() if key != "args"})
    found = read_timeline(write_trace(tmp_path, events))
    assert rows(found, "compute") == [
        ("spmm", 0, 31, 35, 700),
        ("spmm", 1, 36, 40, 0),
        ("optimizer", None, 41, 42, 40),
    ]
    assert rows(found, "communication") == [("broadcast", 1, 32, 36, 800)]
    assert found.epochs == {(0, 3): pytest.approx((31e-3, 44e-3))}


def test_only_epochs_of_all_ranks_count(tmp_path: Path) -> None:
    """Fails if figures of a rank that recorded more epochs are set against those of another."""
    timeline = read_timeline(write_trace(tmp_path, [*staged(0), *staged(0, 30, 4), *staged(1)]))
    assert timeline.common_epochs == (3,)
    assert {s.epoch for s in timeline.of(0, "compute")} == {3}


def test_what_is_uncertain_is_noted(tmp_path: Path) -> None:
    """Fails if a reader is not told that clocks of machines were only aligned."""
    [note] = read_timeline(write_trace(tmp_path, staged(), clock="aligned at a barrier")).notes
    assert "several machines" in note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("traceEvents"), "is not a timeline that mggcn wrote: KeyError 'traceEvents'"),
        (lambda c: c["traceEvents"][1].pop("dur"), "is not a timeline that mggcn wrote: KeyError 'dur'"),
        (lambda c: c["traceEvents"].append(7), "is not a timeline that mggcn wrote: TypeError"),
        (lambda c: c["traceEvents"].clear(), "holds no epoch that all its ranks recorded"),
        (lambda c: c.update(otherData=[]), "is not a timeline that mggcn wrote: TypeError"),
    ],
)
def test_what_is_no_timeline_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    """Fails if a damaged file shows as a traceback, or as an empty report."""
    path = write_trace(tmp_path, staged())
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match=message):
        read_timeline(path)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    """Fails if half a file shows as a traceback."""
    path = write_trace(tmp_path, staged())
    path.write_text(path.read_text()[:-300])
    with pytest.raises(RunError, match=r"cannot read .*timeline\.json"):
        read_timeline(path)
