"""What a run says before and while it trains, on screen and in its history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.config import TrainConfig, from_tables
from mggcn.planning.text import subject
from mggcn.train.optimizer import learning_rate
from tests.cli.runs import history, result, run_main


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", "120", "--edges", 500, "--seed", 1913) == 0
    return store


def test_a_run_says_what_it_is_and_takes_before_it_allocates(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if store, model, choice, peak or seconds are not told, or only once the memory is taken."""
    said: list[str] = []

    def stop_here(*arguments: Any, **named: Any) -> None:
        if text := capsys.readouterr().out:  # the other rank comes later
            said.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("mggcn.assemble.rank.make_rank", stop_here)
    two = ["--ranks", 2, "--transport", "threads", "--threads", 1, "--epochs", 30, "--set", "model.hidden=8"]
    for settings in ([], ["--strategy", "auto"]):
        assert run_main("train", community, *two, *settings, "--out", tmp_path / f"run{len(said)}") == 130
    for text in said:
        assert text.startswith(f"store {community}: 120 vertices, 1,000 edges (symmetric), ")
        assert re.search(r"^gcn \d+ -> 8 -> \d+, fp32, 2 ranks on cpu, order random, strategy \w+$", text, re.M)
        peak = r"^predicted peak [\d.]+ MiB of [\d.]+ GiB per rank; [\d.]+ m?s per epoch, [\d.]+ m?s for 30 epochs"
        assert re.search(peak, text, re.M)
        assert "run folder" not in text
    assert "strategy and order are those of the settings; --strategy auto" in said[0]
    assert re.search(r"^\w+, order random is chosen: .* predicted", said[1], re.M)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["kind=gat", "heads=2", "norm_layer=batch", "residual=linear", "jumping=concat"],
            "gat 3 -> 8 -> 2, 2 heads, batch norm, linear residual, jumping concat, fp32, 1 rank on cpu, order random, "
            "strategy broadcast; weights and types of edges are not read",
        ),
        (
            ["kind=sage", "aggregator=max"],
            "sage 3 -> 8 -> 2, max, fp32, 1 rank on cpu, order random, strategy broadcast; weights and types of edges are "
            "not read",
        ),
        (["kind=rgcn"], "rgcn 3 -> 8 -> 2, fp32, 1 rank on cpu, order random, strategy broadcast"),
        (
            ["kind=gcn"],
            "gcn 3 -> 8 -> 2, fp32, 1 rank on cpu, order random, strategy broadcast; types of edges are not read",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_says_what_its_model_is_and_does_not_read(settings: list[str], line: str) -> None:
    """Fails if a norm, heads or a residual are not named, or weights and types go unread without a word."""
    rng = np.random.default_rng(5501)
    ring = np.stack([np.arange(30), np.roll(np.arange(30), 1)])
    graph = mggcn.load(
        np.concatenate([ring, ring[::-1]], axis=1),
        features=rng.random((30, 3), dtype=np.float32),
        labels=np.arange(30) % 2,
        splits={"train": np.arange(30) < 20},
        weights=rng.random(60, dtype=np.float32),
        edge_types=np.arange(60) // 30,
    )
    given = {name: int(value) if value.isdigit() else value for name, value in (pair.split("=") for pair in settings)}
    model = from_tables({"model": {**given, "hidden": [8]}}).model
    assert subject(mggcn.Trainer(graph, model, threads=1).plan.run)[1] == line


def test_a_folder_is_named_once_it_stays(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run that is refused names a folder that goes again, or a run that trains names none or two."""
    monkeypatch.chdir(tmp_path)
    assert run_main("train", community, "--threads", 1, "--epochs", 1, "--split", 7) == 2
    assert "run folder" not in capsys.readouterr().out
    assert list(tmp_path.glob("runs/*")) == []
    assert run_main("train", community, "--threads", 1, "--epochs", 1) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert capsys.readouterr().out.count(f"run folder runs/{folder.name}\n") == 1


def test_the_history_has_the_learning_rate_and_a_resumed_run_speaks_too(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the rate is not that of the epoch, or --resume says nothing of what is left."""
    step = ["schedule=step", "schedule_step=2", "warmup=3"]
    settings = ["--threads", 1, "--epochs", 5, *(part for s in step for part in ("--set", f"train.{s}"))]
    run = tmp_path / "run"
    assert run_main("train", community, *settings, "--out", run, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    config = TrainConfig(epochs=5, schedule="step", schedule_step=2, warmup=3)
    assert [row["lr"] for row in history(run)] == [learning_rate(config, epoch) for epoch in range(5)]
    planned = result(run)["planned_peak_bytes"]
    (run / "result.json").unlink()
    assert run_main("train", "--resume", run) == 0
    out = capsys.readouterr().out
    assert f"predicted peak {planned / 2**20:.2f} MiB" in out
    assert " for 0 epochs" in out
    assert f"run folder {run}\n" in out
