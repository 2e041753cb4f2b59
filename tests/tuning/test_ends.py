"""How tuning ends: early, interrupted, before the run does, on ranks that are processes, and in the command."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble.plan import host_of, resolve
from mggcn.comm.base import Communicator
from mggcn.comm.failure import Interrupted
from mggcn.config import Config
from mggcn.graph.csr import Graph
from mggcn.graph.store import graph_sha256
from mggcn.runs import train as training
from mggcn.runs import tune
from mggcn.runs.folder import known_plan
from mggcn.runs.local import on_local_ranks
from mggcn.runs.tune import MOST_EPOCHS, tune_products
from mggcn.train.loop import Stop
from mggcn.tuning.epochs import LAST
from mggcn.tuning.exploration import SAMPLES, Exploration, Limits
from mggcn.tuning.record import FORMAT_VERSION, kept_file, read_choices
from tests.cli.runs import history, result, same_tensors
from tests.tuning.runs import EPOCHS, config_of, store_of, trained


def with_train(config: Config, **train: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def watched(graph: Graph, config: Config, out: Path, after: Callable[[int, Stop], None]) -> tuple[Path, Config]:
    """Train on one rank of this process, and call `after` with every epoch's number."""
    planned = training.prepare_run(config, graph, out.parent / "store", out)
    folder, config = planned.folder, planned.config
    stop = Stop()

    def body(comm: Communicator) -> None:
        run = training.PlannedRun(folder, *known_plan(folder, config, graph))

        def on_epoch(row: dict[str, Any]) -> None:
            after(row["epoch"], stop)

        training.train_rank(comm, run, graph, quiet=True, stop=stop, on_epoch=on_epoch)

    on_local_ranks(config, body)
    return folder, config


def stopped(graph: Graph, config: Config, out: Path, epoch: int) -> tuple[Path, Config]:
    """Train up to an epoch, in which a signal comes."""

    def after(number: int, stop: Stop) -> None:
        stop.signal = signal.SIGTERM * (number == epoch - 1)

    with pytest.raises(Interrupted):
        watched(graph, config, out, after)
    return out, resolve(config, graph)


def summary_of(folder: Path) -> dict[str, float]:
    summary: dict[str, float] = json.loads((folder / "tuning.json").read_text())
    return summary


@pytest.mark.usefixtures("blocks_win")
def test_an_interrupted_run_keeps_what_it_knows_and_goes_on(tmp_path: Path) -> None:
    """Fails if a run that is stopped while it explores loses what is clear or its cost, or goes on with another bit."""
    graph, config = store_of(tmp_path), config_of(1, tune="on")
    plain = trained(graph, config_of(1), tmp_path / "plain")
    folder, config = stopped(graph, config, tmp_path / "run", 5)
    kept = read_choices(kept_file(graph_sha256(graph)), host_of(config))
    before = summary_of(folder)
    assert 0 < len(kept) == before["products"] - before["unfinished"]
    assert before["unfinished"] > 0, "in training two calls of each are known"
    training.resume_training(folder, config, graph, quiet=True)
    assert history(folder) == history(plain)
    assert same_tensors(folder, plain)
    after = result(folder)["tuning"]
    assert after == summary_of(folder)
    assert (after["products"], after["beaten"] >= before["beaten"]) == (before["products"], True)
    assert after["seconds"] >= before["seconds"] > 0


def test_a_resumed_run_has_the_epochs_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run that goes on for a few epochs tries what only a whole run can repay."""
    opened: list[int | None] = []
    original = Exploration.open

    def opens(self: Exploration, limits: Limits) -> None:
        opened.append(limits.epochs)
        original(self, limits)

    monkeypatch.setattr(Exploration, "open", opens)
    graph = store_of(tmp_path)
    folder, config = stopped(graph, config_of(1), tmp_path / "run", EPOCHS - 2)
    training.resume_training(folder, config, graph, quiet=True)
    assert [epochs for epochs in opened if epochs is not None] == [EPOCHS, 2]


@pytest.mark.usefixtures("blocks_win")
def test_a_run_that_goes_on_after_tuning_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a resumed run that has nothing to try loses what tuning cost, or says that it came to nothing."""
    graph, plain_config = store_of(tmp_path), with_train(config_of(1), epochs=EPOCHS + 3)
    plain = trained(graph, plain_config, tmp_path / "plain")
    tuning = dataclasses.replace(plain_config, run=dataclasses.replace(plain_config.run, tune="on"))
    folder, config = stopped(graph, tuning, tmp_path / "run", EPOCHS)
    before = summary_of(folder)
    assert before["unfinished"] == 0
    assert before["products"] >= 2
    assert (folder / "products.json").exists()
    capsys.readouterr()
    training.resume_training(folder, config, graph, quiet=False)
    said = capsys.readouterr().out
    assert "no variant was left to try: all sparse products were measured before" in said
    assert result(folder)["tuning"] == before
    assert history(folder) == history(plain)
    assert same_tensors(folder, plain)


