"""SIGINT, SIGTERM and SIGHUP while a run is set up: one line, the right code, nothing left."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mggcn.runs.local import signalled_stop
from tests.cli.runs import run_main

SIGHUP, SIGINT, SIGTERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Let commands that a test starts heed SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(SIGHUP, before)


def cases(often: set[tuple[Any, ...]], *parameters: tuple[Any, ...]) -> list[Any]:
    """All combinations, for `make test-all` those that are listed: each takes seconds."""
    combinations = itertools.product(*parameters)
    return [pytest.param(*c, marks=pytest.mark.full if c in often else pytest.mark.slow) for c in combinations]


def ends(
    tmp_path: Path, command: list[object], ready: Callable[[], bool], signum: int
) -> tuple[int, str, set[str], set[str]]:
    """Signal a command once it is `ready`; return its code, what it said, and what is left in TMPDIR and in its folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    texts = [sys.executable, "-m", *map(str, command)]
    with subprocess.Popen(texts, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not ready() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signum)
            err = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    left = {path.name for path in temporary.iterdir() if path.name.startswith("mggcn")}
    out = tmp_path / "run"
    return process.returncode, err, left, {path.name for path in out.iterdir()} if out.exists() else set()


def after(seconds: float) -> Callable[[], bool]:
    began = time.monotonic()
    return lambda: time.monotonic() >= began + seconds


@pytest.mark.parametrize(
    ("moment", "ranks", "signum"),
    cases(
        {
            ("planned", 1, SIGTERM),
            ("ranks start", 3, SIGINT),
            ("ranks set up", 1, SIGINT),
        },
        ("planned", "ranks start", "ranks set up"),
        (1, 3),
        (SIGINT, SIGTERM, SIGHUP),
    ),
)
def test_set_up_ends_at_once_and_leaves_nothing(
    community: Path, tmp_path: Path, moment: str, ranks: int, signum: int
) -> None:
    """Fails if a signal in set-up is a traceback, another code, or leaves the folder of a run that never began."""
    out = tmp_path / "run"
    moments: dict[str, Callable[[], bool]] = {
        "planned": lambda: (out / "config.toml").exists(),
        "ranks start": lambda: (out / "job.json").exists(),
        "ranks set up": lambda: (out / "status" / f"rank-{ranks - 1}.json").exists(),
    }
    command: list[object] = ["mggcn", "train", community, "--threads", 1, "--epochs", 10**9, "--ranks", ranks]
    code, err, temporary, left = ends(tmp_path, [*command, "--quiet", "--out", out], moments[moment], signum)
    assert code == 128 + signum, err
    assert err.count("\n") == 1, err
    assert err.startswith("mggcn: interrupted"), err
    assert not temporary
    # Whoever was just quick enough to begin has saved.
    assert not left or "checkpoints" in left


@pytest.mark.parametrize(
    ("moment", "signum"),
    cases(
        set(),
        ("early", "ranks set up", "in an epoch"),
        (SIGINT, SIGTERM),
    ),
)
def test_under_torchrun(community: Path, tmp_path: Path, moment: str, signum: int) -> None:
    """Fails if ranks of torchrun end in a traceback of ours, or leave a folder in TMPDIR or that of a run not begun."""
    out = tmp_path / "run"
    moments: dict[str, Callable[[], bool]] = {
        "early": after(1.0),
        "ranks set up": lambda: (out / "status" / "rank-1.json").exists(),
        "in an epoch": lambda: (out / "history.jsonl").exists(),
    }
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "mggcn"]
    command = [*launcher, "train", community, "--threads", 1, "--epochs", 10**9, "--quiet", "--out", out]
    code, err, temporary, left = ends(tmp_path, command, moments[moment], signum)
    assert code != 0
    ours = [line for line in err.splitlines() if line.startswith("mggcn:")]
    assert len(ours) <= 1, err
    assert "mggcn/" not in err, err
    assert not temporary
    assert not left or "checkpoints" in left


@pytest.mark.parametrize(
    ("ranks", "signum", "seconds"), cases({(3, SIGINT, 2.5)}, (1, 3), (SIGINT, SIGTERM), (1.0, 2.5))
)
def test_a_prediction_ends_at_once(community: Path, tmp_path: Path, ranks: int, signum: int, seconds: float) -> None:
    """Fails if a signal in a prediction is a traceback, or leaves part of the scores."""
    out = tmp_path / "run"
    threads = ["--ranks", ranks, *(["--transport", "threads"] if ranks > 1 else [])]
    assert run_main("train", community, "--threads", 1, "--epochs", 2, *threads, "--quiet", "--out", out) == 0
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(config.replace('transport = "threads"', 'transport = "gloo"'))
    before = {path.name for path in out.iterdir()}
    code, err, temporary, left = ends(tmp_path, ["mggcn", "predict", out], after(seconds), signum)
    logs = {name for name in left if name.startswith("rank-")}
    if code == 0:
        assert left - logs == before | {"scores.npy"}
        return
    assert code == 128 + signum, err
    assert err.count("\n") == 1, err
    assert not temporary
    assert left - logs in (before, before | {"scores.npy"})


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (1, "auto"),
        pytest.param(2, "threads", marks=pytest.mark.slow),
        pytest.param(2, "gloo", marks=pytest.mark.slow),
    ],
)
def test_a_hangup_saves_a_run(community: Path, tmp_path: Path, ranks: int, transport: str) -> None:
    """Fails if SIGHUP ends a run without a checkpoint or its history, or with another code than 129."""
    out = tmp_path / "run"
    command: list[object] = ["mggcn", "train", community, "--threads", 1, "--epochs", 10**9, "--quiet", "--out", out]
    history = out / "history.jsonl"
    code, err, temporary, left = ends(
        tmp_path,
        [*command, "--ranks", ranks, *(["--transport", transport] if ranks > 1 else [])],
        lambda: history.exists() and history.stat().st_size > 0,
        SIGHUP,
    )
    assert code == 129, err
    assert "SIGHUP" in err
    assert "Traceback" not in err
    assert (out / "checkpoints" / "latest").exists(), left
    assert not temporary


def test_a_hangup_that_is_ignored_ends_nothing() -> None:
    """Fails if a run under nohup obeys SIGHUP, or if the handler that was there before is not put back."""
    ours: list[int] = []
    before = signal.signal(SIGHUP, signal.SIG_IGN)
    try:
        with signalled_stop() as stop:
            os.kill(os.getpid(), SIGHUP)
            assert not stop.signal
        assert signal.getsignal(SIGHUP) == signal.SIG_IGN
        signal.signal(SIGHUP, lambda number, frame: ours.append(number))
        with signalled_stop() as stop:
            os.kill(os.getpid(), SIGHUP)
            assert stop.signal == SIGHUP
        os.kill(os.getpid(), SIGHUP)
        assert ours == [SIGHUP]
    finally:
        signal.signal(SIGHUP, before)
