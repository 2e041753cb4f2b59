"""The first Python that README.md and the site show, and the loops over batches, run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mggcn
from mggcn.graph.generate import community
from tests.docs.blocks import Session, blocks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_snippet_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a line breaks, or takes a graph that nothing made: what it loads is a data set that has this name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # one thread a rank: cores may be shared
    monkeypatch.setenv("MGGCN_DATA", str(tmp_path / "data"))  # where it lies once it is fetched
    mggcn.save(community(600, 3000, 16, 4, seed=1187, train=0.3), tmp_path / "data" / "cora")
    (block,) = [block for block in blocks(ROOT / page) if block.language == "python"]
    assert 'mggcn.load("cora")' in block.text
    session = Session()
    session.run(block)
    assert len(session.names["history"]) == 200
    assert session.names["scores"].shape == (600, 4)
    assert session.names["trainer"].evaluate("test") > 0.7


def test_the_loops_over_batches_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a line breaks, the first loop does not learn, or PyG's layers do not take what the second one gives."""
    pyg = pytest.importorskip("torch_geometric.nn", reason="the second loop is over a model of PyG's")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGGCN_DATA", str(tmp_path / "data"))
    mggcn.save(community(600, 3000, 16, 4, seed=1187, train=0.3), tmp_path / "data" / "cora")
    session, found = Session(), blocks(ROOT / "docs/batches.md")
    own, as_pyg = (block for block in found if block.language == "python" and "mggcn.nn.batches" in block.text)
    torch.manual_seed(71)
    session.run(own)
    assert session.names["loss"].item() < 0.9  # ln 4 = 1.39 at first
    session.names["model"] = pyg.GraphSAGE(16, 8, 2, 4)
    session.run(as_pyg)
    assert session.names["out"].shape == (180, 4)


@pytest.mark.full
def test_the_snippets_on_links_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a line breaks, or the links of a graph of communities are not learnt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("MGGCN_DATA", str(tmp_path / "data"))
    mggcn.save(community(300, 3000, 16, 4, seed=1187, train=0.3), tmp_path / "data" / "cora")
    session = Session()
    for block in blocks(ROOT / "docs/links.md"):
        if block.language == "python":
            session.run(block)
    assert session.names["trainer"].evaluate("test") > 0.7
    assert session.names["scores"].shape == (2,)
