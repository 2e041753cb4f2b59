"""What a precision changes: bytes of the plan, and gradients within the rounding of bf16."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble import Rank
from mggcn.backend.cuda import CudaBackend
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.train.runplan import plan_run
from mggcn.train.shape import GraphShape
from tests.devices import EMULATED, GPU, Where
from tests.graphs import make_graph, on_ranks, pattern

DEVICES = [pytest.param(EMULATED, id="emulated"), pytest.param(GPU, id="cuda", marks=pytest.mark.cuda)]


def config_of(precision: str, ranks: int = 1, **model: object) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (24, 8), "dropout": 0.5} | model)),  # type: ignore[arg-type]
        train=TrainConfig(seed=551, epochs=12, lr=0.02),
        run=RunConfig(
            ranks=ranks, threads=1, device="cuda", transport="threads" if ranks > 1 else "single", precision=precision
        ),  # type: ignore[arg-type]
    )


def small(sparse: bool = False) -> Graph:
    return make_graph(pattern("directed", 41, 9), num_features=19, num_classes=4, sparse=sparse, weighted=False, seed=3)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_cpu_refuses_what_it_has_not(precision: str) -> None:
    """Fails if a run on the CPU takes a precision and computes in another."""
    with pytest.raises(ConfigError, match=f"{precision} needs --device cuda"):
        RunConfig(device="cpu", precision=precision)  # type: ignore[arg-type]


def test_bf16_halves_activations_and_messages() -> None:
    """Fails if buffers, features or messages are planned at the width of float32, or weights lose their master copy."""
    from mggcn.aggregate.broadcast import BroadcastStrategy
    from mggcn.partition.parts import RowFigures

    shape = GraphShape("shape", 200_000, 4_000_000, 128, 64, True)
    plans = {}
    for precision in ("fp32", "tf32", "bf16"):
        run = RunConfig(ranks=4, device="cuda", transport="nccl", precision=precision)  # type: ignore[arg-type]
        config = Config(model=ModelConfig(hidden=(256, 256)), run=run)
        figures = RowFigures.expected(shape.num_vertices, shape.num_edges, 4, self_loops=True)
        plans[precision] = plan_run(config, shape, figures, BroadcastStrategy()).ranks[0]
    full, half = plans["fp32"], plans["bf16"]
    assert plans["tf32"].regions == full.regions
    assert half.regions["features"] * 2 == full.regions["features"]
    assert half.arena_bytes < 0.52 * full.arena_bytes
    summed = 2 * (half.gradient_bytes + 24) * 3 // 4
    assert half.gradient_bytes == full.gradient_bytes
    assert (half.bytes_sent(half.train) - summed) * 2 == pytest.approx(full.bytes_sent(full.train) - summed, abs=8)
    assert half.regions["weights and optimiser"] == full.regions["weights and optimiser"] + half.gradient_bytes // 2


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(("ranks", "sparse"), [(1, False), (1, True), (3, False)])
def test_bf16_gradients_are_near(where: Where, ranks: int, sparse: bool) -> None:
    """Fails if anything but storage loses precision, or a buffer is read in the wrong type."""
    graph = small(sparse)

    def gradients(precision: str) -> dict[str, np.ndarray]:
        def body(rank):  # type: ignore[no-untyped-def]
            # All activations positive: rounding moves none across ReLU's kink, where gradients jump.
            weights = rank.trainer.runtime.weights
            weights.flat.abs_()
            for name, view in weights.views.items():
                if name.endswith("bias"):
                    view.fill_(4.0)
            weights.refresh()
            rank.trainer.gradients(3)
            return {name: grad.cpu().numpy().copy() for name, grad in weights.grads.items()}

        return on_ranks(config_of(precision, ranks), graph, body, device_of=where.device_of)[0]  # type: ignore[no-any-return]

    exact, rounded = gradients("fp64"), gradients("bf16")
    for name, expected in exact.items():
        assert rounded[name].dtype == np.float32
        error = np.linalg.norm(rounded[name] - expected) / np.linalg.norm(expected)
        assert 1e-6 < error < 0.03, (name, error)


@pytest.mark.parametrize("where", DEVICES)
def test_bf16_training_keeps_master_weights(where: Where) -> None:
    """Fails if steps smaller than the spacing of bf16 are lost, or products read weights that are an epoch old."""

    def losses(precision: str) -> list[float]:
        def body(rank):  # type: ignore[no-untyped-def]
            found = [rank.trainer.step(epoch) for epoch in range(12)]
            weights = rank.trainer.runtime.weights
            assert weights.flat.dtype == torch.float32
            for name, view in weights.views.items():
                if view.dim() == 2:
                    assert torch.equal(weights.operands[name], view.to(weights.operands[name].dtype))
            return found

        config = config_of(precision, dropout=0.0)
        small_steps = dataclasses.replace(config, train=dataclasses.replace(config.train, lr=2e-4))
        return on_ranks(small_steps, small(), body, device_of=where.device_of)[0]  # type: ignore[no-any-return]

    exact, rounded = losses("fp32"), losses("bf16")
    assert exact[-1] < exact[0]
    # Most weights lie near 0.2, where bf16 has a spacing of 1e-3: without master weights no step of 2e-4 would count.
    assert rounded[0] - rounded[-1] == pytest.approx(exact[0] - exact[-1], rel=0.3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "features"), [(1, "dense"), (3, "dense"), (1, "sparse"), (2, "sparse")])
def test_device_memory_is_as_planned(
    precision: str, ranks: int, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank takes memory of a GPU that its plan does not know, or plans much that it never takes."""
    taken: dict[int, int] = {}
    for name in ("allocate", "upload"):
        original = getattr(CudaBackend, name)

        def count(self: CudaBackend, what: Any, _original: Any = original) -> torch.Tensor:
            tensor: torch.Tensor = _original(self, what)
            taken[id(self)] = taken.get(id(self), 0) + tensor.nbytes
            return tensor

        monkeypatch.setattr(CudaBackend, name, count)
    graph = make_graph(
        pattern("directed", 1500, 9), num_features=190, num_classes=7, sparse=True, weighted=False, seed=3
    )
    config = config_of(precision, ranks, hidden=(64, 32))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, features=features))  # type: ignore[arg-type]

    def share(rank: Rank) -> float:
        plan = rank.plan
        # The best weights and Adam's two states are torch's own; 16 KiB: losses by chunk and epoch, counts, clock.
        found = taken[id(rank.trainer.runtime.backend)] + 3 * plan.gradient_bytes - 2**14
        return found / (sum(plan.regions.values()) - plan.regions["runtime"])

    for found in on_ranks(config, graph, share, device_of=EMULATED.device_of):
        assert 0.93 < found <= 1.0
