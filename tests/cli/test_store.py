"""`mggcn store`: what it prints, and that each action does its part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mggcn
from mggcn.cli.entry import main
from mggcn.graph import trusted
from mggcn.graph.store_write import write_store
from tests.cli.runs import run_main
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


@pytest.mark.parametrize("more", [[], ["--ranks", 2, "--strategy", "delayed"], ["--ranks", 2, "--order", "locality"]])
def test_a_store_that_is_read_stays_as_it_is(
    more: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a command that reads a store leaves a record, a cut or measured products in it."""
    monkeypatch.setattr(trusted, "SETTLED_NS", 0)
    store, run = tmp_path / "g", tmp_path / "run"
    assert run_main("generate", "community", store, "--vertices", 150, "--edges", 900, "--classes", 3) == 0

    def state() -> dict[str, tuple[bytes, int]]:
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in store.rglob("*") if path.is_file()}

    before, threads = state(), ["--threads", 1, "--transport", "threads" if more else "auto"]
    assert run_main("store", "verify", store) == 0
    assert run_main("store", "info", store) == 0
    assert run_main("plan", store, *threads, *more) == 0
    train = ["train", store, *threads, *more, "--epochs", 2, "--quiet"]
    assert run_main(*train, "--out", run) == 0
    assert run_main("status", run) == 0
    assert run_main("predict", run) == 0
    assert run_main("predict", run, "--store", store, "--out", tmp_path / "again.npy") == 0
    assert run_main("train", "--resume", run, "--epochs", 3, "--quiet") == 0
    assert state() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.npy", "g", "run"]


def test_info_names_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the answer in JSON of store info lacks the names of classes."""
    mggcn.save(mggcn.load(np.array([[0, 1], [1, 0]]), labels=["b", "a"]), tmp_path / "s")
    assert main(["store", "info", str(tmp_path / "s"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_names"] == ["a", "b"]
