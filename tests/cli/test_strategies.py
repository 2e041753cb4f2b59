"""The command under the other strategies: trained as processes, interrupted, resumed, predicted with, bytes as planned."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.cli.runs import history, interrupt, losses, result, run_main, same_tensors, saved_epochs, start

EXACT = ("halo", "slice", "delayed")
STRATEGIES = (*EXACT, "delayed --delay 2")
EPOCHS = 50
SETTINGS = ["--threads", 1, "--seed", 7333, "--set", "model.dropout=0.4", "--set", "model.hidden=24"]


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", "300", "--edges", 1500, "--seed", 71) == 0
    return store


def train(store: Path, folder: Path, strategy: str, ranks: int, epochs: int, transport: str = "threads") -> Path:
    ways = ["--ranks", ranks, "--transport", transport, "--strategy", *strategy.split()]
    assert run_main("train", store, *SETTINGS, *ways, "--epochs", epochs, "--out", folder, "--quiet") == 0
    return folder


@pytest.fixture(scope="module")
def staged(community: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with: the staged broadcast on two ranks."""
    folder = train(community, tmp_path_factory.mktemp("runs") / "staged", "broadcast", 2, EPOCHS)
    assert run_main("predict", folder) == 0
    return folder


@pytest.mark.covering(0)
@pytest.mark.parametrize("strategy", EXACT)
def test_losses_and_scores_are_those_of_broadcast(community: Path, staged: Path, tmp_path: Path, strategy: str) -> None:
    """Fails if the losses of 50 epochs with dropout, or the scores of the best weights, differ by more than rounding."""
    folder = train(community, tmp_path / "run", strategy, 2, EPOCHS)
    np.testing.assert_allclose(losses(folder), losses(staged), rtol=1e-5)
    assert run_main("predict", folder) == 0
    np.testing.assert_allclose(np.load(folder / "scores.npy"), np.load(staged / "scores.npy"), rtol=1e-3, atol=1e-3)


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
