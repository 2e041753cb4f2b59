"""Runs that go on with another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.assemble import plan as assemble_plan
from mggcn.config import from_tables
from mggcn.errors import ConfigError
from mggcn.runs.folder import read_run
from mggcn.runs.regroup import regrouped, with_ranks
from tests.cli.runs import refused, result, run_main

SETTINGS = ["--threads", 1, "--seed", 9177, "--set", "model.dropout=0.4", "--set", "model.hidden=6", "--quiet"]
FP64 = [*SETTINGS, "--precision", "fp64"]


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", 200, "--edges", 900, "--seed", 71) == 0
    return store


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]


def ranks(number: int, strategy: str = "broadcast") -> list[object]:
    return ["--ranks", number, *(["--transport", "threads", "--strategy", strategy] if number > 1 else [])]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("after", [2, 1, 6])
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "slice", "delayed"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_run_of_four_ranks_goes_on_with_others(
    community: Path, tmp_path: Path, after: int, strategy: str, optimizer: str
) -> None:
    """Fails if the optimiser's state, a row or an epoch is lost, or the losses differ by more than rounding."""
    moves = ["--set", f"train.optimizer={optimizer}", *(["--set", "train.momentum=0.9"] if optimizer == "sgd" else [])]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_main("train", community, *FP64, *moves, "--epochs", 9, *ranks(1), "--out", whole) == 0
    assert run_main("train", community, *FP64, *moves, "--epochs", 4, *ranks(4, strategy), "--out", broken) == 0
    assert run_main("train", "--resume", broken, "--ranks", after, "--epochs", 9, "--quiet") == 0
    np.testing.assert_allclose(losses(broken), losses(whole), rtol=1e-9)
    config, plan, job = read_run(broken)
    assert config.run.ranks == job["assignment"]["ranks"] == plan["ranks"] == after
    assert result(broken)["best"]["epoch"] == result(whole)["best"]["epoch"]
    assert run_main("predict", broken) == 0


def test_a_run_with_settings_that_nothing_read_goes_on(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run that began before settings of batches were refused without any cannot go on with other ranks."""
    out, unread = tmp_path / "run", ["--set", "sample.draw=replace", "--set", "sample.weights=mean"]
    with monkeypatch.context() as before:
        before.setattr(assemble_plan, "check_batches", lambda _: None)
        assert run_main("train", community, *SETTINGS, *unread, "--epochs", 2, "--out", out) == 0
    assert run_main("train", "--resume", out, "--ranks", 2, "--epochs", 3, "--quiet") == 0
    assert len(losses(out)) == 3


@pytest.mark.parametrize(("delay", "why"), [("2", "messages in flight"), ("none", "leaves out the edges")])
def test_state_that_belongs_to_its_ranks_is_refused(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], delay: str, why: str
) -> None:
    """Fails if a run whose results depend on the ranks goes on with others, or a refusal changes its folder."""
    folder, delayed = tmp_path / "run", [*ranks(2, "delayed"), "--delay", delay]
    assert run_main("train", community, *SETTINGS, "--epochs", 3, *delayed, "--out", folder) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert why in refused(capsys, "train", "--resume", folder, "--ranks", 3, "--epochs", 5)
    assert "run.ranks" in refused(capsys, "train", "--resume", folder, "--ranks", 0, "--epochs", 5)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert run_main("train", "--resume", folder, "--ranks", 2, "--epochs", 5, "--quiet") == 0


@pytest.mark.parametrize("kept", [{"strategy": "delayed", "delay": "1"}, {}])
def test_under_torchrun_the_advice_is_torchruns(kept: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if who has lost a machine is told to remove --ranks, which torchrun's ranks do not have."""
    sample = {} if "delay" in kept else {"batch": 64, "fanout": [3, 3, 3], "halo": "history"}
    config = from_tables({"run": {"ranks": 2, **kept}, "sample": sample})
    with pytest.raises(ConfigError, match=r"cannot continue on 1; remove --ranks, or begin a new run"):
        with_ranks(config, 1)
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    for name, value in (torchrun | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"start torchrun with 2 ranks, --nnodes and --nproc-per-node, or begin"):
        with_ranks(config, 1)


def test_ranks_that_do_not_fit_leave_the_run_as_it_is(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if memory is not checked again, or the plan of the run is gone after a refusal."""
    folder = tmp_path / "run"
    limit = ["--set", "run.memory_limit=400MiB", "--set", "train.checkpoint_every=2"]
    assert run_main("train", community, *SETTINGS, *limit, "--epochs", 2, "--out", folder) == 0
    before = (folder / "plan.json").read_bytes()
    limited = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(limited.replace("memory_limit = 419430400", "memory_limit = 1000"))
    assert "needs" in refused(capsys, "train", "--resume", folder, "--ranks", 3, "--epochs", 4)
    assert (folder / "plan.json").read_bytes() == before
    (folder / "config.toml").write_text(limited)
    assert run_main("train", "--resume", folder, "--epochs", 4, "--quiet") == 0


def test_a_trainer_goes_on_with_other_ranks(community: Path, tmp_path: Path) -> None:
    """Fails if Python's way differs from the command's, or the weights that it predicts with are those of before."""
    settings: dict[str, Any] = {"threads": 1, "seed": 4477, "precision": "fp64", "epochs": 3}
    trainer = mggcn.Trainer(mggcn.load(community), mggcn.GCN(hidden=6), out=tmp_path / "run", **settings)
    trainer.fit()
    rows = trainer.resume(6)
    other = mggcn.Trainer(
        mggcn.load(community), mggcn.GCN(hidden=6), ranks=3, transport="threads", out=tmp_path / "other", **settings
    )
    other.fit()
    found = other.resume(6, ranks=2)
    np.testing.assert_allclose([row["loss"] for row in found], [row["loss"] for row in rows], rtol=1e-9)
    np.testing.assert_allclose(other.predict(), trainer.predict(), rtol=1e-7, atol=1e-9)
    assert other.config.run.ranks == 2
    with pytest.raises(ConfigError, match=r"run\.ranks"):
        other.resume(8, ranks=0)


def test_ranks_that_come_to_several_machines_share_no_memory(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if as many ranks on several machines go on with an evaluation that keeps rows in memory of one."""
    folder, blocks = tmp_path / "run", ["--batch", 64, "--fanout", "3,3", "--set", "train.evaluate=blocks"]
    assert run_main("train", community, *SETTINGS, *blocks, "--epochs", 1, *ranks(2), "--out", folder) == 0
    config, plan, _ = read_run(folder)
    assert plan["evaluate"] == "blocks"
    graph = mggcn.load(community)
    assert regrouped(folder, config, graph, community) == config
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    for name, value in (torchrun | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"on several machines; set train.evaluate=whole"):
        regrouped(folder, config, graph, community)
    assert regrouped(folder, config.evaluating("auto"), graph, community).train.evaluate == "auto"
    assert read_run(folder)[1]["evaluate"] == "whole"
