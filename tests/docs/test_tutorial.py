"""The tutorial runs from its first block to its last, and prints what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.docs.blocks import Session, blocks, unprinted

DOCS = Path(__file__).resolve().parents[2] / "docs"
pytest.importorskip("matplotlib", reason="the tutorial draws pictures")


@pytest.mark.full
def test_the_tutorial_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a command or a block of Python breaks, or prints something else than the page shows, numbers apart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))  # for the ranks' processes, where mggcn is not installed
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # one thread a rank: cores may be shared
    session, printed = Session(), ""
    for block in blocks(DOCS / "tutorial.md"):
        if block.language == "text":
            assert unprinted(block.text, printed) == [], printed
        else:
            printed = session.run(block)
    accuracy = {name: _test_accuracy(tmp_path / "runs" / name) for name in ("mlp", "gcn", "two")}
    assert accuracy["gcn"] > accuracy["mlp"] + 0.3
    assert accuracy["two"] == pytest.approx(accuracy["gcn"], abs=0.02)
    assert session.names["trainer"].evaluate("test") > 0.8
    assert session.names["apart"] < 1e-5
    np.testing.assert_allclose(session.names["scores"].sum(axis=1), 1.0, rtol=1e-5)


def _test_accuracy(run: Path) -> float:
    return float(json.loads((run / "result.json").read_text())["final"]["test"])


def test_what_a_page_shows_is_compared() -> None:
    """Fails if other words, a missing line or another order would pass for the output."""
    printed = "run folder runs/gcn\nepoch 1: loss 1.58\naccuracy 0.9688\n"
    assert unprinted("run folder runs/gcn\n...\naccuracy 0.5\n", printed) == []
    assert unprinted("run folder runs/mlp\n", printed) == ["run folder runs/mlp"]
    assert unprinted("accuracy 0.9688\nepoch 1: loss 1.58\n", printed) == ["epoch #: loss #"]
