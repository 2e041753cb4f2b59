"""Steps of the planned weights against plain torch.optim, and the learning rate as a function of the epoch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mggcn.backend.cpu import CpuBackend
from mggcn.config import TrainConfig
from mggcn.model.choices import LayerChoice
from mggcn.train.optimizer import Optimizer, learning_rate
from mggcn.train.runtime import Weights

LAYERS = (LayerChoice(1, 7, 5, "precomputed", ""), LayerChoice(2, 5, 3, "gemm-first", ""))


def weights_with_gradients(seed: int = 6) -> Weights:
    weights = Weights(LAYERS, True, torch.float64, CpuBackend(torch.float64, 1))
    weights.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    for grad in weights.grads.values():
        grad.copy_(torch.randn(grad.shape, generator=generator, dtype=torch.float64))
    return weights


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=CpuBackend(torch.float64, 1).rate_dtype)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("decay_on", ["all", "first"])
def test_steps_equal_plain_torch(kind: str, decay_on: str) -> None:
    """Fails if decay reaches a weight that it should not, a gradient is not used, or the rate is not set."""
    config = TrainConfig(
        optimizer=kind,
        weight_decay=0.1,
        weight_decay_on=decay_on,
        lr=0.03,
        momentum=0.9 if kind == "sgd" else 0.0,  # type: ignore[arg-type]
    )
    weights = weights_with_gradients()
    padding = weights.flat.numel() - sum(v.numel() for v in weights.views.values())
    optimizer = Optimizer(config, weights)
    plain = {name: view.clone().requires_grad_(True) for name, view in weights.views.items()}
    for name, tensor in plain.items():
        tensor.grad = weights.grads[name].clone()
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    extra = {"momentum": 0.9} if kind == "sgd" else {}
    others = [
        make([tensor], lr=0.01, weight_decay=0.1 if decay_on == "all" or name == "layers.1.weight" else 0.0, **extra)
        for name, tensor in plain.items()
    ]
    for _ in range(3):
        optimizer.step(rate(0.01))
        for other in others:
            other.step()
    for name, view in weights.views.items():
        torch.testing.assert_close(view, plain[name].detach(), rtol=1e-12, atol=1e-14)
    assert padding > 0
    assert int((weights.flat == 0).sum()) >= padding


def test_state_returns() -> None:
    """Fails if a step after loading the optimiser's state differs in one bit from one that was never interrupted."""
    for kind, momentum in (("adam", 0.0), ("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)):
        config = TrainConfig(optimizer=kind, momentum=momentum, weight_decay=0.1, weight_decay_on="first")  # type: ignore[arg-type]
        weights = weights_with_gradients()
        optimizer = Optimizer(config, weights)
        optimizer.step(rate(0.01))
        optimizer.step(rate(0.01))
        again = weights_with_gradients()
        again.load_state_dict(weights.state_dict())
        resumed = Optimizer(config, again)
        resumed.load_tensors(optimizer.tensors())
        optimizer.step(rate(0.01))
        resumed.step(rate(0.01))
        assert torch.equal(weights.flat, again.flat)


def test_no_compiler_is_loaded() -> None:
    """Fails if a step loads torch's compiler: 70 MiB and almost two seconds in every rank."""
    code = (
        "import sys; from tests.train.test_optimizer import *; "
        "w = weights_with_gradients(); "
        "[Optimizer(TrainConfig(optimizer=k), w).step(rate(0.1)) for k in ('adam', 'adamw', 'sgd')]; "
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
