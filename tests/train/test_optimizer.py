"""The end of an epoch: no compiler, clipping over ranks, and the learning rate as a function of the epoch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mggcn.assemble_rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.train.optimizer import learning_rate
from tests.graphs import make_graph, on_ranks, pattern


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
    graph = make_graph(pattern("directed", 43, 6), num_features=17, num_classes=4, sparse=False, weighted=False, seed=8)
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
