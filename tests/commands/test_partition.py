"""`mggcn partition`: what it prints, where the cut lies, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.graph.store import open_store
from mggcn.partition.cut_files import find_or_make_cut
from mggcn.partition.libra import LibraSettings
from mggcn.plan import machine
from tests.commands.runs import refused, run_main


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "small"
    assert run_main("generate", "rmat", folder, "--scale", 9, "--edge-factor", 8, "--seed", 11) == 0
    return folder


def test_a_cut_is_made_and_found_again(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the figures are not those of the cut that lies where the command says, or it is made twice."""
    capsys.readouterr()
    assert run_main("partition", store, "--kind", "libra", "--parts", 4, "--seed", 77) == 0
    said = capsys.readouterr().out
    folder = store / "partitions" / "libra-4-77-shuffled"
    assert f"lies in {folder}" in said
    assert "made in" in said
    assert said.index("planned memory: ") < said.index("replication")
    found = find_or_make_cut(open_store(store), LibraSettings(parts=4, seed=77), store / "partitions")
    assert found.seconds is None
    s = found.cut.statistics
    assert s.num_edges == 4096
    for text in (
        f"replication {s.replication:.3f}",
        f"balance {s.edge_balance:.4f}",
        f"split vertices {s.split_share:.1%}",
    ):
        assert text in said
    assert run_main("partition", "small", "--root", store.parent, "--parts", 4, "--seed", 77) == 0
    again = capsys.readouterr().out
    assert "made before" in again
    assert f"replication {s.replication:.3f}" in again
    assert "planned memory: " not in again
    assert run_main("partition", store, "--parts", 4, "--seed", 77, "--force") == 0
    assert "made in" in capsys.readouterr().out


def test_options_decide_the_place(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if seed, order or --out do not reach the cut."""
    assert run_main("partition", store, "--parts", 3, "--edges", "stored", "--out", tmp_path) == 0
    assert run_main("partition", store, "--parts", 70, "--seed", 5, "--out", tmp_path) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["libra-3-1-stored", "libra-70-5-shuffled"]
    assert not (store / "partitions" / "libra-3-1-stored").exists()


def test_what_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a wrong setting, a cut of another graph or too little memory gets through, or writes anything."""
    out = ["--out", tmp_path / "cuts"]
    assert "1 to 1024 parts, got 0" in refused(capsys, "partition", store, "--parts", 0, *out)
    assert "1 to 1024 parts, got 2000" in refused(capsys, "partition", store, "--parts", 2000, *out)
    assert "seed" in refused(capsys, "partition", store, "--parts", 2, "--seed", -3, *out)
    assert "invalid choice" in refused(capsys, "partition", store, "--parts", 2, "--edges", "sorted", *out)
    assert "invalid choice" in refused(capsys, "partition", store, "--parts", 2, "--kind", "hash", *out)
    assert "--parts" in refused(capsys, "partition", store, *out)
    assert "there is no nowhere" in refused(capsys, "partition", "nowhere", "--parts", 2, *out)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "free_bytes", lambda: 1000)
        assert "1000 B are free" in refused(capsys, "partition", store, "--parts", 2, *out)
    assert not (tmp_path / "cuts").exists()
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(capsys, "partition", store, "--parts", 2, "--out", tmp_path / "file")
    assert run_main("partition", store, "--parts", 2, *out) == 0
    other = tmp_path / "other"
    assert run_main("generate", "rmat", other, "--scale", 9, "--edge-factor", 8, "--seed", 12) == 0
    assert "made of another graph" in refused(capsys, "partition", other, "--parts", 2, *out)


def test_no_torch_is_loaded(store: Path, tmp_path: Path) -> None:
    """Fails if a cut waits for torch, or pays its memory."""
    code = "import sys; from mggcn.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "partition", str(store), "--parts", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
