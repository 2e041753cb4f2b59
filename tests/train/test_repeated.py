"""An epoch as a GPU repeats it: no look at a result, no allocation, the same launches, and the CPU's losses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.train.log import RunLog
from tests.devices import EMULATED, GPU, WHERE, Where
from tests.emulator.strict import BrokenRecordingError, StrictDevice
from tests.graphs import make_graph, on_ranks, pattern

EPOCHS = 12


def config_of(device: str = "cuda", train: dict[str, Any] | None = None, ranks: int = 1, **model: Any) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (9, 6), "dropout": 0.5} | model)),
        train=TrainConfig(**({"seed": 6007, "epochs": EPOCHS, "lr": 0.02, "eval_every": 0} | (train or {}))),
        run=RunConfig(ranks=ranks, threads=1, device=device, transport="threads" if ranks > 1 else "single"),  # type: ignore[arg-type]
    )


def small(sparse: bool = False, kind: str = "directed") -> Graph:
    return make_graph(
        pattern(kind, 43, 6), num_features=17, num_classes=4, sparse=sparse, weighted=kind == "weighted", seed=8
    )


def losses(config: Config, graph: Graph, where: Where | None = None, device: Any = None) -> list[float]:
    """Losses of a fit, as the history on the device has them."""

    def body(rank: Rank) -> list[float]:
        rank.trainer.fit(RunLog(None, True, config.train.epochs), None)
        return rank.trainer._epoch.history(0, config.train.epochs)[:, 0].tolist()  # type: ignore[no-any-return]

    chosen = {} if device is None and where is None else {"device_of": where.device_of if where else lambda *_: device}
    return on_ranks(config, graph, body, **chosen)[0]  # type: ignore[no-any-return]


CASES: dict[str, tuple[bool, str, dict[str, Any], dict[str, Any]]] = {
    "plain": (False, "directed", {}, {}),
    "sparse input dropout": (True, "random", {}, {"input_dropout": 0.4}),
    "dense input dropout": (False, "weighted", {}, {"input_dropout": 0.4, "hidden": (5, 20)}),
    "schedule": (False, "random", {"schedule": "cosine", "warmup": 4, "weight_decay": 0.1}, {"norm": "mean"}),
    "momentum": (False, "random", {"optimizer": "sgd", "momentum": 0.9}, {"bias": False}),
    "clipping": (False, "random", {"optimizer": "sgd", "lr": 0.5, "clip_norm": 0.1}, {}),
    "plateau": (False, "random", {"schedule": "plateau", "schedule_patience": 0, "eval_every": 1, "lr": 0.2}, {}),
    "evaluations": (False, "random", {"eval_every": 2, "optimizer": "adamw"}, {}),
    "repeats": (False, "random", {"repeat": 2}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_can_be_recorded(name: str) -> None:
    """Fails if an epoch hides a number of its own in a launch (a mask, a rate, a step), looks, or allocates."""
    sparse, kind, train, model = CASES[name]
    device = StrictDevice(seed=5)
    found = losses(config_of("cuda", train, **model), small(sparse, kind), device=device)
    assert device.repeats >= EPOCHS - 3
    expected = losses(config_of("cpu", train, **model), small(sparse, kind))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_epochs_start_from_what_their_rank_tells(where: Where, ranks: int) -> None:
    """Fails if a loss is added to that of an earlier call, or an epoch sums what ranks told, or had summed, before."""

    def body(rank: Rank) -> None:
        trainer, epoch = rank.trainer, rank.trainer._epoch
        first = trainer.gradients(0)
        assert trainer.gradients(0) == trainer.step(0) == first
        epoch.start(6007, 1)
        for number, told in ((1, (1.0, 0.25)), (2, (0.0, 0.5)), (3, (0.0, 0.5))):
            epoch.set_signals(*told)
            epoch.run(number)
        expected = [[ranks, 0.25 * ranks], [0.0, 0.5 * ranks], [0.0, 0.5 * ranks]]
        assert epoch.history(1, 4)[:, 1:].tolist() == expected

    on_ranks(config_of(where.device, ranks=ranks), small(), body, device_of=where.device_of)


@pytest.mark.cuda
@pytest.mark.parametrize("spmm", ["own", "cusparse"])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_records_every_epoch(name: str, spmm: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if an epoch of some kind cannot be captured, or its replays differ from the CPU's epochs."""
    sparse, kind, train, model = CASES[name]
    config = config_of("cuda", train, **model)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, spmm=spmm))  # type: ignore[arg-type]
    found = losses(config, small(sparse, kind), GPU)
    assert not caplog.records
    np.testing.assert_allclose(found, losses(config_of("cpu", train, **model), small(sparse, kind)), rtol=2e-5)


@pytest.mark.cuda
def test_epochs_take_no_memory_and_two_runs_keep_apart() -> None:
    """Fails if an epoch allocates, memory passes the plan, or a rank works on the stream of another."""
    config = config_of("cuda", {"epochs": 30})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def body(rank: Rank) -> tuple[Rank, int]:
        rank.trainer.step(0)
        rank.trainer.step(1)
        rank.trainer.step(2)
        count = torch.cuda.memory_stats()["allocation.all.allocated"]
        for epoch in range(3, 10):
            rank.trainer.step(epoch)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - count < 50  # only the host's looks
        planned = sum(rank.plan.regions.values()) - rank.plan.regions["runtime"]
        return rank, torch.cuda.max_memory_allocated() - before - planned

    (one, over) = on_ranks(config, small(), body, device_of=GPU.device_of)[0]
    assert over < 2**20
    (other, _) = on_ranks(config, small(), body, device_of=GPU.device_of)[0]
    scores = [rank.trainer.evaluate() for rank in (one, other, one, other, one, other, one, other)]
    assert all(score == scores[0] for score in scores)
    assert one.trainer.step(10) == other.trainer.step(10)


@pytest.mark.parametrize("fault", ["look", "number", "allocation"])
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself fails when an op reads a result, passes a number of its epoch, or allocates."""
    original = Aggregate.run

    def run(self: Aggregate, rt: Any, op: Any) -> None:
        original(self, rt, op)
        if fault == "look":
            float(rt.buffer(op.out)[0, 0])
        elif fault == "allocation":
            rt.buffer(op.out).clone()
        else:
            rt.buffer(op.out).mul_(1.0 + len(calls) * 1e-9)
            calls.append(0)

    calls: list[int] = []
    monkeypatch.setattr(Aggregate, "run", run)
    with pytest.raises(BrokenRecordingError):
        losses(config_of(), small(), device=StrictDevice())


@pytest.mark.parametrize(
    "where", [pytest.param(EMULATED, id="emulated"), pytest.param(GPU, id="cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_loss_curves_are_the_cpus(where: Where, ranks: int) -> None:
    """Fails if masks differ between devices or after a capture, or the order of the sums costs more than rounding."""
    train = {"epochs": 50}
    found = losses(config_of("cuda", train, ranks), small(), where)
    again = losses(config_of("cuda", train, ranks), small(), where)
    assert found == again
    config = config_of("cpu", train, ranks)
    np.testing.assert_allclose(found, losses(config, small()), rtol=2e-5)
    no_dropout = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    assert not np.allclose(found, losses(no_dropout, small()), rtol=1e-3)
