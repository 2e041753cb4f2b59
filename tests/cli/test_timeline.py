"""mggcn train --timeline, then mggcn report, on one rank, on ranks as threads and as processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.runs import losses, run_main


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (2, "threads"),
        pytest.param(2, "gloo", marks=pytest.mark.full),
        pytest.param(1, "single", marks=pytest.mark.slow),
    ],
)
def test_a_timeline_is_written_and_drawn(
    ranks: int, transport: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if the flag reaches no rank, changes a loss, lets the profiler speak, or the report leaves the timeline out."""
    store, watched, plain = tmp_path / "store", tmp_path / "watched", tmp_path / "plain"
    assert run_main("generate", "community", store, "--vertices", 400, "--edges", 2000) == 0
    common = ["--epochs", 5, "--threads", 1, "--ranks", ranks, "--set", "model.hidden=8", "--quiet"]
    assert run_main("train", store, *common, "--transport", transport, "--out", watched, "--timeline") == 0
    assert capfd.readouterr().err == ""
    alike = "threads" if transport == "gloo" else transport  # the same losses, and sooner
    assert run_main("train", store, *common, "--transport", alike, "--out", plain) == 0
    assert losses(watched).tolist() == losses(plain).tolist()
    assert not (plain / "timeline.json").exists()
    events = json.loads((watched / "timeline.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert {pid for pid, _ in rows} == set(range(ranks))
    assert run_main("report", watched) == 0
    drawn = {path.name for path in (watched / "report").glob("*.png")} | {path.name for path in watched.glob("*.png")}
    assert {"timeline.png", "breakdown.png"} <= drawn
    assert ("stages.png" in drawn) == (ranks > 1)
