"""`mggcn status`: what runs say of themselves, alive, dead and damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mggcn.runs import status
from mggcn.train import heartbeat
from mggcn.train.heartbeat import Heartbeat, Pulse, boot_id, read_pulses, started_at
from tests.cli.runs import refused, run_main

SETTINGS = ["--threads", 1, "--seed", 60, "--set", "model.hidden=4", "--set", "train.checkpoint_every=2", "--quiet"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two complete runs of five epochs."""
    root = tmp_path_factory.mktemp("watched")
    assert run_main("generate", "community", root / "store", "--vertices", 90, "--edges", 300, "--seed", 5) == 0
    for name, ranks in (("one", 1), ("three", 3)):
        several = ["--ranks", ranks, *(["--transport", "threads"] if ranks > 1 else [])]
        out = ["--epochs", 5, "--out", root / "runs" / name]
        assert run_main("train", root / "store", *SETTINGS, *several, *out) == 0
    return root / "runs"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run of three ranks that looks as if it trained on."""
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(trained / "three", folder)
    (folder / "result.json").unlink()
    for rank in range(3):
        write(folder, rank)
    return folder


def write(folder: Path, rank: int, **changes: Any) -> None:
    """A sign of life of this process, which came just now."""
    pulse = Pulse(
        rank=rank,
        state="training",
        epoch=4,
        epochs=5,
        epoch_s=2.0,
        memory_bytes=3 << 20,
        pid=os.getpid(),
        started=started_at(os.getpid()) or 0,
        host=os.uname().nodename,
        boot=boot_id(),
        time_s=time.time(),
    )
    text = json.dumps(dataclasses.asdict(dataclasses.replace(pulse, **changes)))
    (folder / "status" / f"rank-{rank}.json").write_text(text)


def test_complete_runs_are_listed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run of a folder is missing, or a complete one seems to go on."""
    capsys.readouterr()
    assert run_main("status", trained) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(trained / "one"), str(trained / "three")]
    assert all("complete, epoch 5 of 5, loss" in line for line in lines)
    assert run_main("status", trained, "--json") == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [len(run["ranks"]) for run in found] == [1, 3]
    assert all(run["checkpoint_epoch"] == 5 and run["last"]["epoch"] == 5 for run in found)


def test_a_run_that_trains(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if rate, time left, memory or checkpoint are not what the folder says."""
    capsys.readouterr()
    assert run_main("status", run) == 0
    first, saved, *ranks = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run}: training, epoch 4 of 5, 2 s per epoch, 2 s left, loss ")
    assert saved.startswith("last checkpoint: epoch 5, ")
    assert "--resume" not in saved
    assert len(ranks) == 3
    assert all(
        f"rank {r}: alive, pid {os.getpid()} on " in line and "3.00 MiB (planned " in line
        for r, line in enumerate(ranks)
    )


def test_a_run_within_an_epoch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if steps of an epoch or of the checkpoint are not shown, or count for nothing in the time left."""
    for rank in range(3):
        write(run, rank, step=6, steps=8, epoch_s=20.0)
    saved = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().split()[0] / "progress.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"epoch": 4, "step": 3, "steps": 8}))
    capsys.readouterr()
    assert run_main("status", run) == 0
    first, last, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run}: training, epoch 4 of 5, step 6 of 8, 20 s per epoch, 5 s left, loss ")
    assert last.startswith("last checkpoint: epoch 4, step 3, ")


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "of a process that is gone": ({"pid": 2**22 + 1}, "killed", "gone"),
    "of a number that another process has now": ({"started": 1}, "killed", "gone"),
    "that ended in order": ({"state": "interrupted"}, "interrupted", "interrupted"),
    "that failed": ({"state": "failed"}, "failed", "failed"),
    "that is silent on another machine": ({"host": "elsewhere", "time_s": 1.0}, "silent", "silent"),
    "of another machine, just now": ({"host": "elsewhere"}, "training", "alive"),
    "of before this boot": ({"boot": "another", "time_s": 1.0}, "silent", "silent"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_of_three(run: Path, name: str) -> None:
    """Fails if the state of one rank does not show in that of the run, or hides that of others."""
    changes, state, rank_state = CASES[name]
    write(run, 1, **changes)
    found = status.status_of(run)
    assert (found.state, [rank.state for rank in found.ranks]) == (state, ["alive", rank_state, "alive"])
    lines = status.details_of(found)
    assert ("--resume" in lines[0]) == (state not in ("training",))


@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_a_stopped_process(run: Path) -> None:
    """Fails if a process that SIGSTOP holds seems to work."""
    with subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]) as process:
        deadline = time.monotonic() + 20
        while status.process_state(process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.02)
        write(run, 2, pid=process.pid, started=started_at(process.pid))
        assert status.status_of(run).state == "stopped"
        process.kill()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "signs of life": lambda run: (run / "status" / "rank-1.json").write_text('{"rank": 1'),
    "all signs of life": lambda run: [path.unlink() for path in (run / "status").iterdir()],
    "checkpoint": lambda run: (run / "checkpoints" / "latest").write_text("nothing"),
    "no history": lambda run: (run / "history.jsonl").unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_left_out(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a file that is cut or gone ends in a traceback."""
    DAMAGE[name](run)
    capsys.readouterr()
    assert run_main("status", run) == 0
    assert str(run) in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a wrong path is an empty answer."""
    assert "holds no run" in refused(capsys, "status", tmp_path)
    assert "is no folder" in refused(capsys, "status", tmp_path / "none")


def test_signs_of_life_are_rare_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an epoch writes a file, a rate is that of another time, or a full disk ends a run."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    beats = Heartbeat(tmp_path, 2, 1000, 1)
    assert read_pulses(tmp_path, 4)[0].state == "set-up"
    beats.begin(0, 10)
    assert not beats.due
    now[0] += 1.5
    assert beats.due
    beats.beat(0, 40, 0, 77)
    assert not beats.due
    (pulse,) = read_pulses(tmp_path, 4)
    assert (pulse.rank, pulse.state, pulse.epoch, pulse.epoch_s, pulse.memory_bytes) == (2, "training", 40, 0.05, 77)
    assert [path.name for path in (tmp_path / "status").iterdir()] == ["rank-2.json"]
    beats.begin(0, 40, 10, 100)
    now[0] += 2
    beats.beat(0, 41, 60, 77)
    (pulse,) = read_pulses(tmp_path, 4)
    assert (pulse.epoch, pulse.step, pulse.steps, pulse.epoch_s) == (41, 60, 100, pytest.approx(2 / 1.5))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with beats:
        pass
    assert read_pulses(tmp_path, 4)[0].state == "training"
