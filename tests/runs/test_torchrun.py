"""What ranks of torchrun agree on before they train; several machines are in tests/hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mggcn.config import Config, RunConfig
from mggcn.errors import ConfigError, StoreError
from mggcn.runs import torchrun
from mggcn.runs.torchrun import Request, refuse_other_graphs, started_by, train_under_torchrun
from tests.cli.runs import run_main

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def said(host: str, **files: str) -> dict[str, Any]:
    return {"host": host, "store": f"/data/{host}", "graph": {"files": files, "name": "g"}}


def test_another_graph_is_named_with_its_machine() -> None:
    """Fails if ranks train on different graphs, or who reads the refusal must guess where to look and at what."""
    same = said("a", indptr="1", features="2")
    refuse_other_graphs([same, said("b", indptr="1", features="2")])
    with pytest.raises(StoreError, match=r"^rank 2 on c has .* /data/c than rank 0 on a has in /data/a \(features\);"):
        refuse_other_graphs([same, same, said("c", indptr="1", features="3")])
    with pytest.raises(StoreError, match=r"^rank 1 on b cannot open its store: no such folder$"):
        refuse_other_graphs([said("a"), {"host": "b", "problem": "no such folder"}])


@pytest.fixture
def run(community: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert run_main("train", community, "--threads", 1, "--epochs", 1, "--quiet", "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", 200, "--edges", 900, "--seed", 71) == 0
    return store


def test_only_the_torchrun_that_began_a_run_goes_on_with_it(run: Path, tmp_path: Path) -> None:
    """Fails if a second torchrun continues, by a mistyped --out, what another one has trained, or the same begins anew."""
    job = run / "job.json"
    assert not started_by(run, ["a"])
    assert not started_by(tmp_path / "none", ["a"])
    for known, goes_on in ((["b", "a"], True), (["b"], False), ("a", False), ([["a"]], False)):
        job.write_text(json.dumps(json.loads(job.read_text()) | {torchrun.LAUNCHERS: known}))
        assert started_by(run, ["c", "a"]) == goes_on
    assert torchrun._launcher() == torchrun._launcher() != ""


def test_a_run_that_may_be_started_again_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that torchrun starts again would begin anew in a folder that is named by the time."""
    for name, value in (ALONE | {"TORCHELASTIC_MAX_RESTARTS": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--max-restarts.* name one: --out DIR"):
        train_under_torchrun(Request(config=Config(), store=Path))
    config = Config(run=RunConfig(transport="threads", ranks=2))
    with pytest.raises(ConfigError, match=r"must be auto, gloo or nccl, got threads"):
        train_under_torchrun(Request(config=config, store=Path, resume=Path("run")))


def test_a_folder_that_a_machine_does_not_see_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank reads another run's checkpoint from its own disk, or an old one, or waits for ever for a folder."""
    files = torchrun._files(run)
    assert len(set(files.values())) == len(files)
    assert torchrun._problem(run, files, 0.0) == ""
    assert torchrun._problem(tmp_path / "none", files, 0.1) == f"does not see the run folder {tmp_path / 'none'}"
    (run / "checkpoints" / "latest").write_text("an older one")
    assert torchrun._problem(run, files, 0.0).startswith("finds other files than rank 0 in the run folder")
    delayed = Config(run=RunConfig(ranks=2, strategy="delayed", delay="1", transport="gloo"))
    monkeypatch.setattr(torchrun, "read_run", lambda folder: (delayed, {}, {}))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "may not write to the run folder" in torchrun._problem(run, torchrun._files(run), 0.0)


def test_a_rank_without_its_run_folder_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the line does not name the machine on which --resume finds nothing."""
    several = ALONE | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in several.items():
        monkeypatch.setenv(name, value)
    assert run_main("train", "--resume", "nowhere") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mggcn: on {os.uname().nodename}: there is no run folder nowhere")
    assert err.endswith("every machine must see the run folder\n")
    assert err.count("\n") == 1
