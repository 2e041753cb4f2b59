"""What a benchmark's report says of the machine, and of other programs on it."""

from __future__ import annotations

import os

import pytest

from bench import report
from mggcn.backend.cpu import machine


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz (family 6, model 143, stepping 8)",
            "intel-xeon-platinum-8481c",
        ),
        ("AMD EPYC (family 25, model 1, stepping 1)", "amd-epyc-25-1"),
        ("AMD EPYC (family 25, model 17, stepping 1)", "amd-epyc-25-17"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13-64"),
    ],
)
def test_processors_have_reports_of_their_own(name: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if reports of two kinds of processors of a vendor overwrite each other."""
    monkeypatch.setattr(machine, "processor_name", lambda: name)
    assert report.hardware() == f"{short}-{len(os.sched_getaffinity(0))}cpu"


def test_a_disturbed_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if figures that others disturbed look like those of a quiet machine, or one's own work counts as others'."""
    monkeypatch.setattr(report.time, "monotonic", lambda: 110.0)
    monkeypatch.setattr(report.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(report, "own_s", lambda: 25.0)
    for busy, share in ((1025.0, 0.0), (1033.0, 0.2)):
        monkeypatch.setattr(report, "busy_s", lambda busy=busy: busy)
        assert report.taken_by_others([100.0, 1000.0, 0.0]) == pytest.approx(share)
    assert report.taken_by_others([109.5, 0.0, 0.0]) == report.taken_by_others([]) == 0.0
