"""The end of an epoch: no compiler, clipping over ranks, and the learning rate as a function of the epoch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mggcn
from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from mggcn.train.checkpoint import Progress
from mggcn.train.log import RunLog
from mggcn.train.optimizer import follow_plateau, learning_rate
from tests.graphs import make_graph, on_ranks, pattern


@pytest.mark.full
def test_no_compiler_is_loaded() -> None:
    """Fails if a step loads torch's compiler: 70 MiB and almost two seconds in every rank."""
    code = (
        "import sys; from tests.backend.test_epoch_end import *; from mggcn.backend.cpu.backend import CpuBackend; "
        "b = CpuBackend(torch.float64, 1); w = weights_of(b); "
        "[b.epoch_end(Optimizer(TrainConfig(**k), w).step, books_of(b))() for k in KINDS.values()]; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_clipping_is_that_of_the_whole_gradient() -> None:
    """Fails if a rank clips its own part of the gradient, ranks clip differently, or a step is longer than it may be."""
    graph = make_graph(pattern("directed", 43, 6), num_features=17, num_classes=4, seed=8)
    train = TrainConfig(seed=977, optimizer="sgd", lr=2.0, clip_norm=0.125)
    found = {}
    for ranks in (1, 3):
        run = RunConfig(ranks=ranks, threads=1, transport="threads" if ranks > 1 else "single", precision="fp64")

        def body(rank: Rank) -> list[np.ndarray]:
            weights = rank.trainer.runtime.weights.flat
            steps = [weights.numpy().copy()]
            for epoch in range(3):
                rank.trainer.gradients(epoch)
                assert float(rank.trainer.runtime.weights.grad.norm()) > 0.125
                rank.trainer.step(epoch)
                steps.append(weights.numpy().copy())
            return steps

        found[ranks] = on_ranks(Config(model=ModelConfig(hidden=(9,)), train=train, run=run), graph, body)
    for steps in zip(*found[3], strict=True):
        assert all(np.array_equal(steps[0], other) for other in steps)
    np.testing.assert_allclose(found[3][0], found[1][0], rtol=1e-10, atol=1e-12)
    lengths = [np.linalg.norm(after - before) for before, after in itertools.pairwise(found[1][0])]
    np.testing.assert_allclose(lengths, 2.0 * 0.125, rtol=1e-4)


def test_schedules() -> None:
    """Fails if warm-up starts at 0, a cut comes an epoch early, or the cosine does not end near 0."""
    constant = TrainConfig(lr=0.5, epochs=10)
    assert {learning_rate(constant, e) for e in range(10)} == {0.5}
    step = TrainConfig(lr=1.0, schedule="step", schedule_step=3, schedule_gamma=0.5)
    assert [learning_rate(step, e) for e in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    cosine = TrainConfig(lr=2.0, schedule="cosine", epochs=8)
    assert [learning_rate(cosine, e) for e in (0, 4)] == pytest.approx([2.0, 1.0])
    assert learning_rate(cosine, 7) == pytest.approx(1 + math.cos(math.pi * 7 / 8))
    warm = TrainConfig(lr=1.0, warmup=4)
    assert [learning_rate(warm, e) for e in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def torch_plateau(config: TrainConfig) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=config.schedule_gamma, patience=config.schedule_patience
    )


@pytest.mark.parametrize("patience", [0, 1, 4])
@pytest.mark.parametrize(("gamma", "lr"), [(0.3, 0.01), (0.1, 1e-7), (0.9, 0.5)])
def test_the_plateau_is_that_of_torch(patience: int, gamma: float, lr: float) -> None:
    """Fails if a cut comes an evaluation early, ties or tiny rises count as better, or cuts go on for ever."""
    config = TrainConfig(lr=lr, schedule="plateau", schedule_gamma=gamma, schedule_patience=patience)
    expected, progress = torch_plateau(config), Progress()
    generator = np.random.default_rng(5119)
    for score in np.cumsum(generator.choice([-0.01, 0.0, 1e-6, 0.02], 60)) + 0.5:
        follow_plateau(config, progress, float(score))
        expected.step(float(score))
        assert learning_rate(config, 7, progress.rate) == expected.get_last_lr()[0]


def test_epochs_take_the_rate_of_the_plateau() -> None:
    """Fails if an epoch runs with another rate than torch's schedule has for its history, or a repeat starts cut."""
    graph = make_graph(pattern("random", 43, 6), num_features=17, num_classes=4, seed=8)
    train = TrainConfig(
        seed=977, lr=0.25, optimizer="sgd", schedule="plateau", schedule_patience=1, epochs=14, warmup=4, repeat=2
    )
    config = Config(model=ModelConfig(hidden=(9,)), train=train, run=RunConfig(threads=1, transport="single"))

    def body(rank: Rank) -> list[float]:
        found: list[float] = []
        weights, before, plateau = rank.trainer.runtime.weights, torch.empty(0), torch_plateau(train)

        def on_epoch(row: dict[str, float]) -> None:
            nonlocal before, plateau
            if row["epoch"] > 1:
                expected = learning_rate(train, int(row["epoch"]) - 1, plateau.get_last_lr()[0])
                np.testing.assert_allclose(before - expected * weights.grad, weights.flat, rtol=1e-5, atol=1e-7)
            if row["epoch"] == 1:
                plateau = torch_plateau(train)
            plateau.step(row["val"])
            before = weights.flat.clone()
            found.append(plateau.get_last_lr()[0])

        rank.trainer.fit(RunLog(None, True, train.epochs), None, on_epoch)
        return found

    found = on_ranks(config, graph, body)[0]
    assert len(set(found[:14])) > 2
    assert found[14] == train.lr


def test_a_plateau_needs_scores() -> None:
    """Fails if a schedule that follows validation scores is taken where there are none."""
    with pytest.raises(ConfigError, match=r"plateau counts evaluations, but train.eval_every is 0"):
        TrainConfig(schedule="plateau", eval_every=0)
    splits = {"train": [0, 2], "test": [1, 3]}
    graph = mggcn.load(np.array([[0, 1], [1, 0]]), features=np.eye(4), labels=[0, 0, 1, 1], splits=splits)
    with pytest.raises(ConfigError, match=r"plateau needs validation vertices, and this split has none; choose"):
        mggcn.Trainer(graph, schedule="plateau", threads=1).fit(epochs=2)
