"""Runs and predictions from disk that are killed at any moment, or whose disk is full: nothing is left, the bits stay."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mggcn.host import user_cache
from mggcn.planning import disk as planning
from mggcn.runs import predict as predicting
from mggcn.runs import prediction_files
from mggcn.runs.folder import is_run
from tests.cli.runs import finish, history, refused, result, run_main, same_tensors, start

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 6
SETTINGS = [
    *("--threads", "1", "--seed", "6737", "--quiet", "--epochs", str(EPOCHS), "--set", "model.hidden=24"),
    *("--set", "model.dropout=0.3", "--set", "train.checkpoint_every=1", "--set", "run.capacity=disk"),
]
RANKS = ["--ranks", "2", "--transport", "threads"]
FEW = 3
"""Random moments of a test; `-m slow` has 20."""
MANY = [FEW, pytest.param(20, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 64 rows, and tables written by as many: there is always something half done."""
    monkeypatch.setattr(planning, "WINDOW_BYTES", 1)
    monkeypatch.setattr(prediction_files, "ROWS", 64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "community"
    sizes = ["--vertices", 1500, "--edges", 6000, "--features", 20, "--classes", 4, "--seed", 71]
    assert run_main("generate", "community", folder, *sizes) == 0
    return folder


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed, on one rank, with its scratch beside it."""
    return undisturbed(store, tmp_path_factory.mktemp("whole"))


def undisturbed(store: Path, folder: Path, *more: str) -> Path:
    assert run_main(*training(store, folder, *more)) == 0
    return folder / "run"


def training(store: Path, place: Path, *more: str) -> list[object]:
    """The command that trains in the run folder and scratch of a place."""
    (place / "scratch").mkdir(parents=True, exist_ok=True)
    return ["train", store, *SETTINGS, *more, "--set", f"run.scratch={place / 'scratch'}", "--out", place / "run"]


def killed_after(seconds: float, *command: object) -> bool:
    """Run a command that is killed after so many seconds; return whether it was before its end."""
    process = start(*command)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    code, _, err = finish(process)
    assert code in (0, -signal.SIGKILL), err
    return code != 0


def timed(*command: object) -> float:
    """Seconds of a command as a process."""
    began = time.perf_counter()
    code, _, err = finish(start(*command))
    assert code == 0, err
    return time.perf_counter() - began


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_alike(place: Path, other: Path) -> None:
    """A run has the bits of another one, and leaves nothing but what that one leaves."""
    run = place / "run"
    untimed = [[{k: v for k, v in row.items() if k != "disk_wait_seconds"} for row in history(f)] for f in (run, other)]
    assert untimed[0] == untimed[1]
    assert same_tensors(run, other)
    assert [result(run)[name] for name in ("best", "final")] == [result(other)[name] for name in ("best", "final")]
    # A checkpoint that is written again has another name than the one that it replaces.
    left, usual = ([re.sub(r"(-epoch-\d+)-\d+", r"\1", name) for name in names(f)] for f in (run, other))
    assert left == usual
    assert names(place / "scratch") == []


def go_on(command: list[object], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resume a run, or begin it again where the command says that there is none."""
    capsys.readouterr()
    code = run_main("train", "--resume", place / "run", "--quiet")
    err = capsys.readouterr().err
    assert err.count("\n") == (code != 0), err
    assert code == (0 if is_run(place / "run") else 2), err
    if code:
        said = "there is no run folder" if not (place / "run").exists() else "remove it, and start the run again"
        assert said in err
        shutil.rmtree(place / "run", ignore_errors=True)
        assert run_main(*command) == 0


@pytest.mark.parametrize("moments", MANY)
@pytest.mark.parametrize("more", [[], pytest.param(RANKS, marks=pytest.mark.full)], ids=["one rank", "two ranks"])
def test_a_run_killed_at_any_moment_goes_on_with_the_same_bits(
    moments: int, more: list[str], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a kill, in set-up, an epoch or a checkpoint, loses a bit, or leaves a file behind the next command."""
    whole = undisturbed(store, tmp_path / "whole", *more)
    seconds = timed(*training(store, tmp_path / "timed", *more))
    draw, kills = random.Random(f"{moments} {more}"), 0
    for number in range(moments):
        place = tmp_path / f"killed-{number}"
        command = training(store, place, *more)
        kills += killed_after(draw.uniform(0, seconds), *command)
        if is_run(place / "run") and number % 2:
            kills += killed_after(draw.uniform(0, seconds), "train", "--resume", place / "run", "--quiet")
        assert names(place / "scratch") == []
        go_on(command, place, capsys)
        assert_alike(place, whole)
    assert kills > moments // 2
    assert not list(user_cache().rglob("*.tmp"))


def predicting_to(run: Path, out: Path, *more: str) -> list[object]:
    return ["predict", run, "--out", out, *more]


@pytest.mark.parametrize("moments", MANY)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("p.csv", []),
        pytest.param("p.npy", ["--probabilities"], marks=pytest.mark.full),
        pytest.param("p.npy", ["--classes"], marks=pytest.mark.full),
    ],
)
def test_a_prediction_killed_at_any_moment_leaves_nothing(
    moments: int, name: str, more: list[str], whole: Path, tmp_path: Path
) -> None:
    """Fails if the same command, given again after a kill, writes another byte or leaves a file beside its own."""
    first, out, before = tmp_path / "first", tmp_path / "again" / name, names(whole)
    for folder in (first, out.parent):
        folder.mkdir()
    seconds = timed(*predicting_to(whole, first / name, *more))
    draw, kills = random.Random(f"{moments} {name} {more}"), 0
    for number in range(moments):
        for _ in range(1 + number % 2):
            kills += killed_after(draw.uniform(0, seconds), *predicting_to(whole, out, *more))
        assert run_main(*predicting_to(whole, out, *more)) == 0
        assert names(out.parent) == [name]
        assert out.read_bytes() == (first / name).read_bytes()
        out.unlink()
    assert kills > moments // 2
    assert names(whole) == before


def test_a_kill_while_a_table_is_written_costs_the_table_alone(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if whole scores are computed again, are taken for those of other weights or kinds, or are left behind."""
    out = tmp_path / "p.csv"
    assert run_main(*predicting_to(whole, tmp_path / "first.csv")) == 0

    def struck(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(prediction_files, "_write_csv", struck)
        assert killed_after(60, *predicting_to(whole, out))
    left = names(tmp_path / "p.csv.partial")
    assert left == ["scores.npy", "whole.json"]
    shutil.copytree(tmp_path / "p.csv.partial", tmp_path / "kept")
    scored, score = list[Path](), predicting._score
    monkeypatch.setattr(predicting, "_score", lambda *given: scored.append(given[1]) or score(*given))
    assert run_main(*predicting_to(whole, out)) == 0
    assert scored == []
    assert out.read_bytes() == (tmp_path / "first.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.csv", "kept", "p.csv"]
    for more in (["--weights", "last"], ["--probabilities"]):
        shutil.copytree(tmp_path / "kept", tmp_path / "p.csv.partial")
        scored.clear()
        assert run_main(*predicting_to(whole, out, *more)) == 0
        assert scored == [whole]
        assert not (tmp_path / "p.csv.partial").exists()


def test_what_was_killed_is_gone_however_the_file_is_made_then(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a prediction of another way leaves what a killed one has left for the file, or takes what is not ours."""
    out = tmp_path / "p.csv"

    def struck(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ways: list[list[str]] = [[], ["--layer", "1"]]
    for first, second in (ways, ways[::-1]):
        with monkeypatch.context() as patch:
            patch.setattr(prediction_files, "_write_csv", struck)
            assert killed_after(60, *predicting_to(whole, out, *first))
        assert names(tmp_path) != []
        assert run_main(*predicting_to(whole, out, *second)) == 0
        assert [path.name for path in tmp_path.iterdir() if path.name != "p.csv"] == []
        out.unlink()
    (tmp_path / "p.csv.partial").mkdir()
    (tmp_path / "p.csv.partial" / "mine.txt").write_text("mine")
    assert run_main(*predicting_to(whole, out, "--layer", "1")) == 0
    assert names(tmp_path) == ["p.csv", "p.csv.partial", "p.csv.partial/mine.txt"]


def test_a_disk_that_is_full_of_half_a_table_costs_the_table_alone(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if scores that took hours are thrown away because their table found no space."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(prediction_files, "_write_csv", full)
        said = refused(capsys, *predicting_to(whole, tmp_path / "p.csv"))
    assert "No space left on device; choose another --out" in said
    assert names(tmp_path) == ["p.csv.partial", "p.csv.partial/scores.npy", "p.csv.partial/whole.json"]
    monkeypatch.setattr(predicting, "_score", None)
    assert run_main(*predicting_to(whole, tmp_path / "p.csv")) == 0
    assert names(tmp_path) == ["p.csv"]


def run_mounted(tmp_path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cases of fault_worker.py where file systems that they mount are seen by nobody else."""
    apart = ["unshare", "--mount", "--propagation", "private", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs unshare(1) and the right to mount")
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("fault_worker.py")
    done = subprocess.run([*apart, sys.executable, worker, file], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]


def program(*words: object) -> dict[str, Any]:
    return {"program": [str(word) for word in words]}


def command(words: list[object]) -> dict[str, Any]:
    return {"command": [str(word) for word in words]}


def on_a_small_disk(tmp_path: Path, sizes: list[int], first: list[object], again: list[object]) -> list[list[Any]]:
    """Give a command on a disk of each size, then another one on a large one; return how each ended.

    Their files are below tmp_path / "disk", of which tmp_path / "SIZE" is then a copy.
    """
    disk, cases = tmp_path / "disk", list[dict[str, Any]]()
    disk.mkdir()
    for size in sizes:
        cases += [
            program("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk),
            program("mkdir", disk / "scratch"),
            command(first),
            program("mount", "-o", "remount,size=1g", disk),
            command(again),
            command(first),
            program("cp", "-r", disk, tmp_path / str(size)),
            program("umount", disk),
        ]
    ended = run_mounted(tmp_path, cases)
    assert not any(end["code"] for case, end in zip(cases, ended, strict=True) if "program" in case), ended
    return [[ended[8 * k + place] for place in (2, 4, 5)] for k in range(len(sizes))]


def occupied_bytes(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("moments", MANY)
def test_a_full_disk_costs_no_bit(moments: int, store: Path, whole: Path, tmp_path: Path) -> None:
    """Fails if a disk that is full, at the rows, a checkpoint or a line of history, is more than a line, or costs a bit."""
    rows, others = result(whole)["disk_file_bytes"], occupied_bytes(whole)
    draw = random.Random(moments)
    sizes = [rows // 2, rows + others // 8, *(int(rows + others * draw.uniform(0, 1.5)) for _ in range(moments - 2))]
    place = tmp_path / "disk"
    first = ["train", store, *SETTINGS, "--set", f"run.scratch={place / 'scratch'}", "--out", place / "run"]
    found = on_a_small_disk(tmp_path, sizes, first, ["train", "--resume", place / "run", "--quiet"])
    for size, (ended, resumed, anew) in zip(sizes, found, strict=True):
        assert ended["code"] in (0, 2), ended
        assert ended["err"].count("\n") == (ended["code"] != 0), ended
        assert not ended["code"] or "free" in ended["err"] or "name a folder" in ended["err"], ended
        assert resumed["err"].count("\n") == (resumed["code"] != 0), resumed
        assert resumed["code"] in (0, 2), resumed
        assert anew["code"] == (2 if resumed["code"] == 0 else 0), anew  # the folder is taken
        assert_alike(tmp_path / str(size), whole)
    assert [ends[0]["code"] for ends in found[:2]] == [2, 2]


@pytest.mark.slow
def test_a_history_that_the_disk_refuses_is_one_line(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a line of history that does not fit ends in a traceback, or the run cannot begin again."""
    monkeypatch.setattr(planning, "WINDOW_BYTES", 32 << 20)
    more = ["--epochs", "150", "--set", "train.checkpoint_every=0", "--set", "train.eval_every=0"]
    whole = undisturbed(store, tmp_path / "whole", *more)
    place, rows = tmp_path / "disk", result(whole)["disk_file_bytes"]
    kept = occupied_bytes(whole) - occupied_bytes(whole / "checkpoints")
    sizes = [rows + kept - (whole / "history.jsonl").stat().st_size // 2]
    first = ["train", store, *SETTINGS, *more, "--set", f"run.scratch={place / 'scratch'}", "--out", place / "run"]
    ((ended, resumed, _),) = on_a_small_disk(tmp_path, sizes, first, ["train", "--resume", place / "run", "--quiet"])
    assert ended["code"] == 2
    assert "history.jsonl could not be written: No space left on device; free space and resume" in ended["err"]
    assert ended["err"].count("\n") == 1
    assert resumed["code"] == 0, resumed
    assert_alike(tmp_path / str(sizes[0]), whole)


@pytest.mark.slow
def test_a_prediction_on_a_full_disk_goes_on(whole: Path, tmp_path: Path) -> None:
    """Fails if a prediction that finds the disk full, for its rows, its scores or its table, is more than a line, or the
    same command then writes another byte.
    """
    (tmp_path / "first").mkdir()
    assert run_main(*predicting_to(whole, tmp_path / "first" / "p.csv")) == 0
    rows = result(whole)["disk_file_bytes"]
    sizes = [rows // 8, rows // 4, rows // 2, rows * 3 // 4, 2 * rows]
    # Its files are in memory, where rows go by the run's own scratch alone.
    settings = (shutil.copytree(whole, tmp_path / "run") / "config.toml").read_text()
    scratch = re.sub("(?m)^scratch = .*", f'scratch = "{tmp_path}/disk"', settings)
    (tmp_path / "run" / "config.toml").write_text(scratch)
    words = predicting_to(tmp_path / "run", tmp_path / "disk" / "p.csv")
    found = on_a_small_disk(tmp_path, sizes, words, words)
    assert [found[0][0]["code"], found[-1][0]["code"]] == [2, 0]
    for size, (ended, again, _) in zip(sizes, found, strict=True):
        assert ended["code"] in (0, 2), ended
        assert ended["err"].count("\n") == (ended["code"] != 0), ended
        assert again["code"] == 0, again
        assert names(tmp_path / str(size)) == ["p.csv", "scratch"]
        assert (tmp_path / str(size) / "p.csv").read_bytes() == (tmp_path / "first" / "p.csv").read_bytes()
