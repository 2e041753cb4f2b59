"""NaN and infinity in training: the update is skipped, layer and rank are named, the weights before are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn import errors
from mggcn.assemble.rank import Rank
from mggcn.comm.failure import Report
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import DivergedError, TrainError
from mggcn.graph.csr import Graph
from mggcn.model.kinds.dense import Linear, WeightGrad
from mggcn.train import epoch as epochs
from mggcn.train import samples
from mggcn.train.log import RunLog
from tests.devices import WHERE, Where
from tests.graphs import make_graph, on_ranks, pattern

BAD_EPOCH = 5


def config_of(
    ranks: int, device: str = "cpu", strategy: str = "broadcast", *, norm: str = "none", **train: Any
) -> Config:
    run: dict[str, Any] = {"ranks": ranks, "threads": 1, "device": device, "strategy": strategy}
    return Config(
        model=ModelConfig(hidden=(9, 6), dropout=0.5, norm_layer=norm),  # type: ignore[arg-type]
        train=TrainConfig(**({"seed": 771, "epochs": 12, "eval_every": 0, "checkpoint_every": 3} | train)),
        run=RunConfig(**run, transport="threads" if ranks > 1 else "single"),
    )


def small() -> Graph:
    return make_graph(pattern("random", 43, 6), num_features=17, num_classes=4, seed=8)


def plant(monkeypatch: pytest.MonkeyPatch, kind: type[Any], layer: int, rank: int) -> None:
    """Have one number of a layer's result become infinite in BAD_EPOCH, without a look at the clock from the host."""
    original = kind.run

    def run(self: Any, rt: Any, op: Any) -> None:
        original(self, rt, op)
        if self.layer == layer and rt.comm.rank == rank:
            out = rt.gradient(self.weight) if kind is WeightGrad else rt.buffer(op.out)
            bad = (rt.clock[1] == BAD_EPOCH).to(out.dtype)
            out[0, 0].add_(bad / (1 - bad))

    monkeypatch.setattr(kind, "run", run)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("kind", "layer"), [(Linear, 2), (Linear, 3), (WeightGrad, 2)])
@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_layer_and_rank_are_named_and_nothing_is_lost(
    where: Where,
    ranks: int,
    kind: type[Any],
    layer: int,
    strategy: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Fails if a bad epoch moves a weight, another rank or layer is named, or checkpoint or history lose what was good."""
    guilty = ranks - 1
    config = config_of(ranks, where.device, strategy)

    def body(rank: Rank) -> tuple[str, torch.Tensor]:
        main = tmp_path if rank.comm.rank == 0 else None
        with pytest.raises(DivergedError) as caught:
            rank.trainer.fit(RunLog(main, True, config.train.epochs), tmp_path)
        return str(caught.value), rank.trainer.runtime.weights.flat.cpu().clone()

    with monkeypatch.context() as planted:
        plant(planted, kind, layer, guilty)
        found = on_ranks(config, small(), body, device_of=where.device_of)
    label = f"{'linear' if kind is Linear else 'weight-grad'} {layer}"
    for text, _ in found:
        assert f"epoch {BAD_EPOCH + 1} is n" in text
        assert f"it began in layer {layer} ({label}), on rank {guilty}" in text
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, BAD_EPOCH + 1))
    assert (tmp_path / "checkpoints" / "latest").read_text().startswith("run-000-epoch-000003")

    def good(rank: Rank) -> torch.Tensor:
        for epoch in range(BAD_EPOCH):
            rank.trainer.step(epoch)
        return rank.trainer.runtime.weights.flat.cpu().clone()

    kept = on_ranks(config, small(), good, device_of=where.device_of)[0]
    assert all(torch.equal(weights, kept) for _, weights in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_statistics_are_not_blamed(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if batch norm, whose statistics the bad epoch has moved already, hides where it began."""

    def body(rank: Rank) -> str:
        with pytest.raises(DivergedError) as caught:
            rank.trainer.fit(RunLog(None, True, 12), None)
        return str(caught.value)

    plant(monkeypatch, Linear, 1, ranks - 1)
    for text in on_ranks(config_of(ranks, norm="batch"), small(), body):
        assert f"it began in layer 1 (linear 1), on rank {ranks - 1}" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_is_too_large_is_named(ranks: int) -> None:
    """Fails if what an earlier step made infinite is blamed on a layer."""

    def body(rank: Rank) -> str:
        rank.trainer.runtime.weights.views["layers.2.bias"][0] = float("inf")
        with pytest.raises(DivergedError) as caught:
            rank.trainer.step(0)
        return str(caught.value)

    for text in on_ranks(config_of(ranks), small(), body):
        assert "it began in the weight layers.2.bias, on rank 0, which an earlier step made too large" in text


def test_a_sum_over_ranks_that_overflows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a layer is blamed where every rank's gradient is finite."""
    original = WeightGrad.run

    def run(self: Any, rt: Any, op: Any) -> None:
        original(self, rt, op)
        rt.gradient(self.weight).fill_(3e38)

    monkeypatch.setattr(WeightGrad, "run", run)

    def body(rank: Rank) -> str:
        with pytest.raises(DivergedError) as caught:
            rank.trainer.step(0)
        return str(caught.value)

    for text in on_ranks(config_of(2), small(), body):
        assert "the gradient of epoch 1 is not finite, its loss is" in text
        assert "it began where the ranks' gradients are summed" in text


def test_a_run_of_several_windows_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a run whose epochs turn over the device's window differs by a bit, a row, or a rate of the schedule."""
    found = []
    for window in (4096, 5):
        monkeypatch.setattr(epochs, "WINDOW", window)
        folder = tmp_path / str(window)
        folder.mkdir()

        def body(rank: Rank, folder: Path = folder) -> torch.Tensor:
            assert rank.trainer.fit(RunLog(folder, True, 12), None)
            assert rank.trainer._epoch._work.books.history.shape[0] == min(epochs.WINDOW, 12)
            return rank.trainer.runtime.weights.flat

        config = config_of(1, eval_every=4, schedule="cosine", warmup=3)
        weights = on_ranks(config, small(), body)[0]
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        found.append((weights, [{**row, "seconds": 0} for row in rows]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 12


def test_memory_does_not_grow_with_the_epochs() -> None:
    """Fails if a run of ten billion epochs plans, allocates or lists something for each of them."""
    config = config_of(1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=10**10))

    def body(rank: Rank) -> int:
        rank.trainer.step(10**10 - 1)
        books = rank.trainer._epoch._work.books
        return books.history.nbytes + books.rates.nbytes

    assert on_ranks(config, small(), body) == [32 * epochs.WINDOW]


def test_seconds_of_any_number_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the median of few epochs is not theirs, or that of many takes memory for each, or forgets the early ones."""
    monkeypatch.setattr(samples, "MOST", 64)
    seconds = samples.EpochSeconds()
    assert seconds.median() is None
    for second in range(7):
        seconds.add(float(second))
    assert seconds.median() == 3.0
    for second in range(7, 10_000):
        seconds.add(float(second))
    assert len(seconds._kept) <= 64
    assert seconds.median() == pytest.approx(5000, rel=0.05)


@pytest.mark.parametrize(("name", "starts"), [("DivergedError", "the loss"), ("TrainError", "rank 2: the loss")])
def test_who_reports_is_not_to_blame(name: str, starts: str) -> None:
    """Fails if the rank that happened to report first stands before a message that names the right one."""
    report = Report.of(2, getattr(errors, name)("the loss of epoch 3 is nan; it began in layer 1, on rank 0"))
    assert str(report.error()).startswith(starts)
    assert isinstance(report.error(), TrainError)
