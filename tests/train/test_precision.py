"""What a precision changes: bytes of the plan, and gradients within the rounding of bf16."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import plan_shape
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu import spmm as cpu_spmm
from mggcn.backend.cpu.figures import Figures
from mggcn.backend.cpu.variants import MatrixTraits, candidates
from mggcn.backend.spmm_choice import SpmmChoice
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError, ConfigError
from mggcn.graph.csr import Graph
from mggcn.planning.run import plan_run
from mggcn.planning.shape import graph_shape
from tests.devices import EMULATED, WHERE, Where, share_of_plan, taken_on_gpus
from tests.graphs import far_from_kinks, make_graph, on_ranks, pattern
from tests.machines import tight
from tests.shapes import shape_of


def config_of(precision: str, ranks: int = 1, device: str = "cuda", **model: object) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (24, 8), "dropout": 0.5} | model)),  # type: ignore[arg-type]
        train=TrainConfig(seed=551, epochs=12, lr=0.02),
        run=RunConfig(
            ranks=ranks, threads=1, device=device, transport="threads" if ranks > 1 else "single", precision=precision
        ),  # type: ignore[arg-type]
    )


def small(sparse: bool = False) -> Graph:
    return make_graph(pattern("directed", 41, 9), num_features=19, num_classes=4, sparse=sparse, seed=3)


def test_a_cpu_refuses_what_it_has_not() -> None:
    """Fails if a run on the CPU takes a precision and computes in another."""
    with pytest.raises(ConfigError, match="tf32 needs --device cuda; on a CPU use fp32, mixed, bf16 or fp64"):
        RunConfig(device="cpu", precision="tf32")


def test_bf16_halves_activations_and_messages() -> None:
    """Fails if buffers, features or messages are planned at the width of float32, or weights lose their master copy."""
    from mggcn.aggregate.broadcast import BroadcastStrategy
    from mggcn.partition.rows.partition import RowStats

    shape = shape_of(200_000, 4_000_000, 128, 64)
    plans = {}
    for precision in ("fp32", "tf32", "bf16"):
        run = RunConfig(ranks=4, device="cuda", transport="nccl", precision=precision)  # type: ignore[arg-type]
        config = Config(model=ModelConfig(hidden=(256, 256)), run=run)
        figures = RowStats.expected(shape.num_vertices, shape.num_edges, 4, self_loops=True)
        plans[precision] = plan_run(config, shape, figures, BroadcastStrategy()).ranks[0]
    full, half = plans["fp32"], plans["bf16"]
    assert plans["tf32"].regions == full.regions
    assert half.regions["features"] * 2 == full.regions["features"]
    assert half.arena_bytes < 0.52 * full.arena_bytes
    summed = 2 * (half.gradient_bytes + 24) * 3 // 4
    assert half.gradient_bytes == full.gradient_bytes
    assert (half.bytes_sent(half.train) - summed) * 2 == pytest.approx(full.bytes_sent(full.train) - summed, abs=8)
    # Matrices alone, their rows padded to 16 bytes, and each to 64.
    copied = sum(-(-c.d_in * -(-c.d_out // 8) * 16 // 64) * 64 for c in half.values.layers)
    assert half.regions["weights and optimiser"] == full.regions["weights and optimiser"] + copied


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("narrow", ["bf16", "mixed"])
@pytest.mark.parametrize(("ranks", "sparse"), [(1, False), (1, True), (3, False)])
def test_bf16_gradients_are_near(where: Where, ranks: int, sparse: bool, narrow: str) -> None:
    """Fails if anything but storage loses precision, or a buffer is read in the wrong type."""
    graph = small(sparse)

    def gradients(precision: str) -> dict[str, np.ndarray]:
        def body(rank: Rank) -> dict[str, np.ndarray]:
            far_from_kinks(rank)
            rank.trainer.gradients(3)
            return {name: grad.cpu().numpy().copy() for name, grad in rank.trainer.runtime.weights.grads.items()}

        return on_ranks(config_of(precision, ranks, where.device), graph, body, device_of=where.device_of)[0]  # type: ignore[no-any-return]

    exact, rounded = gradients("fp64"), gradients(narrow)
    for name, expected in exact.items():
        assert rounded[name].dtype == np.float32
        error = np.linalg.norm(rounded[name] - expected) / np.linalg.norm(expected)
        assert 1e-6 < error < 0.03, (name, error)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("narrow", ["bf16", "mixed"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "model",
    [{"norm_layer": "layer"}, {"norm_layer": "batch"}, {"kind": "gin"}, {"kind": "gin", "norm_layer": "batch"}],
    ids=["layer", "batch", "gin", "gin-batch"],
)
def test_norms_read_rows_in_the_type_they_have(where: Where, ranks: int, narrow: str, model: dict[str, str]) -> None:
    """Fails if a kernel of norms, which has but addresses, reads or writes rows as another type."""

    def gradients(precision: str) -> np.ndarray:
        def body(rank: Rank) -> np.ndarray:
            rank.trainer.gradients(3)
            return np.concatenate(
                [g.double().cpu().numpy().ravel() for g in rank.trainer.runtime.weights.grads.values()]
            )

        # No kink, across which rounding would move an activation.
        config = config_of(precision, ranks, where.device, activation="gelu", dropout=0.0, **model)
        found: list[np.ndarray] = on_ranks(config, small(), body, device_of=where.device_of)
        return found[0]

    exact, rounded = gradients("fp64"), gradients(narrow)
    assert 1e-6 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.05


@pytest.mark.parametrize("where", WHERE)
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

        config = config_of(precision, device=where.device, dropout=0.0)
        small_steps = dataclasses.replace(config, train=dataclasses.replace(config.train, lr=2e-4))
        return on_ranks(small_steps, small(), body, device_of=where.device_of)[0]  # type: ignore[no-any-return]

    exact, rounded = losses("fp32"), losses("bf16")
    assert exact[-1] < exact[0]
    # Most weights lie near 0.2, where bf16 has a spacing of 1e-3: without master weights no step of 2e-4 would count.
    assert rounded[0] - rounded[-1] == pytest.approx(exact[0] - exact[-1], rel=0.3)


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize(("ranks", "features"), [(1, "dense"), (3, "dense"), (1, "sparse"), (2, "sparse")])
def test_device_memory_is_as_planned(
    precision: str, ranks: int, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank takes memory of a GPU that its plan does not know, or plans much that it never takes."""
    taken = taken_on_gpus(monkeypatch)
    graph = make_graph(pattern("directed", 1500, 9), num_features=190, num_classes=7, sparse=True, seed=3)
    config = config_of(precision, ranks, hidden=(64, 32))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, features=features))  # type: ignore[arg-type]

    for found in on_ranks(config, graph, lambda rank: share_of_plan(rank, taken), device_of=EMULATED.device_of):
        assert 0.93 < found <= 1.0


