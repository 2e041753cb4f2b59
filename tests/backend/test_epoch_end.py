"""The end of an epoch: steps of the weights against plain torch.optim, and the books beside them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.epoch_end import Books
from mggcn.config import TrainConfig
from mggcn.model.runtime import Parameter
from mggcn.train.optimizer import Optimizer
from mggcn.train.runtime import Weights
from tests.backend.cases import clock, real_type, zeros
from tests.backend.emulated import emulated_backend

LAYERS = ((70, 33), (33, 1), (1, 41))
"""Matrices of several parts, of one column and of one row; rows that are no multiple of 16 bytes in any type."""
RATES = np.array([0.01, 0.3, 0.0, 1e-9, 0.02, 5.0])
SCALES = np.array([0.0, 1.0, -1.0, 1e-6, 1e-15, 3e3])
KINDS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
}


def weights_of(backend: KernelBackend, bias: bool = True, seed: int = 6) -> Weights:
    parameters = {}
    for layer, shape in enumerate(LAYERS, start=1):
        parameters[f"layers.{layer}.weight"] = Parameter(shape, "glorot")
        if bias:
            parameters[f"layers.{layer}.bias"] = Parameter(shape[1:], "zeros")
    weights = Weights(parameters, real_type(backend), backend)
    weights.initialize(seed)
    return weights


def books_of(backend: KernelBackend, epoch: int = 0, rates: np.ndarray = RATES) -> Books:
    own = backend.upload(np.array([0.0, 1.0, 0.25]))
    history = zeros(backend, rates.size, 3, dtype=torch.float64).fill_(-1.0)
    signals = zeros(backend, 3, dtype=torch.float64)
    halted = zeros(backend, 1, dtype=torch.int64)
    return Books(clock(backend, 77, epoch), backend.upload(rates.copy()), signals, own, history, halted)


def draw_gradients(weights: Weights, epoch: int) -> None:
    """Gradients of very different sizes, the same on every device for a type."""
    generator = np.random.default_rng(900 + epoch)
    for grad in weights.grads.values():
        values = generator.normal(size=grad.shape) * generator.choice(SCALES, grad.shape)
        grad.copy_(torch.from_numpy(values))


class Plain:
    """torch.optim on float64 copies of the weights, one optimiser for each."""

    def __init__(self, config: TrainConfig, weights: Weights) -> None:
        make: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer]
        extra = {"momentum": config.momentum} if config.momentum else {}
        self.values = {n: v.detach().cpu().double().clone().requires_grad_(True) for n, v in weights.views.items()}
        self._optimizers = [
            make(
                [value],
                lr=0.0,
                weight_decay=config.weight_decay if config.weight_decay_on == "all" or n == "layers.1.weight" else 0.0,
                foreach=False,
                **extra,
            )
            for n, value in self.values.items()
        ]

    def step(self, weights: Weights, rate: float, clip_norm: float = math.inf) -> None:
        for name, value in self.values.items():
            value.grad = weights.grads[name].detach().cpu().double().clone()
        torch.nn.utils.clip_grad_norm_(self.values.values(), clip_norm)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()


@pytest.mark.covering(2)
@pytest.mark.parametrize("decay_on", ["all", "first"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_plain_torch(backend: KernelBackend, kind: str, decay_on: str) -> None:
    """Fails if a weight is left out or moved twice, decays where it should not, or takes the rate of another epoch."""
    config = TrainConfig(weight_decay=0.1, weight_decay_on=decay_on, **KINDS[kind])  # type: ignore[arg-type]
    weights = weights_of(backend)
    covered = torch.zeros_like(weights.flat)
    for view in weights.views_of(covered).values():
        view.fill_(1.0)
    assert bool((covered == 0).any())
    plain, books = Plain(config, weights), books_of(backend)
    end = backend.epoch_end(Optimizer(config, weights).step, books)
    close = {torch.float64: {"rtol": 1e-11, "atol": 1e-13}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}
    for epoch, rate in enumerate(RATES):
        draw_gradients(weights, epoch)
        plain.step(weights, rate)
        end()
        for name, view in weights.views.items():
            scale = max(1.0, float(plain.values[name].detach().abs().max()))
            tolerance = close[view.dtype]
            np.testing.assert_allclose(
                view.cpu().double() / scale, plain.values[name].detach() / scale, err_msg=f"{name} {epoch}", **tolerance
            )
    assert not weights.flat[covered == 0].any()


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip_norm", [1e-3, 40.0, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_steps_equal_torch(backend: KernelBackend, kind: str, clip_norm: float) -> None:
    """Fails if the norm misses a weight, is another epoch's, or decay is clipped, or a short gradient is stretched."""
    config = TrainConfig(weight_decay=0.1, clip_norm=clip_norm, **KINDS[kind])
    weights = weights_of(backend)
    plain, books = Plain(config, weights), books_of(backend)
    end = backend.epoch_end(Optimizer(config, weights).step, books)
    rtol, atol = (1e-11, 1e-13) if weights.flat.dtype == torch.float64 else (2e-5, 2e-6)
    for epoch, rate in enumerate(RATES[:3]):
        generator = np.random.default_rng(70 + epoch)
        for grad in weights.grads.values():
            grad.copy_(torch.from_numpy(generator.normal(size=grad.shape)))
        plain.step(weights, rate, clip_norm)
        end()
        for name, view in weights.views.items():
            expected = plain.values[name].detach()
            scale = max(1.0, float(expected.abs().max()))
            np.testing.assert_allclose(view.cpu().double() / scale, expected / scale, rtol, atol, err_msg=name)


