"""A source that the package does not have: a reader of its own, and `mggcn prepare` reads its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.api import load as sources
from mggcn.errors import GraphError
from mggcn.graph.store import open_store
from tests.cli.runs import refused, run_main


def read_adjacency_list(path: Path) -> dict[str, Any]:
    """A line for each vertex: its class, then the vertices that it points to."""
    lines = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
    if not all(lines):
        raise GraphError(f"{path} has an empty line, expected a class and targets on each; remove it")
    edges = np.array([(source, target) for source, line in enumerate(lines) for target in line[1:]]).T
    return {"edges": edges, "labels": np.array([line[0] for line in lines]), "num_vertices": len(lines)}


def test_prepare_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a reader in the table is not asked, or what it returns is checked or stored in another way than a file's."""
    source, store = tmp_path / "graph.adj", tmp_path / "store"
    source.write_text("1 1 2\n0 2\n1\n0 0 3\n")
    assert "cannot recognise" in refused(capsys, "prepare", source, store)
    monkeypatch.setitem(sources.READERS, ".adj", read_adjacency_list)
    assert run_main("prepare", source, store) == 0
    assert "4 vertices, 5 stored edges, directed" in capsys.readouterr().out
    graph = open_store(store, verify=True)
    assert graph.labels is not None
    assert graph.labels.read(0, 4).tolist() == [1, 0, 1, 0]
    assert graph.adj.indices.read(0, 5).tolist() == [1, 2, 2, 0, 3]
    source.write_text("1 9\n")
    assert "9" in refused(capsys, "prepare", source, tmp_path / "other")
    source.write_text("1 0\n\n")
    assert "empty line" in refused(capsys, "prepare", source, tmp_path / "other")
