"""Whole runs under every exact strategy: losses, bytes, messages and memory as planned, the same bits when resumed."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate import slice_columns
from mggcn.api.load import load_source
from mggcn.assemble.plan import STRATEGIES, plan_graph, plan_shape
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from tests.devices import EMULATED, share_of_plan, taken_on_gpus
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, pattern
from tests.shapes import PRODUCTS
from tests.train.test_trainer import assert_repeats_and_resumes, losses

ROWS = [name for name, strategy in STRATEGIES.items() if strategy.kind == "rows"]
OTHERS = [name for name in ROWS if name != "broadcast"]


def config_of(name: str, ranks: int, train: dict[str, Any] | None = None, **model: Any) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (8,), "dropout": 0.5} | model)),
        train=TrainConfig(**({"seed": 4441, "epochs": 8} | (train or {}))),
        run=RunConfig(ranks=ranks, threads=1, transport="threads" if ranks > 1 else "single", strategy=name),  # type: ignore[arg-type]
    )


def small(kind: str = "directed", sparse: bool = False, classes: int = 3) -> Graph:
    return make_graph(pattern(kind, 43, 6), num_features=40, num_classes=classes, sparse=sparse, seed=8)


def cora(data_root: Path, folder: Path) -> Graph:
    """Cora from a copy: partitions are kept beside a store."""
    return load_source(Path(shutil.copytree(data_root / "cora", folder / "cora")))


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_broadcast(data_root: Path, tmp_path: Path, name: str, ranks: int) -> None:
    """Fails if 50 epochs of Cora with dropout, in float32, differ from the staged broadcast's by more than rounding."""
    graph = cora(data_root, tmp_path)
    train = {"epochs": 50, "lr": 0.01, "weight_decay": 5e-4}
    base, other = (
        losses(graph, config_of(strategy, ranks, train, hidden=(16,), input_dropout=0.3))
        for strategy in ("broadcast", name)
    )
    np.testing.assert_allclose(other[0], base[0], rtol=1e-5)
    assert base[0][-1] < 0.9 * base[0][0]


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_under_an_order_by_locality(data_root: Path, tmp_path: Path, ranks: int) -> None:
    """Fails if the order of the rows decides more than rounding: 50 epochs of Cora, dropout and labels by original id."""
    graph = cora(data_root, tmp_path)
    base = config_of("broadcast", ranks, {"epochs": 50, "lr": 0.01}, hidden=(16,), input_dropout=0.3)
    other = dataclasses.replace(base, run=dataclasses.replace(base.run, order="locality"))
    first, second = (losses(graph, config)[0] for config in (base, other))
    np.testing.assert_allclose(second, first, rtol=1e-5)
    assert first[-1] < 0.9 * first[0]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_and_messages_are_as_planned(name: str, ranks: int) -> None:
    """Fails if a step or an evaluation sends a byte or a message that the plan does not know."""
    cases = [
        (False, (7,), "directed", 2),
        (True, (5, 9), "random", 3),
        (True, (), "empty", 2),
        (False, (), "random", 3),
    ]
    for number, (sparse, hidden, kind, classes) in enumerate(cases):
        metric = "roc_auc" if number in (0, 3) else "accuracy"
        dropout = 0.4 if sparse else 0.0
        config = config_of(name, ranks, {"metric": metric}, hidden=hidden, bias=number != 3, input_dropout=dropout)
        on_ranks(config, small(kind, sparse=sparse, classes=classes), assert_sent_as_planned)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["random", "directed"])
