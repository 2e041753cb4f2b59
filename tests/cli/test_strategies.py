"""The command under the other strategies: trained as processes, interrupted, resumed, bytes as planned."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from mggcn.memory.units import human
from tests.cli.runs import history, interrupt, result, run_main, same_tensors, saved_epochs, start

EXACT = ("halo", "slice", "delayed")
STRATEGIES = (*EXACT, "delayed --delay 2")
STEPS = 5
"""Of an epoch of batches of 6 of the 30 training vertices."""
SETTINGS = ["--threads", 1, "--seed", 7333, "--set", "model.dropout=0.4", "--set", "model.hidden=24"]


def train(store: Path, folder: Path, strategy: str, ranks: int, epochs: int, transport: str = "threads") -> Path:
    ways = ["--ranks", ranks, "--transport", transport, "--strategy", *strategy.split()]
    assert run_main("train", store, *SETTINGS, *ways, "--epochs", epochs, "--out", folder, "--quiet") == 0
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.slow if s in EXACT else ()) for s in STRATEGIES]
)
def test_processes_interrupted_and_resumed(community: Path, tmp_path: Path, strategy: str) -> None:
    """Fails if gloo moves other rows than threads do, or an interruption changes a bit."""
    broken = tmp_path / "broken"
    ways = ["--ranks", 2, "--strategy", *strategy.split(), "--set", "train.checkpoint_every=2"]
    process = start("train", community, *SETTINGS, *ways, "--epochs", 10**6, "--out", broken, "--quiet")
    code, _, err = interrupt(process, broken, signal.SIGTERM, 3)
    assert (code, err) == (143, "mggcn: interrupted by SIGTERM\n")
    done = saved_epochs(broken)
    assert len(history(broken)) == done >= 3
    # Threads move the same rows, and start sooner.
    assert run_main("train", "--resume", broken, "--epochs", done + 5, "--transport", "threads", "--quiet") == 0
    whole = train(community, tmp_path / "whole", strategy, 2, done + 5)
    assert history(broken) == history(whole)
    assert same_tensors(broken, whole)
    assert run_main("predict", broken) == 0
    assert run_main("predict", whole) == 0
    assert np.array_equal(np.load(broken / "scores.npy"), np.load(whole / "scores.npy"))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("ranks", [2, 3])
def test_measured_bytes_are_those_of_the_plan(community: Path, tmp_path: Path, strategy: str, ranks: int) -> None:
    """Fails if the counter of a run and plan.json differ by a byte per epoch."""
    folders = [train(community, tmp_path / str(epochs), strategy, ranks, epochs) for epochs in (2, 5)]
    sent = [result(folder)["bytes_sent"] for folder in folders]
    planned = json.loads((folders[0] / "plan.json").read_text())["per_rank"][0]
    per_epoch = planned["bytes_sent_per_epoch"] + planned["bytes_sent_per_evaluation"]
    assert sent[1] - sent[0] == 3 * per_epoch > 0
    assert result(folders[0])["bytes_sent_per_epoch"] == planned["bytes_sent_per_epoch"]


@pytest.mark.parametrize(
    "way", [[], ["--set", "run.batches=cooperative"], ["--set", "sample.halo=history"]], ids=["own", "shared", "cache"]
)
def test_an_epoch_of_batches_sends_what_all_of_its_steps_send(
    community: Path, tmp_path: Path, way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if bytes and messages of an epoch are those of one of its steps."""
    ways = [*SETTINGS, "--ranks", 2, "--transport", "threads", "--batch", 6, "--fanout", "3,3", *way]
    assert run_main("plan", community, *ways) == 0
    text = capsys.readouterr().out
    for epochs in (2, 3):
        folder = tmp_path / str(epochs)
        assert run_main("train", community, *ways, "--epochs", epochs, "--out", folder, "--quiet") == 0
    planned = json.loads((folder / "plan.json").read_text())["per_rank"][0]
    fewer, more = (result(tmp_path / str(epochs)) for epochs in (2, 3))
    assert more["bytes_sent_per_epoch"] == planned["bytes_sent_per_epoch"]
    assert planned["messages_per_epoch"] % STEPS == 0
    sent, evaluation = more["bytes_sent"] - fewer["bytes_sent"], planned["bytes_sent_per_evaluation"]
    if "run.batches=cooperative" in way:  # planned for batches as large as they may be
        assert planned["bytes_sent_per_epoch"] / STEPS < sent - evaluation <= planned["bytes_sent_per_epoch"]
    else:
        hit_rates = 2 * 2 * 8 if way else 0  # two numbers of two layers are summed with each row of the history
        assert sent == planned["bytes_sent_per_epoch"] + evaluation + hit_rates
    assert human(planned["bytes_sent_per_epoch"]) in text
