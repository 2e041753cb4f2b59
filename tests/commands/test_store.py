"""`mggcn store`: what it prints, and that each action does its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from mggcn.cli import main
from mggcn.graph.store_write import write_store
from tests.graph.small import small_graph


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(small_graph(), tmp_path / "store")
    return tmp_path / "store"


def test_info(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a count, a degree, a component, the homophily or a checksum is not printed."""
    assert main(["store", "info", "store", "--root", str(store.parent)]) == 0
    said = capsys.readouterr().out
    assert "5 vertices, 8 stored edges, symmetric" in said
    assert "1 vertex without any edge" in said
    assert "2 weakly connected components, the largest of 4 vertices" in said
    assert "edge homophily 0.0000, adjusted -0.5" in said
    lines = [line.split() for line in said.splitlines()]
    assert [["0", "1"], ["1", "1"], ["2", "to", "3", "3"], ["highest", "3"]] == lines[8:12]
    (checksum,) = [line[-1] for line in lines if line and line[0] == "labels.npy"]
    assert len(checksum) == 64


def test_verify(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(store)]) == 0
    assert "checksums hold" in capsys.readouterr().out
    content = bytearray((store / "labels.npy").read_bytes())
    content[-1] ^= 1
    (store / "labels.npy").write_bytes(content)
    assert main(["store", "verify", str(store)]) == 2
    assert "labels.npy has SHA-256" in capsys.readouterr().err


def test_export(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "export", str(store), str(tmp_path / "edges.csv")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'edges.csv'}\n"
    assert (tmp_path / "edges.csv").read_text().startswith("source,target\n0,1\n0,2\n1,0\n")
    assert main(["store", "export", str(store), str(tmp_path / "edges.csv")]) == 2
    assert main(["store", "export", str(store), str(tmp_path / "edges.csv"), "--force"]) == 0
