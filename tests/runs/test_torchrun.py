"""What ranks of torchrun agree on before they train; several machines are in tests/hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from mggcn.config import Config, RunConfig
from mggcn.errors import ConfigError, StoreError
from mggcn.runs import torchrun
from mggcn.runs.torchrun import Request, refuse_other_graphs, started_by, train_under_torchrun
from tests.cli.runs import finish, refused, run_main, start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "machines.md"


def alone() -> dict[str, str]:
    """What torchrun tells its only rank; the port is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


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


def test_only_the_torchrun_that_began_a_run_goes_on_with_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a second torchrun continues, by a mistyped --out, what another one has trained, or the same begins anew."""
    job = run / "job.json"
    assert not started_by(run, ["a"])
    assert not started_by(tmp_path / "none", ["a"])
    for known, goes_on in ((["b", "a"], True), (["b"], False), ("a", False), ([["a"]], False)):
        job.write_text(json.dumps(json.loads(job.read_text()) | {torchrun.LAUNCHERS: known}))
        assert started_by(run, ["c", "a"]) == goes_on
    job.write_text(json.dumps(json.loads(job.read_text()) | {torchrun.LAUNCHERS: [""]}))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun._launcher() == ""
    assert not started_by(run, [""])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    first = torchrun._launcher()
    assert first == torchrun._launcher() != ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert torchrun._launcher() != first


def test_a_run_that_may_be_started_again_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that torchrun starts again would begin anew in a folder that is named by the time."""
    for name, value in (alone() | {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_MAX_RESTARTS": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--max-restarts.* name one: --out DIR"):
        train_under_torchrun(Request(config=Config(), store=Path))
    # Two machines, the second of which may have joined a run of one: no restart of these is counted.
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert torchrun._with_size(Request(config=Config(), store=Path), 1).run.ranks == 1
    with pytest.raises(ConfigError, match=r"a machine that joins.* name one: --out DIR"):
        torchrun._with_size(Request(config=Config(), store=Path), 2)
    assert torchrun._with_size(Request(config=Config(), store=Path, out=Path("run")), 2).run.ranks == 2
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


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_cannot_begin_tells_the_others(
    lost: int, community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ranks on other machines wait their time limit for one that finds no run folder, or do not say why."""
    lines = [["train", community, "--threads", 1, "--out", tmp_path / "run", "--quiet"] for _ in range(2)]
    lines[lost] = ["train", "--resume", tmp_path / "nowhere"]
    ranks, here = [], alone() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for rank, line in enumerate(lines):
        for name, value in (here | {"RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)
        ranks.append(start(*line))
    ended = [finish(process) for process in ranks]
    why = (
        f"there is no run folder {tmp_path / 'nowhere'}; mggcn train makes one and prints its name; every machine must"
    )
    assert ended[lost][0] == 2
    assert ended[lost][2].startswith(f"mggcn: {why}")
    code, _, err = ended[1 - lost]
    assert code == 1
    assert err.startswith(f"mggcn: rank {1 - lost}: rank {lost} cannot begin: {why}"), err
    assert [err.count("\n") for _, _, err in ended] == [1, 1]
    assert not (tmp_path / "run").exists()


def test_the_same_torchrun_goes_on_with_its_own_run_alone(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if another run with the same --out goes on with the first one, as which its own settings would be lost."""
    out = tmp_path / "run"

    def trained(store: Path, run_id: str, *words: object) -> tuple[int, str, str]:
        for name, value in (alone() | {"TORCHELASTIC_RUN_ID": run_id}).items():
            monkeypatch.setenv(name, value)
        return finish(start("train", store, "--epochs", 2, "--out", out, *words))

    assert trained(community, "one", "--threads", 1)[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, _, err = trained(community, "one", "--threads", 1, "--set", "train.lr=0.5", "--set", "model.hidden=7")
    assert code == 2
    assert err.startswith(f"mggcn: rank 0: the run in {out} began with other settings, model.hidden, train.lr; name"), (
        err
    )
    other = tmp_path / "other"
    assert run_main("generate", "community", other, "--vertices", 200, "--edges", 900, "--seed", 72) == 0
    code, _, err = trained(other, "one", "--threads", 1)
    assert code == 2
    assert "is not the graph that the run in" in err
    for run_id in ("another", ""):
        code, _, err = trained(community, run_id, "--threads", 1)
        assert code == 2
        assert f"{out} exists and is not empty" in err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    code, told, err = trained(community, "one", "--threads", 2)
    assert code == 0, err
    assert told.startswith(f"started again: the run in {out} goes on after 2 epochs")


@pytest.mark.parametrize("command", ["predict", "sweep"])
def test_what_starts_its_ranks_is_refused_under_torchrun(
    command: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if several processes of a command find each other at work, or one that torchrun started alone is refused."""
    for name, value in (alone() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    words = [command, run] if command == "predict" else [command, "--resume", run]
    err = refused(capsys, *words)
    assert err.startswith(
        f"mggcn: mggcn {command} runs in one process, which starts the ranks that it needs, and torchrun"
    )
    assert "started 2 processes; start it without torchrun" in err
    assert not list(run.glob("scores*"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if command == "predict":
        assert run_main(*words) == 0
    else:
        assert "torchrun" not in refused(capsys, *words)
    for name in alone():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    err = refused(capsys, *words)
    assert "a launcher started 3 processes (SLURM_STEP_NUM_TASKS=3); start one, on one machine" in err


def test_the_page_says_what_is() -> None:
    """Fails if docs/machines.md names another time limit than the default, or an option that torchrun does not have."""
    text = PAGE.read_text()
    (limit,) = re.findall(r"`run\.timeout_s` \((\d+) s", text)
    assert float(limit) == RunConfig().timeout_s
    commands = re.findall(r"^(?:srun .*\\\n +)?torchrun (--(?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("\\\n", " ").replace("$SLURM_NNODES", "2"))
        given = get_args_parser().parse_args(words)
        assert given.training_script == "mggcn"
        assert given.shutdown_timeout > 30
        assert given.training_script_args[0] == "train"
