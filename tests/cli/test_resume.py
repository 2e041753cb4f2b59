"""What a resumed run takes of the machine that goes on with it, and what the loss of a rank says of going on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import mggcn
from mggcn.assemble import plan
from mggcn.cli import train as command
from mggcn.cli.entry import main
from mggcn.config.files import from_toml
from mggcn.errors import CommError, ConfigError
from mggcn.memory import device
from mggcn.memory.units import human
from mggcn.runs import local, regroup


def graph() -> mggcn.Graph:
    edges = np.random.default_rng(8123).integers(0, 40, (2, 160))
    labels = np.arange(40) % 3
    return mggcn.load(edges, features=np.eye(40), labels=labels, splits={"train": labels < 2, "val": labels == 2})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, beside its store."""
    folder = tmp_path_factory.mktemp("trained")
    mggcn.save(graph(), folder / "store")
    words = ["--epochs", "3", "--set", "model.hidden=4", "--out", str(folder / "run"), "--quiet"]
    assert main(["train", str(folder / "store"), *words]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--threads", "1"], "threads", 1),
        (["--set", "run.memory_limit=4GiB"], "memory_limit", 4 << 30),
        (["--set", "run.timeout_s=77"], "timeout_s", 77.0),
        (["--set", "run.bind=off"], "bind", "off"),
    ],
)
def test_a_resumed_run_takes_what_belongs_to_the_machine(words: list[str], name: str, value: object, run: Path) -> None:
    """Fails if a run cannot go on with fewer threads or less memory, or goes on with what it had."""
    assert main(["train", "--resume", str(run), "--epochs", "5", "--quiet", *words]) == 0
    assert getattr(from_toml(run / "config.toml", saved=True).run, name) == value


@pytest.mark.parametrize("value", [pytest.param("off", marks=pytest.mark.full), "auto", True])
def test_a_run_of_a_version_that_tried_variants_goes_on(value: object, run: Path) -> None:
    """Fails if a setting, a file or a score that is no more stops a run, or its report."""
    saved, record = run / "config.toml", run / "job.json"
    table = "debug" if isinstance(value, str) else "run"
    line = f'tune = "{value}"' if isinstance(value, str) else "tune = true"
    saved.write_text(saved.read_text().replace(f"[{table}]\n", f"[{table}]\n{line}\n"))
    job = json.loads(record.read_text())
    job["configs"][0][table]["tune"] = value
    record.write_text(json.dumps(job))
    (run / "tuning.json").write_text('{"seconds": "damaged')
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"tuning": {"seconds": 0.1, "products": 2}}))
    assert main(["report", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--epochs", "5", "--quiet"]) == 0
    assert "tune" not in saved.read_text()
    assert "tuning" not in json.loads((run / "result.json").read_text())


@pytest.mark.parametrize("setting", ["run.precision=fp64", "run.order=none", "model.hidden=8", "train.seed=5"])
def test_a_resumed_run_keeps_what_changes_results(setting: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run goes on as another one."""
    assert main(["train", "--resume", str(run), "--epochs", "5", "--set", setting]) == 2
    assert "what belongs to the machine: run.threads" in capsys.readouterr().err


def test_resuming_in_python_takes_them_too(tmp_path: Path) -> None:
    """Fails if Trainer.resume refuses threads, or a change of them changes a bit."""
    losses = []
    for more in ({}, {"threads": 1, "timeout_s": 50.0}):
        trainer = mggcn.Trainer(graph(), mggcn.GCN(hidden=(4,)), ranks=1)
        trainer.fit(epochs=2)
        losses.append([row["loss"] for row in trainer.resume(epochs=4, **more)])  # type: ignore[arg-type]
    assert losses[0] == losses[1]
    with pytest.raises(ConfigError, match=r"of \[run\] what belongs to the machine: threads, bind"):
        trainer.resume(epochs=6, precision="fp64")  # type: ignore[call-arg]


def test_a_lost_rank_says_how_to_go_on(run: Path) -> None:
    """Fails if the loss of a rank names neither what is saved nor the command that goes on."""

    def lost() -> dict[str, object]:
        raise CommError("rank 1 was ended by SIGKILL")

    with pytest.raises(CommError, match=r"by SIGKILL; 3 epochs are saved, continue with: mggcn train --resume \S*run"):
        command._train(run, True, lost)


def test_a_complete_run_says_what_it_does_not_take(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a limit that a complete run has no use for is passed over in silence, or a folder changes by it."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words, named in (
        ([], ""),
        (["--memory-limit", "5GiB"], ", and another run.memory_limit would change nothing"),
        (
            ["--set", "run.timeout_s=77", "--memory-limit", "5GiB"],
            ", and another run.memory_limit, run.timeout_s would change nothing",
        ),
        (["--ranks", "2"], ", and another run.ranks would change nothing"),
    ):
        assert main(["train", "--resume", str(run), *words]) == 0
        said = f"the run in {run} is complete{named}; --epochs with a larger number extends it\n"
        assert capsys.readouterr().out.startswith(said)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("compiles", [False, True])  # as at the first start after an installation
def test_a_resumed_run_says_the_peak_of_what_it_may_use(
    compiles: bool, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the limit is one of another command, or lacks what this process, whose memory the peak has, holds."""
    monkeypatch.setattr(device, "compiles_modules", lambda: compiles)
    run = tmp_path / "run"
    words = ["--epochs", "3", "--set", "model.hidden=4", "--out", str(run), "--quiet"]
    assert main(["train", str(trained.parent / "store"), *words]) == 0
    (rank,) = json.loads((run / "plan.json").read_text())["per_rank"]
    peak, own = rank["total_bytes"], rank["regions"]["runtime"]
    for module in (local, plan, regroup):
        monkeypatch.setattr(module, "free_bytes", lambda: peak - own)
    monkeypatch.setattr(local, "process_bytes", lambda _: own)
    for epochs, words, limit in (("4", [], peak), ("5", ["--memory-limit", "5GiB"], 5 << 30)):
        assert main(["train", "--resume", str(run), "--epochs", epochs, *words]) == 0
        assert f"predicted peak {human(peak)} of {human(limit)} per rank;" in capsys.readouterr().out