def test_an_early_stop_ends_tuning(tmp_path: Path) -> None:
    """Fails if ranks wait for products to be known when training ends by itself, or tuning changes when it does."""
    graph, plain_config = store_of(tmp_path), with_train(config_of(3), lr=0.0, patience=2)
    plain = trained(graph, plain_config, tmp_path / "plain")
    tuning = dataclasses.replace(plain_config, run=dataclasses.replace(plain_config.run, tune="on"))
    folder = trained(graph, tuning, tmp_path / "run")
    assert result(folder)["epochs"] == result(plain)["epochs"] == 3
    assert history(folder) == history(plain)
    found = result(folder)["tuning"]
    assert found["products"] >= 3


@pytest.mark.usefixtures("blocks_win")
def test_ranks_report_after_an_epoch_known_beforehand(tmp_path: Path) -> None:
    """Fails if a run writes what it knows at its end only, or waits for products of rare evaluations."""
    graph = store_of(tmp_path)
    config = with_train(config_of(1, tune="on"), eval_every=LAST - 1)
    known: list[int] = []

    def after(number: int, stop: Stop) -> None:
        if kept_file(graph_sha256(graph)).exists():
            known.append(number)

    folder, _ = watched(graph, config, tmp_path / "run", after)
    assert known == [LAST, LAST + 1, LAST + 2]
    # Training's products are all known; those of evaluations alone were called once.
    found = result(folder)["tuning"]
    assert found["products"] > found["unfinished"] > 0


@pytest.mark.full
def test_processes_tune_with_the_same_bits(tmp_path: Path) -> None:
    """Fails if ranks that are processes do not agree on an epoch, or real seconds of theirs do not come together."""
    graph = store_of(tmp_path)
    plain = trained(graph, with_train(config_of(2), epochs=12), tmp_path / "plain")
    tuning = config_of(2, tune="on")
    tuning = dataclasses.replace(tuning, run=dataclasses.replace(tuning.run, transport="gloo"))
    folder = trained(graph, with_train(tuning, epochs=12), tmp_path / "run")
    assert history(folder) == history(plain)
    found = result(folder)["tuning"]
    assert found["products"] >= 4
    assert 0 < found["seconds"] < 60


def test_real_seconds_come_from_the_calls(tmp_path: Path) -> None:
    """Fails if what is timed is not the calls of the epochs, or a product stays open although nothing limits its trials."""
    graph = store_of(tmp_path)
    config = resolve(config_of(1), graph)
    said: list[str] = []
    began = time.perf_counter()
    found = tune_products(config, graph, 1e9, said.append, Stop())
    whole_s = time.perf_counter() - began
    seconds = [value for _, trial in found.trials for values in trial.seconds for value in values]
    assert 0 < min(seconds)
    assert sum(seconds) < whole_s
    assert all(len(trial.seconds[0]) == SAMPLES and trial.known for _, trial in found.trials)
    assert len(found.kept()) >= 2
    assert 0 < found.cost_s < sum(seconds)
    assert all(f"of at most {MOST_EPOCHS}: " in line for line in said)


@pytest.mark.usefixtures("blocks_win")
def test_a_signal_ends_the_command_with_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that are threads end after different epochs, or one call of the model's variant decides for good."""
    monkeypatch.setattr(tune, "REPORT_EVERY", 2)
    graph, stop = store_of(tmp_path), Stop()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        stop.signal = signal.SIGINT

    found = tune_products(resolve(config_of(2), graph), graph, 2.0, say, stop)
    [line] = said
    assert line.startswith(f"epoch 2 of at most {MOST_EPOCHS}: 0 of ")
    assert not any(trial.known for _, trial in found.trials)
    assert {rank for rank, _ in found.trials} == {0, 1}
    assert found.kept() == {}


def test_a_table_of_another_version_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run refuses a table of older kernels, takes variants from it, or does not say that it leaves it aside."""
    graph = store_of(tmp_path)
    table = tmp_path / "store" / "tuned.json"
    table.write_text(json.dumps({"format_version": FORMAT_VERSION - 1, "tables": []}))
    folder = trained(graph, with_train(config_of(2), epochs=1), tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count(f"{table} holds measured products of format {FORMAT_VERSION - 1}") == 1
    assert not (folder / "products.json").exists()
