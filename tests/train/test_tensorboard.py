"""TensorBoard's own reader finds what history.jsonl says."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mggcn
from mggcn.config import Config, TrainConfig, from_tables
from mggcn.config.files import from_toml, to_toml
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, write_store
from mggcn.planning.shared import Shared
from mggcn.runs.sweep_worker import train_trial
from mggcn.train.tensorboard import TensorBoard
from tests.graphs import make_graph, pattern


def small() -> Graph:
    return make_graph(pattern("random", 43, 6), num_features=17, num_classes=4, seed=8)


def read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """Scalars by tag, and the texts of the configuration, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("config/text_summary")]
    return scalars, texts


@pytest.mark.parametrize("repeat", [1, 2])
def test_the_reader_finds_the_history(tmp_path: Path, repeat: int) -> None:
    """Fails if an epoch, a score, a repeat or the configuration is missing, or stands at another step."""
    folder = tmp_path / "run"
    settings: dict[str, Any] = {"transport": "threads", "ranks": 2, "threads": 1, "seed": 61, "repeat": repeat}
    mggcn.Trainer(small(), mggcn.GCN(8), out=folder, log="tensorboard", eval_every=3, **settings).fit(epochs=7)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for run in range(repeat):
        scalars, texts = read(folder / "tensorboard" / (f"seed-{61 + run}" if repeat > 1 else ""))
        own = [row for row in rows if row.get("run", 0) == run]
        for tag, key in {
            "loss": "loss",
            "accuracy/val": "val",
            "accuracy/train": "train",
            "seconds": "seconds",
        }.items():
            expected = [(row["epoch"], pytest.approx(row[key], rel=1e-6)) for row in own if row[key] is not None]
            assert scalars[tag] == expected
        assert [step for step, _ in scalars["accuracy/val"]] == [3, 6, 7]
        (text,) = texts
        assert text.removeprefix("```toml\n").removesuffix("```") == to_toml(from_toml(folder / "config.toml"))


def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    """Fails if epochs after the checkpoint that a run went on from are shown twice, or those before it vanish."""
    seen: list[int] = []
    for first, last, loss in ((1, 6, 1.0), (4, 8, 2.0)):
        log = TensorBoard(Config(train=TrainConfig(metric="accuracy")), tmp_path, lambda row: seen.append(row["epoch"]))
        for epoch in range(first, last + 1):
            log({"epoch": epoch, "loss": loss, "val": None})
        log.close()
    scalars, _ = read(tmp_path / "tensorboard")
    assert scalars == {"loss": [(epoch, 1.0 if epoch < 4 else 2.0) for epoch in range(1, 9)]}
    assert seen == list(itertools.chain(range(1, 7), range(4, 9)))


def test_without_the_package_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run without TensorBoard's package trains first, leaves a folder, or does not say what to do."""
    found: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    trainer = mggcn.Trainer(small(), log="tensorboard", out=tmp_path / "run", threads=1)
    with pytest.raises(ConfigError, match=r"not installed: pip install tensorboard, or leave --log out"):
        trainer.fit(epochs=1)
    assert not (tmp_path / "run").exists()


def test_a_sweep_fills_the_table_of_hyperparameters(tmp_path: Path) -> None:
    """Fails if TensorBoard's table lacks a trial, what it set, or its best scores."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    store, shared = tmp_path / "store", Shared()
    write_store(small(), store)
    graph = open_store(store)
    base = from_tables({"run": {"log": "tensorboard", "threads": 1}, "train": {"epochs": 2}, "model": {"hidden": 4}})
    trials: list[dict[str, Any]] = [{"train.lr": 0.5, "model.bias": False}, {"train.lr": 0.25, "model.hidden": (8, 4)}]
    (tmp_path / "config.toml").write_text(to_toml(base))
    for number, settings in enumerate(trials, start=1):
        result = train_trial(tmp_path, settings, number, graph, store, shared, 1)
        events = EventAccumulator(str(tmp_path / "trials" / f"{number:03d}" / "tensorboard"))
        events.Reload()
        content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
        start = HParamsPluginData.FromString(content).session_start_info
        values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
        assert values == {key: "8,4" if key == "model.hidden" else value for key, value in settings.items()}
        [event] = events.Scalars("best/val")
        assert event.value == pytest.approx(result["best"]["val"], rel=1e-6)
