"""One loss curve for any number of ranks and any way to start them; interruption and resumption to the bit."""

from __future__ import annotations

import mmap
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.config import Config, TrainConfig
from mggcn.host import GLANCE_S, PeakMemory
from mggcn.model.kinds.dense import Linear
from mggcn.runs.folder import make_run_folder
from mggcn.train.optimizer import learning_rate
from tests.cli.runs import (
    CORA,
    finish,
    history,
    interrupt,
    losses,
    refused,
    result,
    run_main,
    same_tensors,
    saved_epochs,
    saved_tensors,
    start,
)

EPOCHS = 8


@pytest.fixture(scope="module")
def single(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of cora on one rank."""
    folder = tmp_path_factory.mktemp("runs") / "single"
    assert run_main("train", data_root / "cora", *CORA, "--epochs", EPOCHS, "--out", folder, "--quiet") == 0
    return folder


@pytest.mark.full
def test_processes_torchrun_and_an_interruption_give_one_curve(data_root: Path, single: Path, tmp_path: Path) -> None:
    """Fails if gloo or torchrun changes the loss beyond rounding, a bit differs between them, or SIGINT loses an epoch."""
    by_ranks, by_torchrun = tmp_path / "ranks", tmp_path / "torchrun"
    cora, settings = data_root / "cora", [*CORA, "--set", "train.checkpoint_every=2"]
    process = start("train", cora, *settings, "--ranks", 2, "--epochs", 10**6, "--out", by_ranks)
    code, out, err = interrupt(process, by_ranks, signal.SIGINT, EPOCHS)
    assert code == 130, err
    assert f"mggcn train --resume {by_ranks}" in out
    assert err == "mggcn: interrupted by SIGINT\n"
    assert not (by_ranks / "result.json").exists()
    done = saved_epochs(by_ranks)
    assert len(history(by_ranks)) == done >= EPOCHS

    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mggcn")
    process = start("train", cora, *settings, "--epochs", EPOCHS, "--out", by_torchrun, module=launcher)
    code, out, err = finish(process)
    assert code == 0, err
    assert out.count("best validation") == 1
    assert result(by_torchrun)["epochs"] == EPOCHS
    assert history(by_ranks)[:EPOCHS] == history(by_torchrun)
    np.testing.assert_allclose(losses(by_torchrun), losses(single), rtol=1e-5)


def test_resuming_after_sigterm_changes_no_bit(community: Path, tmp_path: Path) -> None:
    """Fails if SIGTERM does not save, or a resumed run differs from an uninterrupted one in a loss, score or weight."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    settings = ["--threads", 1, "--seed", 5150, "--set", "model.dropout=0.4", "--set", "train.checkpoint_every=2"]
    process = start("train", community, *settings, "--epochs", 10**6, "--out", broken, "--quiet")
    code, out, err = interrupt(process, broken, signal.SIGTERM, 3)
    assert (code, out, err) == (143, "", "mggcn: interrupted by SIGTERM\n")
    done = saved_epochs(broken)
    assert len(history(broken)) == done >= 3
    assert run_main("train", "--resume", broken, "--epochs", done + 5, "--quiet") == 0
    assert run_main("train", community, *settings, "--epochs", done + 5, "--out", whole, "--quiet") == 0
    assert history(broken) == history(whole)
    assert same_tensors(broken, whole)
    assert result(broken)["best"] == result(whole)["best"]
    assert f"epochs = {done + 5}\n" in (broken / "config.toml").read_text()


def test_what_resume_refuses(community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --resume silently ignores a setting or an impossible number of epochs, or changes the run it refuses."""
    folder = tmp_path / "run"
    assert run_main("train", community, "--threads", 1, "--epochs", 2, "--out", folder) == 0
    before = (folder / "config.toml").read_text()
    assert "only --epochs may be given" in refused(capsys, "train", "--resume", folder, "--seed", 3)
    assert "only --epochs may be given" in refused(capsys, "train", "--resume", folder, "--set", "run.ranks=2")
    assert "train.epochs expects an integer" in refused(capsys, "train", "--resume", folder, "--epochs", "abc")
    assert "a larger train.epochs extends it" in refused(capsys, "train", "--resume", folder, "--set", "train.lr=1")
    assert (folder / "result.json").exists()
    (folder / "result.json").unlink()
    assert "has trained 2 epochs already" in refused(capsys, "train", "--resume", folder, "--epochs", 1)
    assert "remove --out" in refused(capsys, "train", "--resume", folder, "--out", tmp_path / "other")
    assert (folder / "config.toml").read_text() == before


@pytest.mark.parametrize("ranks", [[], ["--ranks", 3, "--transport", "threads", "--strategy", "delayed", "--delay", 1]])
def test_an_extended_run_is_one_that_never_stopped(community: Path, tmp_path: Path, ranks: list[object]) -> None:
    """Fails if a complete run that goes on differs from a longer one by a bit, also where messages are in flight."""
    schedule = ["schedule=step", "schedule_step=2", "warmup=2"]
    settings = ["--threads", 1, "--set", "model.hidden=8", "--set", "model.dropout=0.4", "--quiet", *ranks]
    settings += [part for s in schedule for part in ("--set", f"train.{s}")]
    short, whole = tmp_path / "short", tmp_path / "whole"
    assert run_main("train", community, *settings, "--epochs", 3, "--out", short) == 0
    assert run_main("train", "--resume", short, "--epochs", 7, "--quiet") == 0
    assert run_main("train", community, *settings, "--epochs", 7, "--out", whole) == 0
    assert history(short) == history(whole)
    assert same_tensors(short, whole)
    keys = ("best", "final", "epochs")
    assert [result(short)[key] for key in keys] == [result(whole)[key] for key in keys]
    assert (short / "config.toml").read_text() == (whole / "config.toml").read_text()


def test_an_extension_may_have_a_schedule_of_its_own(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a new schedule begins elsewhere than where the run stands, or an old cosine is stretched in silence."""
    run, new = tmp_path / "run", TrainConfig(lr=0.2, epochs=6, schedule="cosine", schedule_start=3)
    settings = ["--threads", 1, "--set", "model.hidden=8", "--set", "train.schedule=cosine", "--quiet"]
    assert run_main("train", community, *settings, "--epochs", 3, "--out", run) == 0
    assert "begin a new schedule at epoch 3" in refused(capsys, "train", "--resume", run, "--epochs", 6)
    changes = ["--epochs", 6, "--set", "train.schedule=cosine", "--set", "train.lr=0.2"]
    assert run_main("train", "--resume", run, *changes, "--quiet") == 0
    old = TrainConfig(epochs=3, schedule="cosine")
    rates = [learning_rate(old, e) for e in range(3)] + [learning_rate(new, e) for e in range(3, 6)]
    assert [row["lr"] for row in history(run)] == rates
    assert rates[3] == 0.2


def test_an_early_stop_is_lifted_by_name(community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run that stopped early takes more epochs and does nothing, or cannot be told to go on."""
    run = tmp_path / "run"
    settings = ["--threads", 1, "--set", "model.hidden=8", "--set", "train.lr=0", "--set", "train.patience=2"]
    assert run_main("train", community, *settings, "--epochs", 9, "--out", run, "--quiet") == 0
    assert result(run)["epochs"] == 3
    text = refused(capsys, "train", "--resume", run, "--epochs", 12)
    assert "stopped after 3 epochs, 2 evaluations after its best one; train.patience 0" in text
    assert run_main("train", "--resume", run, "--set", "train.patience=4", "--quiet") == 0
    assert result(run)["epochs"] == 5


def test_a_run_starts_from_another(community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --start-from is ignored, takes weights of another shape, or leaves a folder when it is refused."""
    settings = ["--threads", 1, "--set", "model.hidden=8", "--epochs", 2, "--quiet"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_main("train", community, *settings, "--out", first) == 0
    still = ["--set", "train.lr=0", "--set", "run.precision=fp64"]
    assert run_main("train", community, *settings, *still, "--start-from", first, "--out", second) == 0
    before, after = saved_tensors(first), saved_tensors(second)
    assert all(torch.equal(after[n].float(), before[n]) for n in after if n.startswith("weights."))
    assert "there is no run folder" in refused(capsys, "train", community, "--start-from", tmp_path / "nothing")
    other = [*settings[:3], "model.hidden=9", "--start-from", first, "--out", tmp_path / "third"]
    assert "layers.1.bias is (8,), the model's (9,)" in refused(capsys, "train", community, *other)
    assert not (tmp_path / "third").exists()
    assert "remove --start-from" in refused(capsys, "train", "--resume", first, "--start-from", second)


@pytest.mark.full
def test_predictions_are_those_of_the_best_repeat(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if only the last seed's weights survive, or a run of several seeds is scored with another one's."""
    settings = ["--threads", 1, "--epochs", 4]
    run = tmp_path / "run"
    assert run_main("train", community, *settings, "--repeat", 3, "--seed", 611, "--out", run) == 0
    assert "accuracy of 3 runs, last epoch: train" in capsys.readouterr().out
    settings.append("--quiet")
    found = result(run)
    best = max(found["runs"], key=lambda one: one["best"]["val"])
    assert found["best"] == best["best"]
    for seed, extra in ((best["seed"], []), *((seed, ["--seed", seed]) for seed in (611, 612, 613))):
        alone = tmp_path / f"alone-{seed}-{len(extra)}"
        assert run_main("train", community, *settings, "--seed", seed, "--out", alone) == 0
        for weights in ("best", "last"):
            assert run_main("predict", alone, "--weights", weights) == 0
            assert run_main("predict", run, "--weights", weights, *extra) == 0
            assert np.array_equal(np.load(alone / "scores.npy"), np.load(run / "scores.npy"))
    seeds = "--seed expects one of {}, whose weights are there, got {}"
    assert seeds.format("611, 612, 613", 5) in refused(capsys, "predict", run, "--seed", 5)
    assert seeds.format("611", 612) in refused(capsys, "predict", tmp_path / "alone-611-2", "--seed", 612)
    # A run of the version that kept the last repeat's weights alone; or one that it began.
    shutil.rmtree(run / "repeats" / "seed-611")
    assert run_main("predict", run, "--seed", 612) == 0
    assert seeds.format("612, 613", 611) in refused(capsys, "predict", run, "--seed", 611)
    shutil.rmtree(run / "repeats")
    assert seeds.format("613", 612) in refused(capsys, "predict", run, "--seed", 612)
    assert run_main("predict", run) == 0
    assert run_main("predict", tmp_path / "alone-613-2") == 0
    assert np.array_equal(np.load(tmp_path / "alone-613-2" / "scores.npy"), np.load(run / "scores.npy"))


@pytest.mark.parametrize(
    ("name", "folder"),
    [("../../evil", "_.._evil-1"), ("/abs/evil", "_abs_evil-1"), ("..", "graph-1"), ("Ünï-1.2", "Ünï-1.2-1")],
)
def test_names_of_stores_choose_no_place(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a store's name, which anybody may have written, leads out of runs/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "1")
    assert make_run_folder(Config(), name, None) == Path("runs") / folder
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_default_folders_never_collide(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if two runs of the same second share a folder, or its name is not printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    for name in ("runs/community-20260101-000000", "runs/community-20260101-000000-2"):
        assert run_main("train", community, "--threads", 1, "--epochs", 1) == 0
        assert f"run folder {name}\n" in capsys.readouterr().out
        assert result(tmp_path / name)["epochs"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        ["--set", "model.hidden=64"],
        ["--set", "model.hidden=64", "--set", "run.capacity=disk"],
        pytest.param(["--set", "model.hidden=400,400", "--ranks", 2, "--transport", "gloo"], marks=pytest.mark.slow),
        pytest.param(["--set", "model.hidden=64", "--batch", 2000, "--fanout", "5,5"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_process_holds_what_its_plan_says(settings: list[object], tmp_path: Path) -> None:
    """Fails if pages of libraries that the page cache happens to hold count, or memory of no plan, or a plan has too much.

    Weights of a first layer are wide, so that the copies of a checkpoint are part of the peak.
    """
    where = tmp_path / "store"
    assert run_main("generate", "community", where, "--vertices", 8000, "--edges", 80_000, "--features", 3000) == 0
    given = ["--threads", 1, "--epochs", 3, "--out", tmp_path / "run", "--quiet"]
    code, _, err = finish(start("train", where, *settings, *given, module=("mggcn",)))
    assert code == 0, err
    found = result(tmp_path / "run")
    assert 0.9 * found["planned_peak_bytes"] <= found["measured_peak_bytes"] <= found["planned_peak_bytes"]


def test_pages_that_come_and_go_in_an_epoch_are_no_part_of_the_peak(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run from disk counts pages of mapped edges, which the system takes back as it needs, as its own."""
    size, run_op, glance, glances = 256 << 20, Linear.run, PeakMemory.glance, list[float]()
    with (tmp_path / "edges").open("wb") as file:
        file.truncate(size)
    given = [*CORA, "--epochs", 2, "--set", "run.capacity=disk", "--quiet"]

    def counted(self: PeakMemory) -> None:
        glance(self)
        glances.append(time.monotonic())

    def reading(self: Linear, rt: Any, op: Any) -> None:
        run_op(self, rt, op)
        with (tmp_path / "edges").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            assert not any(pages[:: mmap.PAGESIZE])
            after, deadline = len(glances) + 2, time.monotonic() + 60  # the first may have begun before the pages came
            while len(glances) < after and time.monotonic() < deadline:
                time.sleep(GLANCE_S)
            assert len(glances) >= after
        (tmp_path / "was read").touch()

    for name in ("plain", "reading"):
        code, _, err = finish(start("train", community, *given, "--out", tmp_path / name))
        assert code == 0, err
        monkeypatch.setattr(Linear, "run", reading)
        monkeypatch.setattr(PeakMemory, "glance", counted)
    assert (tmp_path / "was read").exists()  # by the process, which is forked from this one
    plain, read = (result(tmp_path / name)["measured_peak_bytes"] for name in ("plain", "reading"))
    assert abs(read - plain) < size // 4