def test_matrices_lists_and_arena_take_what_is_planned(
    name: str, ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank holds a byte of matrices, lists or arena beyond its plan."""
    allocated: list[int] = []
    held: list[int] = []
    here = threading.local()
    allocate, upload = CpuBackend.allocate, CpuBackend.upload
    kind_of_plan = type(plan_graph(config_of(name, ranks), small(kind))[0].ranks[0].aggregation)
    build = kind_of_plan.build

    def counted_allocate(self: CpuBackend, nbytes: int) -> torch.Tensor:
        assert not getattr(here, "building", False)
        allocated.append(nbytes)
        return allocate(self, nbytes)

    def counted_upload(self: CpuBackend, array: np.ndarray) -> torch.Tensor:
        if getattr(here, "building", False):
            held.append(array.nbytes)
        return upload(self, array)

    def counted_build(*args: Any) -> Any:
        here.building = True
        try:
            return build(*args)
        finally:
            here.building = False

    monkeypatch.setattr(CpuBackend, "allocate", counted_allocate)
    monkeypatch.setattr(CpuBackend, "upload", counted_upload)
    monkeypatch.setattr(kind_of_plan, "build", counted_build)
    plans = on_ranks(config_of(name, ranks), small(kind), lambda rank: rank.plan)
    for plan in plans:
        allocated.remove(plan.arena_bytes)
    assert sum(held) == sum(plan.regions["graph"] for plan in plans) > 0


@pytest.mark.parametrize("name", OTHERS)
def test_a_configuration_repeats_and_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Fails if anything depends on time or thread scheduling, or an interrupted run goes on with other bits."""
    assert_repeats_and_resumes(config_of(name, 3, hidden=(6, 5)), small("random"), tmp_path)


def test_what_a_plan_says_of_the_strategies() -> None:
    """Fails if halo plans more bytes than the broadcast, slice's do not fall with P, or the whole matrix is forgotten."""
    shape = PRODUCTS

    def sent(name: str, ranks: int) -> tuple[int, int]:
        run = RunConfig(ranks=ranks, strategy=name)  # type: ignore[arg-type]
        rank = plan_shape(Config(model=ModelConfig(hidden=(256, 256)), run=run), shape).ranks[0]
        return rank.bytes_sent(rank.train), rank.regions["graph"]

    for ranks in (2, 4, 8):
        (broadcast, tiles), (halo, two), (slices, whole) = (
            sent(name, ranks) for name in ("broadcast", "halo", "slice")
        )
        assert halo <= broadcast
        # 2 (P - 1) / P of V rows against P - 1 times V rows: what slices of features send, up to units and row padding.
        assert slices == pytest.approx(2 / ranks * broadcast, rel=0.05)
        assert max(two, tiles) < whole
        assert whole == pytest.approx(sent("broadcast", 1)[1], rel=1e-6)


def test_scores_are_those_of_broadcast() -> None:
    """Fails if an evaluation takes another path than a training epoch, and that path is wrong."""
    scores = []
    for name in ROWS:
        config = config_of(name, 3, {"epochs": 3})
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision="fp64"))

        def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
            for epoch in range(3):
                rank.trainer.step(epoch)
            rank.trainer.evaluate()
            return rank.trainer.runtime.inputs.owned.ids.numpy(), rank.trainer.logits().numpy().copy()

        found = np.zeros((43, 3))
        for ids, logits in on_ranks(config, small(), body):
            found[ids] = logits
        scores.append(found)
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-9, atol=1e-11)


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
def test_a_gpu_holds_and_computes_what_is_planned(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if lists or slots of a GPU are not in its plan, or rows that travel in bf16 lose more than bf16 does."""
    taken = taken_on_gpus(monkeypatch)
    graph = make_graph(pattern("directed", 700, 9), num_features=70, num_classes=7, seed=3)

    def body(rank: Rank) -> tuple[float, float, np.ndarray]:
        share, loss = share_of_plan(rank, taken), rank.trainer.gradients(1)
        return share, loss, rank.trainer.runtime.weights.grad.float().cpu().numpy().copy()

    found = {}
    for strategy in ("broadcast", name):
        config = config_of(strategy, 3, hidden=(40,))
        run = dataclasses.replace(config.run, device="cuda", precision=precision)  # type: ignore[arg-type]
        found[strategy] = on_ranks(dataclasses.replace(config, run=run), graph, body, device_of=EMULATED.device_of)
    shares = [share for share, _, _ in found[name]]
    assert min(shares) > 0.93, shares
    assert max(shares) <= 1.0, shares
    (_, loss, grad), (_, base_loss, base) = found[name][0], found["broadcast"][0]
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert loss == pytest.approx(base_loss, rel=tolerance)
    assert np.linalg.norm(grad - base) <= tolerance * np.linalg.norm(base)


def test_slices_in_halves_train_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if halves change a bit of a loss, a gradient or a mask of dropout, or send what is not planned."""
    config = config_of("slice", 3, hidden=(192, 192), input_dropout=0.2)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cuda"))

    def body(rank: Rank) -> tuple[int, float, np.ndarray]:
        assert_sent_as_planned(rank)
        loss = rank.trainer.gradients(1)
        grad = rank.trainer.runtime.weights.grad.float().cpu().numpy().copy()
        return rank.plan.messages(rank.plan.train), loss, grad

    halves = on_ranks(config, small(), body, device_of=EMULATED.device_of)
    monkeypatch.setattr(slice_columns, "LEAST_BYTES", 10**9)
    whole = on_ranks(config, small(), body, device_of=EMULATED.device_of)
    # Layer 2 aggregates at width 192, forwards and backwards, layers 1 and 3 at widths 40 and 3.
    for (messages, loss, grad), (fewer, one_loss, one_grad) in zip(halves, whole, strict=True):
        assert messages == fewer + 4
        assert loss == one_loss
        np.testing.assert_array_equal(grad, one_grad)
