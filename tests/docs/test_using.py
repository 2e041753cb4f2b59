"""docs/using.md runs as it stands: new vertices are scored well, and the map has a place for each vertex."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Session, blocks, unprinted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "using.md"
pytest.importorskip("matplotlib", reason="the page draws a map")
pytest.importorskip("sklearn", reason="the map is made by scikit-learn")


@pytest.mark.full
def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a program breaks, prints other words, or scores new vertices clearly worse than old ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # one thread a rank: cores may be shared
    session, printed, scores = Session(), "", list[float]()
    for block in blocks(PAGE):
        if block.language == "text":
            assert unprinted(block.text, printed) == [], printed
        else:
            printed = session.run(block)
            scores += [float(line.split()[-1]) for line in printed.splitlines() if line[-1].isdigit()]
    old, new = scores
    assert old > 0.8
    assert abs(old - new) < 0.1
    assert (tmp_path / "map.png").stat().st_size > 1000
