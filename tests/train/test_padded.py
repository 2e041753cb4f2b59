"""Batches that are filled up to the most that a step may have: the bits of batches as they are, one recording, and uploads
beside the step.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable
from functools import partialmethod
from typing import Any, Literal

import numpy as np
import pytest

from mggcn.assemble.rank import Rank
from mggcn.backend.cuda.capture import WARM_CALLS
from mggcn.config import Config
from mggcn.feed.packed import PackedBatch
from mggcn.feed.sampled import SampledFeed
from mggcn.graph.csr import Graph
from mggcn.memory.device import not_captured
from tests.devices import EMULATED, GPU, share_of_plan, taken_on_gpus
from tests.emulator.capture import Allocator, CaptureDevice, stand_in
from tests.emulator.streams import StreamsDevice
from tests.emulator.strict import StrictDevice
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_parts import planned
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, on_ranks, pattern
from tests.model.test_rgcn import typed_graph
from tests.train.tasks import TASKS, labelled

EPOCHS = 2
DROPPED = {"dropout": 0.4, "input_dropout": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    **{name: model | ({} if model.get("jumping") else DROPPED) for name, model in MODELS.items()},
    "batch norm": {"kind": "gcn", "norm_layer": "batch"} | DROPPED,
    "sage, batch norm": {"kind": "sage", "aggregator": "mean", "norm_layer": "batch", "residual": "linear"},
    "gin, layer norm": {"kind": "gin", "norm_layer": "layer"},
    "gat, weights dropped": {"kind": "gat", "heads": 2, "hidden": (8,), "attention_dropout": 0.3},
    "appnp": {"kind": "appnp", "hops": 2},
    "own loops": {"kind": "gcn", "self_loops": True, "norm": "mean"},
}
SUMMED_BY_TORCH = ("gatv2",)
"""Their weights' gradients are columns summed by torch, in an order that the number of rows decides."""


def config_of(model: dict[str, Any], ranks: int = 1, device: Literal["cpu", "cuda"] = "cpu", **sample: Any) -> Config:
    config = sampled(ranks, model, **sample)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision="fp32", device=device))


@pytest.fixture
def filled_up(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have batches filled up on the CPU, too."""
    for room in ("rank", "batches"):
        monkeypatch.setattr(f"mggcn.assemble.{room}.pads_batches", lambda config: bool(config.sample.batch))
    # As where batches are filled up: features are gathered.
    monkeypatch.setattr("mggcn.planning.decisions.may_read_stored", lambda config, shape: False)
    return monkeypatch


def steps_of(rank: Rank) -> list[Any]:
    """Gradients of every step of two epochs, their losses, and the weights in the end."""
    trainer, found = rank.trainer, list[Any]()
    for epoch in range(EPOCHS):
        first = epoch * trainer.steps
        trainer._epoch.start(8123, first)
        for step in range(first, first + trainer.steps):
            trainer._epoch.run(step)
            found.append(trainer.runtime.weights.grad.clone().numpy())
        found.append(trainer._epoch.history(first, first + trainer.steps)[:, 0])
    return [*found, trainer.runtime.weights.flat.clone().numpy()]


def compare(config: Config, graph: Graph, patched: pytest.MonkeyPatch, rtol: float = 0.0) -> None:
    """Compare filled-up batches with batches as they are."""
    found = on_ranks(config, graph, steps_of)
    patched.undo()
    for mine, expected in zip(found, on_ranks(config, graph, steps_of), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())


QUICK = ("sage", "sage-max", "gat, weights dropped", "gatv2", "batch norm", "gin, layer norm")


def some(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """All names, those that are not quick only where everything runs."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", some(KINDS, QUICK))
def test_filled_up_batches_have_the_same_bits(name: str, filled_up: pytest.MonkeyPatch) -> None:
    """Fails if a row that only fills up is summed, normalised, drawn a mask or given a gradient, or a step is not scaled by
    the number of its own seeds.
    """
    compare(config_of(KINDS[name]), graph_of(), filled_up, 1e-6 if name in SUMMED_BY_TORCH else 0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_filled_up_batches_of_two_ranks_have_the_same_bits(name: str, filled_up: pytest.MonkeyPatch) -> None:
    """Fails if ranks with other numbers of rows give another sum than without what fills up."""
    compare(config_of(KINDS[name], 2), graph_of(), filled_up, 1e-6 if name in SUMMED_BY_TORCH else 0.0)


@pytest.mark.parametrize("task", some(TASKS, ("balanced", "bce")))
def test_every_task_has_the_same_bits(task: str, filled_up: pytest.MonkeyPatch) -> None:
    """Fails if a loss reads a label that only fills up, or is scaled by the first step's seeds."""
    config = config_of(KINDS["sage"], 1 + (task in ("balanced", "bce")))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **TASKS[task]))
    compare(config, labelled(graph_of(), task), filled_up)


