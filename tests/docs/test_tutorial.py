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
    """Fails if a command or a block of Python breaks, or prints other words, counts or scores than the page shows."""
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


@pytest.mark.parametrize(
    ("expected", "passes"),
    [
        ("run folder runs/gcn\n...\naccuracy 0.9402", True),
        ("run folder runs/gcn\naccuracy 0.8688", False),
        ("run folder runs/mlp", False),
        ("accuracy 0.9688\nrun folder runs/gcn", False),
        ("fits: 2.00 GiB of 1,100.5 MiB, 7 ranks", True),
        ("fits: 1.00 GiB of 2.50 GiB, 8 ranks", False),
        ("rmse, best validation (7): train 0.45", True),
        ("rmse, best validation (64): train 0.3", False),
        ("losses differ by at most 9e-07", True),
        ("[0.96, 0.96, 0.95, 0.98]", True),
        ("[0.96, 0.96, 0.95, 0.58]", False),
    ],
)
def test_what_a_page_shows_is_compared(expected: str, passes: bool) -> None:
    """Fails if other words, counts, scores or another order would pass for the output, or a machine's figures would not."""
    printed = (
        "run folder runs/gcn\nfits: 1.00 GiB of 2.50 MiB, 7 ranks\naccuracy 0.9688\nrmse, best validation (64): train 0.4\n"
        "losses differ by at most 2e-08\n[0.97, 0.94, 0.94, 0.98]\n"
    )
    assert (unprinted(expected, printed) == []) == passes
