"""The end of an epoch loads no compiler, and the learning rate is a function of the epoch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.config import TrainConfig
from mggcn.train.optimizer import learning_rate


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