def test_scales_of_blocks_have_the_same_bits(filled_up: pytest.MonkeyPatch) -> None:
    """Fails if a row set is scaled by the degrees of another one."""
    compare(config_of(KINDS["gcn"], weights="block", draw="replace"), graph_of(), filled_up)


@pytest.mark.parametrize("name", some(("sage", "gcn"), ("sage",)))
def test_sums_of_the_first_layer_have_the_same_bits(name: str, filled_up: pytest.MonkeyPatch) -> None:
    """Fails if rows of A X that only fill up are read, or A X and X change places."""
    compare(config_of(MODELS[name], first="full"), graph_of(), filled_up)


def test_parts_of_a_filled_up_step_add_up(filled_up: pytest.MonkeyPatch) -> None:
    """Fails if gradients of a step's parts are lost, or those of one step are added to the next."""
    config = config_of(KINDS["sage"])
    (whole,) = on_ranks(config, graph_of(), steps_of)
    planned(filled_up, 14, 0.5)
    ((found, parts),) = on_ranks(
        config, graph_of(), lambda rank: (steps_of(rank), len(list(rank.feed.epoch(8123, 0))) / rank.trainer.steps)
    )
    assert parts > 1
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6 * np.abs(other).max())


def test_what_fills_up_is_not_read(filled_up: pytest.MonkeyPatch) -> None:
    """Fails if a result depends on what earlier batches left behind the rows of a batch."""
    original, losses = PackedBatch.__init__, []
    for junk in (0, 7):

        def filled(self: PackedBatch, *arguments: Any, junk: int = junk) -> None:
            original(self, *arguments)
            for name in ("features", "values0", "values1", "values_t0", "values_t1", "row_scale0", "col_scale1"):
                self.arrays[name].view(np.float32).fill(junk)

        filled_up.setattr(PackedBatch, "__init__", filled)
        (found,) = on_ranks(config_of(KINDS["gcn"]), graph_of(), steps_of)
        losses.append(found)
    for one, other in zip(*losses, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_that_fill_up_are_finite(ahead: int, filled_up: pytest.MonkeyPatch) -> None:
    """Fails if rows behind a small batch are those of a larger one before, so that one that overflows spoils gradients."""

    def body(rank: Rank) -> list[bool]:
        loader = rank.trainer._epoch._load.__self__  # type: ignore[attr-defined]  # a bound method
        batches = sorted(rank.feed.epoch(8123, 0), key=lambda batch: -batch.rows[loader._stack.blocks[0].sources].size)
        found = []
        for batch in batches:
            loader.load(batch)
            rows = rank.trainer.runtime.inputs.rows[loader._stack.blocks[0].sources].dense
            size = batch.rows[loader._stack.blocks[0].sources].size
            assert rows is not None
            found.append(size < len(rows) and not rows[size:].any() and bool(rows[:size].any()))
        return found

    filled_up.setattr(SampledFeed, "__init__", partialmethod(SampledFeed.__init__, keep=True))
    (found,) = on_ranks(config_of(KINDS["sage"], batch=7, ahead=ahead, plan="bound"), graph_of(), body)
    assert len(found) > 1
    assert all(found)


@pytest.mark.parametrize(
    "name", some(("gcn", "sage-max", "gat, weights dropped", "residual"), ("gat, weights dropped",))
)
def test_a_step_on_a_batch_can_be_recorded(name: str) -> None:
    """Fails if a step hides a number of its own in a launch (a count, a scale, a mask), looks, or allocates, also where the
    last batch of an epoch is short.
    """
    device, config = StrictDevice(seed=5), config_of(KINDS[name], device="cuda")

    def losses(rank: Rank) -> Any:
        return [rank.trainer.step(epoch) for epoch in range(2)], rank.trainer.steps, rank.trainer.states

    ((found, steps, states),) = on_ranks(config, graph_of(), losses, device_of=lambda *_: device)
    assert device.repeats == 2 * steps - 3 > 0
    assert states["epoch"] == "captured"
    ((expected, *_),) = on_ranks(config_of(KINDS[name]), graph_of(), losses)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_steps_are_recorded_once_and_parts_run_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step is recorded anew for a batch, or one that comes in parts is not the recorded one after the parts."""
    stand_in(monkeypatch, Allocator())
    config = config_of(KINDS["sage"])
    (whole,) = on_ranks(config, graph_of(), steps_of)
    planned(monkeypatch, 14, 0.5)
    device = CaptureDevice(seed=3)
    (found,) = on_ranks(config_of(KINDS["sage"], device="cuda"), graph_of(), steps_of, device_of=lambda *_: device)
    steps = len(whole) - EPOCHS - 1
    assert device.replays == steps - WARM_CALLS
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("what", ["relations", "shared"])
def test_steps_that_differ_are_not_recorded(what: str) -> None:
    """Fails if a step is recorded whose sizes are others with every batch: relations, or rows that ranks exchange."""
    ranks, model = (1, {"kind": "rgcn", "hidden": (8,)}) if what == "relations" else (2, MODELS["gcn"])
    config, graph = config_of(model, ranks, "cuda"), typed_graph("random") if what == "relations" else graph_of()
    if what == "shared":
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, batches="cooperative"))

    def losses(rank: Rank) -> Any:
        return [rank.trainer.step(epoch) for epoch in range(2)], rank.trainer.states["epoch"]

    found, state = on_ranks(config, graph, losses, device_of=lambda *_: StrictDevice(seed=5))[0]
    assert state == "eager"
    on_cpu = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
    np.testing.assert_allclose(found, on_ranks(on_cpu, graph, losses)[0][0], rtol=2e-5)
    assert not_captured(config)


@pytest.mark.parametrize("ahead", [0, 2])
def test_uploads_run_beside_the_step(ahead: int) -> None:
    """Fails if a batch is copied on the stream of kernels, a copy and a step are not ordered by an event, host memory is
    written before its copy has ended, or the thread of the steps waits for the device.
    """
    device = StreamsDevice(seed=2)

    def body(rank: Rank) -> Any:
        loader = rank.trainer._epoch._load.__self__  # type: ignore[attr-defined]  # a bound method
        work = rank.trainer._epoch._work

        def reading() -> None:
            loader._read.sum()  # kernels read it, which the detector does not see
            work.step()

        with device.running(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(rank.trainer._epoch, "_repeatable", reading)
            return [rank.trainer.step(epoch) for epoch in range(2)]

    (found,) = on_ranks(
        config_of(KINDS["gcn"], device="cuda", ahead=ahead), graph_of(), body, device_of=lambda *_: device
    )
    assert device.races.found == []
    assert device.changed == []
    # One copy, and at times what clears rows of an earlier batch: not one for each array.
    assert 6 <= len(device.uploads) <= 2 * 6
    assert (threading.current_thread().name in device.waited) == (not ahead)
    assert all(name.startswith("mggcn-feed") for name in device.waited) == bool(ahead)
    (expected,) = on_ranks(config_of(KINDS["gcn"]), graph_of(), lambda rank: [rank.trainer.step(e) for e in range(2)])
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_records_steps_on_batches(name: str, ahead: int) -> None:
    """Fails if a step cannot be captured, or its replays over other batches differ from the CPU's steps."""

    def losses(rank: Rank) -> Any:
        return [rank.trainer.step(epoch) for epoch in range(4)], rank.trainer.states["epoch"]

    ((found, state),) = on_ranks(
        config_of(KINDS[name], device="cuda", ahead=ahead), graph_of(), losses, device_of=GPU.device_of
    )
    assert state == "captured"
    ((expected, _),) = on_ranks(config_of(KINDS[name]), graph_of(), losses)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_gpus_memory_is_as_planned(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a batch takes memory of a GPU that its plan does not know, or one more than the step and the next."""
    taken = taken_on_gpus(monkeypatch)
    graph = make_graph(pattern("directed", 700, 9), num_features=90, num_classes=7, seed=3)
    config = config_of({"kind": "sage", "aggregator": "mean", "hidden": (64,)}, 2, "cuda", batch=150, ahead=ahead)

    def share(rank: Rank) -> float:
        rank.trainer.step(0)
        return share_of_plan(rank, taken)

    for found in on_ranks(config, graph, share, device_of=EMULATED.device_of):
        assert 0.93 < found <= 1.0
