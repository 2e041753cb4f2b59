"""Faults of whole runs: killed at any write, full disks, memory that fails, ranks and launchers killed, slow ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from tests.cli.runs import history, run_main, same_tensors, saved_epochs, start
from tests.graphs import make_graph, on_ranks, pattern

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["--threads", "1", "--seed", "4127", "--set", "model.hidden=5", "--set", "model.dropout=0.3", "--quiet"]
EPOCHS = 6
EVERY = ["--set", "train.checkpoint_every=2", "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", 120, "--edges", 500, "--seed", 71) == 0
    return store


@pytest.fixture(scope="module")
def whole(community: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_main("train", community, *SETTINGS, *EVERY, "--out", folder) == 0
    return folder


def run_cases(tmp_path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run commands with faults planted; see fault_worker.py."""
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([case | {"command": [str(word) for word in case["command"]]} for case in cases]))
    program = str(Path(__file__).with_name("fault_worker.py"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program, str(file)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"code"')]


BATCHES = ["--batch", "5", "--fanout", "4,3"]


def train(community: Path, folder: Path, *more: object) -> list[object]:
    return ["train", community, *SETTINGS, *EVERY, *more, "--out", folder]


@pytest.mark.full
def test_a_run_killed_at_any_write_goes_on_with_the_same_bits(
    community: Path, whole: Path, tmp_path: Path, sample: Any
) -> None:
    """Fails if a kill in set-up, while a checkpoint is written or at the end loses more than the last epochs, or a bit."""
    cases: list[dict[str, Any]] = []
    kills = sample(range(1, 73), 6)
    for at in kills:
        folder = tmp_path / f"killed-{at}"
        cases.append({"kill_at": at, "command": train(community, folder)})
        cases.append({"command": ["train", "--resume", folder, "--quiet"]})
        cases.append({"command": train(community, folder)})
    found = run_cases(tmp_path, cases)
    killed = 0
    for at, first, resumed, anew in zip(kills, found[0::3], found[1::3], found[2::3], strict=True):
        folder = tmp_path / f"killed-{at}"
        killed += first["code"] == -signal.SIGKILL
        for end in (resumed, anew):
            assert "Traceback" not in end["err"], end["err"]
        if resumed["code"]:  # not yet a run: it says so, and a new one begins there, or says why not
            assert resumed["code"] == 2
            assert resumed["err"].count("\n") == 1
            continue
        assert history(folder) == history(whole)
        assert same_tensors(folder, whole)
        litter = [path for path in folder.rglob(".*") if path.name.endswith(".tmp") or path.name.startswith(".ranks")]
        assert not litter
    assert killed >= 5 / 6 * len(kills)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [pytest.param([], id="the whole graph"), pytest.param(BATCHES, id="batches", marks=pytest.mark.slow)],
)
def test_a_full_disk_is_one_line(more: list[str], community: Path, tmp_path: Path, sample: Any) -> None:
    """Fails if a write that the disk refuses ends in a traceback, in silence, or takes a checkpoint that stood."""
    sizes = [0, *sample((int(40 * 1.6**k) for k in range(12)), 4), 20_000, 10**7]
    runs = [tmp_path / f"full-{size}" for size in sizes]
    ended = run_cases(
        tmp_path,
        [{"fsize": size, "command": train(community, run, *more)} for size, run in zip(sizes, runs, strict=True)],
    )
    for size, end in zip(sizes, ended, strict=True):
        assert end["code"] in (0, 2), (size, end)
        assert "Traceback" not in end["err"], (size, end["err"])
        assert end["err"].count("\n") == (end["code"] != 0), (size, end["err"])
    assert ended[0]["code"] == 2
    assert ended[-1]["code"] == 0
    stands = [(run / "checkpoints" / "latest").exists() for run in runs]
    assert any(stands[:-1])
    again = run_cases(tmp_path, [{"command": ["train", "--resume", run, "--quiet"]} for run in runs])
    for size, stood, end in zip(sizes, stands, again, strict=True):
        assert "Traceback" not in end["err"], (size, end["err"])
        assert not stood or end["code"] == 0, (size, end["err"])


@pytest.mark.full
def test_an_allocation_that_fails_is_one_line(community: Path, tmp_path: Path, sample: Any) -> None:
    """Fails if the n-th allocation of a rank, for any n, ends in a traceback or a hang, on one rank or on three."""
    moments = [*sample(range(1, 14), 4), 10**6]
    cases = [
        {"allocate": at, "command": [*train(community, tmp_path / f"{ranks}-{at}"), *several]}
        for ranks, several in ((1, []), (3, ["--ranks", "3", "--transport", "threads"]))
        for at in moments
    ]
    ended = run_cases(tmp_path, cases)
    assert [end["code"] for case, end in zip(cases, ended, strict=True) if case["allocate"] == 10**6] == [0, 0]
    failed = [end for end in ended if end["code"]]
    assert len(failed) >= 20 / 28 * len(cases)
    for end in failed:
        assert end["code"] == 1
        assert end["err"].startswith("mggcn: memory ran out: planted")
        assert end["err"].count("\n") == 1


@pytest.mark.parametrize(
    ("who", "moment", "more"),
    [
        pytest.param("a rank", 0.0, [], marks=pytest.mark.full),
        pytest.param("a rank", 0.0, BATCHES, marks=pytest.mark.slow),
        pytest.param("a rank", 0.0, [*BATCHES, "--set", "sample.rows=parts"], marks=pytest.mark.full),
        pytest.param("the launcher", 0.013, [], marks=pytest.mark.slow),
        *(
            pytest.param(who, 0.007 * k, BATCHES if k % 3 == 0 else [], marks=pytest.mark.slow)
            for k in range(1, 16)
            for who in ("a rank", "the launcher")
        ),
    ],
)
def test_ranks_and_launchers_are_killed(
    community: Path, tmp_path: Path, who: str, moment: float, more: list[str]
) -> None:
    """Fails if a killed rank is not named, one outlives its launcher, or the run does not go on with the same bits."""
    folder, other = tmp_path / "run", tmp_path / "whole"
    settings = [
        *SETTINGS,
        *more,
        "--ranks",
        2,
        "--set",
        "train.checkpoint_every=1",
    ]  # nearly always writing a checkpoint
    process = start("train", community, *settings, "--epochs", 10**6, "--out", folder)
    pids: list[int] = []
    with process:
        try:
            deadline = time.monotonic() + 120
            while saved_epochs(folder) < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            pids = [json.loads(path.read_text())["pid"] for path in sorted((folder / "status").glob("rank-*.json"))]
            time.sleep(moment)
            os.kill(pids[1] if who == "a rank" else process.pid, signal.SIGKILL)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    if who == "a rank":
        assert err.startswith("mggcn: rank 1 was killed by SIGKILL")
    done = saved_epochs(folder) + random.Random(6).randrange(2, 4)
    threads = ["--transport", "threads"]
    assert run_main("train", "--resume", folder, *threads, "--epochs", done, "--quiet") == 0
    assert run_main("train", community, *settings, *threads, "--epochs", done, "--out", other) == 0
    assert history(folder) == history(other)
    assert not list(folder.glob(".ranks-*"))


def test_a_slow_rank_changes_nothing() -> None:
    """Fails if ranks that wait for a slow one time out, or take what is not there yet."""
    graph = make_graph(pattern("random", 43, 6), num_features=9, num_classes=3, seed=8)
    config = Config(
        model=ModelConfig(hidden=(5,), dropout=0.3),
        train=TrainConfig(seed=77, epochs=4),
        run=RunConfig(ranks=3, threads=1, transport="threads"),
    )

    def body(rank: Rank, slow: bool) -> list[float]:
        found = []
        for epoch in range(4):
            if slow and rank.comm.rank == 1:
                time.sleep(0.1)
            found.append(rank.trainer.step(epoch))
        return found

    assert on_ranks(config, graph, lambda rank: body(rank, True)) == on_ranks(
        config, graph, lambda rank: body(rank, False)
    )