@pytest.mark.parametrize("strategy", ["broadcast", "halo", "slice", "delayed"])
def test_bf16_repeats_its_bits_on_a_cpu(strategy: str) -> None:
    """Fails if threads or a second run change a bit of a curve in bf16, or ranks change more than bf16 rounds."""

    def losses(ranks: int, threads: int = 1, precision: str = "bf16") -> list[float]:
        config = config_of(precision, ranks, "cpu", input_dropout=0.2)
        run = dataclasses.replace(config.run, strategy=strategy, threads=threads)  # type: ignore[arg-type]
        # At the rate of other tests this curve climbs again, and a climb magnifies what ranks round differently.
        config = dataclasses.replace(config, run=run, train=dataclasses.replace(config.train, lr=0.005))
        return on_ranks(config, small(), lambda rank: [rank.trainer.step(epoch) for epoch in range(6)])[0]  # type: ignore[no-any-return]

    shared = losses(3)
    assert losses(3, threads=2) == shared
    alone = losses(1)
    assert losses(1, threads=2) == alone
    np.testing.assert_allclose(shared, alone, rtol=5e-3)
    assert alone != losses(1, precision="fp32")


TIGHT = tight(2**17)
"""Holds a panel of an operand of a test's size, but not the operand."""


def greediest(matrix: MatrixTraits, width: int, item: int, figures: Figures, *, summed: bool = True) -> SpmmChoice:
    """The way of a product that works in most memory."""
    ways = candidates(matrix, width, item, figures, summed=summed).values()
    return max(ways, key=lambda way: (way.panel * item * matrix.columns, way.blocks))


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "fp64"])
@pytest.mark.parametrize(("ranks", "features"), [(1, "dense"), (3, "sparse")])
def test_host_kernels_keep_to_their_plan(
    precision: str, ranks: int, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if packed panels, blocks, converted operands or schedules of a run take more than is planned."""
    monkeypatch.setattr(assemble, "figures_here", lambda config: TIGHT)
    monkeypatch.setattr(cpu_spmm, "choose_spmm", greediest)
    adj = pattern("directed", 1100, 9)
    config = config_of(precision, ranks, "cpu", hidden=(64, 33), input_dropout=0.1)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, features=features))  # type: ignore[arg-type]
    graph = make_graph(adj, num_features=190, num_classes=7, sparse=True, seed=3)

    def shares(rank: Rank) -> tuple[float, float, set[str]]:
        rank.trainer.gradients(0)
        rank.trainer.evaluate()
        backend: Any = rank.trainer.runtime.backend
        products = backend.sparse_products.products
        schedules = {id(p.pattern.schedule): p.pattern.schedule for p in products}.values()
        kept = sum(s.chunks.nbytes + s.parts.nbytes + s.hubs.nbytes for s in schedules)
        planned = rank.plan.regions
        ways = {product.choice.way for product in products}
        return backend.work_space_bytes / planned["kernel work space"], kept / planned["kernel schedules"], ways

    for used, kept, ways in on_ranks(config, graph, shares):
        # Parts of hub rows, which this graph has not, are planned too.
        assert 0.3 < used <= 1.0
        assert 0.5 < kept <= 1.0
        assert "panels" in ways


def test_a_plan_without_kernels_counts_with_who_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan needs the compiled kernels, or counts with less memory than who multiplies may take."""

    def missing() -> str:
        raise BackendError("the CPU kernels are missing")

    config = config_of("bf16", 1, "cpu", hidden=(600,))
    shape = graph_shape(small(), config)

    def planned() -> int:
        return plan_shape(config, shape).largest.regions["kernel work space"]

    here = planned()
    monkeypatch.setattr(native, "dense_isa", lambda: "baseline")
    torchs = planned()
    monkeypatch.setattr(native, "dense_isa", missing)
    assert planned() == max(here, torchs) > 0