def test_books(backend: KernelBackend) -> None:
    """Fails if a row of the history is another epoch's, the clock stands, or an epoch starts from the signals before."""
    weights, books = weights_of(backend), books_of(backend, epoch=2)
    end = backend.epoch_end(Optimizer(TrainConfig(), weights).step, books)
    for loss in (4.5, 8.25):
        books.signals.copy_(torch.tensor([loss, 3.0, 0.5]))
        end()
        assert books.signals.tolist() == books.own.tolist() == [0.0, 1.0, 0.25]
    assert books.history.tolist() == [[-1.0] * 3] * 2 + [[4.5, 3.0, 0.5], [8.25, 3.0, 0.5]] + [[-1.0] * 3] * 2
    assert books.clock.tolist() == [77, 4]


@pytest.mark.parametrize("bias", [True, False])
def test_products_read_the_weights_as_they_are_now(backend: KernelBackend, bias: bool) -> None:
    """Fails if a copy in the type of activations is an epoch old, misplaced, or its rows lie off 16 bytes."""
    weights = weights_of(backend, bias)
    if weights.stored is None:
        assert weights.operands["layers.1.weight"] is weights.views["layers.1.weight"]
        return
    covered = torch.zeros_like(weights.stored)
    for copy in weights.copies.values():
        assert copy.data_ptr() % 64 == 0
        assert copy.stride(0) * copy.itemsize % 16 == 0
        covered.as_strided(copy.shape, copy.stride(), copy.storage_offset()).fill_(1.0)
    weights.stored[covered == 0] = 7.0
    end = backend.epoch_end(Optimizer(TrainConfig(), weights).step, books_of(backend))
    before = weights.stored.clone()
    draw_gradients(weights, 1)
    end()
    assert not torch.equal(before, weights.stored)
    for name, operand in weights.operands.items():
        assert torch.equal(operand, weights.views[name].to(operand.dtype))
    assert bool((weights.stored[covered == 0] == 7.0).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_gradient_divides_by_nothing(backend: KernelBackend, kind: str) -> None:
    """Fails if a weight whose gradient is zero becomes NaN."""
    weights = weights_of(backend)
    backend.epoch_end(Optimizer(TrainConfig(**KINDS[kind]), weights).step, books_of(backend))()
    assert bool(torch.isfinite(weights.flat).all())


def moved_by_steps(weights: Weights, optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of all that a step moves: weights, their copies for products, the optimiser's state."""
    stored = [] if weights.stored is None else [weights.stored.clone()]
    return [weights.flat.clone(), *stored, *optimizer.tensors().values()]


BAD = {
    "NaN in the first weight": ("layers.1.weight", (40, 30), math.nan),
    "infinity in the last": ("layers.3.weight", (0, 40), math.inf),
    "minus infinity in a vector": ("layers.2.bias", (0,), -math.inf),
    "NaN loss": (None, 0, math.nan),
    "infinite loss": (None, 0, math.inf),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip_norm", [0.0, 5.0])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_is_not_finite_moves_nothing(
    backend: KernelBackend, kind: str, bad: str, clip_norm: float
) -> None:
    """Fails if NaN or infinity reaches a weight, its copy or the optimiser, or an epoch queued behind it moves one."""
    weights, books = weights_of(backend), books_of(backend)
    optimizer = Optimizer(TrainConfig(weight_decay=0.1, clip_norm=clip_norm, **KINDS[kind]), weights)
    end = backend.epoch_end(optimizer.step, books)
    draw_gradients(weights, 0)
    end()
    before = moved_by_steps(weights, optimizer)
    name, place, value = BAD[bad]
    draw_gradients(weights, 1)
    target = books.signals if name is None else weights.grads[name]
    target[place] = value
    end()
    draw_gradients(weights, 2)
    end()
    assert all(torch.equal(a, b) for a, b in zip(before, moved_by_steps(weights, optimizer), strict=True))
    assert books.history[:4, 1].isnan().tolist() == [False, True, True, False]
    assert (int(books.halted), books.clock.tolist()) == (2, [77, 3])
    books.halted.zero_()
    end()
    assert not torch.equal(before[0], weights.flat)
    assert bool(torch.isfinite(weights.flat).all())


def test_a_window_of_epochs_turns(backend: KernelBackend) -> None:
    """Fails if the history or the rates of a run grow with its epochs, or the second window takes a row of its own."""
    weights, books = weights_of(backend), books_of(backend, epoch=RATES.size + 1)
    end = backend.epoch_end(Optimizer(TrainConfig(optimizer="sgd"), weights).step, books)
    before = weights.flat.clone()
    weights.grad.fill_(1.0)
    books.signals[0] = 4.5
    end()
    assert books.history[:, 0].tolist() == [-1.0, 4.5, -1.0, -1.0, -1.0, -1.0]
    covered = torch.zeros_like(weights.flat)
    for view in weights.views_of(covered).values():
        view.fill_(1.0)
    moved = (before - weights.flat)[covered == 1].double()
    np.testing.assert_allclose(moved.cpu(), RATES[1], rtol=1e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_returns(backend: KernelBackend, kind: str) -> None:
    """Fails if a step after loading the optimiser's state differs in one bit from one that was never interrupted."""
    config = TrainConfig(weight_decay=0.1, weight_decay_on="first", **KINDS[kind])
    weights, again = weights_of(backend), weights_of(backend)
    optimizer, resumed = Optimizer(config, weights), Optimizer(config, again)
    end = backend.epoch_end(optimizer.step, books_of(backend))
    for epoch in range(2):
        draw_gradients(weights, epoch)
        end()
    again.load_state_dict(weights.state_dict())
    resumed.load_tensors(optimizer.tensors())
    for moved in (weights, again):
        draw_gradients(moved, 2)
    end()
    backend.epoch_end(resumed.step, books_of(backend, epoch=2))()
    assert torch.equal(weights.flat, again.flat)
    optimizer.reset()
    assert not any(bool(tensor.any()) for tensor in optimizer.tensors().values())


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_order_of_blocks_changes_no_bit(dtype: torch.dtype) -> None:
    """Fails if a block reads what the last one writes: the clock, the steps or the rate of the next epoch."""
    found = []
    for seed, kind in itertools.product((0, 3, 58), ("adam", "momentum")):
        backend = emulated_backend(dtype, seed)
        weights, books = weights_of(backend), books_of(backend)
        config = TrainConfig(weight_decay=0.1, clip_norm=25.0, **KINDS[kind])
        end = backend.epoch_end(Optimizer(config, weights).step, books)
        for epoch in range(3):
            draw_gradients(weights, epoch)
            end()
        stored = weights.flat if weights.stored is None else weights.stored
        found.append((kind, *(t.clone() for t in (weights.flat, stored, books.clock, books.history, books.signals))))
    for kind, *tensors in found:
        first = next(others for name, *others in found if name == kind)
        assert all(torch.equal(a, b) for a, b in zip(tensors, first, strict=True))


@pytest.mark.emulated
def test_devices_agree_within_rounding() -> None:
    """Fails if the kernel's formula is another than that of torch's fused steps on a CPU."""
    from mggcn.backend.cpu.backend import CpuBackend

    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float64)):
        curves = []
        for backend in (CpuBackend(dtype, 1), emulated_backend(dtype, 9)):
            weights = weights_of(backend)
            config = dataclasses.replace(TrainConfig(weight_decay=0.01, clip_norm=25.0), **KINDS[kind])
            end = backend.epoch_end(Optimizer(config, weights).step, books_of(backend))
            for epoch in range(5):
                draw_gradients(weights, epoch)
                end()
            curves.append(weights.flat)
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(curves[0], curves[1], rtol=16 * ulp, atol=16 * ulp)
