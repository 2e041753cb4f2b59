"""Pairs in memory whose addresses do not change: the bits of pairs as they are, one recording, uploads, planned memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.rank import Rank
from mggcn.backend.cuda.capture import WARM_CALLS
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError
from mggcn.feed.packed import _Memory
from mggcn.feed.pairs import LinkDraws
from mggcn.memory.device import not_captured
from tests.devices import EMULATED, GPU, share_of_plan, taken_on_gpus
from tests.emulator.capture import Allocator, CaptureDevice, stand_in
from tests.emulator.streams import StreamsDevice
from tests.emulator.strict import StrictDevice
from tests.feed.test_parts import planned
from tests.graphs import on_ranks
from tests.train.test_links import config_of, graph_of
from tests.train.test_padded import steps_of

BATCH: dict[str, Any] = {"batch": 23, "fanout": (4, 3)}
LINKS: dict[str, dict[str, Any]] = {
    "dot": {},
    "network": {"decoder": (4,), "negatives": 2},
    "in-batch": {"negatives_from": "in-batch", "negatives": 2},
}


def pairs_config(name: str, sample: dict[str, Any], ranks: int = 1, device: Any = "cpu") -> Config:
    return config_of(ranks, {"dropout": 0.4}, {"precision": "fp32", "device": device}, sample, **LINKS[name])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have pairs kept in one place on the CPU, too, and batches filled up."""
    for room in ("rank", "batches"):
        monkeypatch.setattr(f"mggcn.assemble.{room}.pads_batches", lambda config: bool(config.sample.batch))
    monkeypatch.setattr("mggcn.assemble.rank.keeps_pairs", lambda config: not config.sample.batch)
    return monkeypatch


def compare(config: Config, patched: pytest.MonkeyPatch) -> None:
    """Compare pairs that are kept in one place, of batches that are filled up, with pairs as they are."""
    graph = graph_of("weighted")
    found = on_ranks(config, graph, steps_of)
    patched.undo()
    for mine, expected in zip(found, on_ranks(config, graph, steps_of), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sample", [{}, BATCH, BATCH | {"plan": "bound", "ahead": 2}], ids=["whole", "batch", "bound"])
@pytest.mark.parametrize("name", LINKS)
@pytest.mark.covering(2)
def test_pairs_in_one_place_have_the_same_bits(
    name: str, sample: dict[str, Any], ranks: int, kept: pytest.MonkeyPatch
) -> None:
    """Fails if a pair that only fills up is counted or given a gradient, an end finds another pair's, or a step is not
    scaled by the number of its own pairs.
    """
    compare(pairs_config(name, sample, ranks), kept)


FAULTS: dict[str, Callable[[_Memory, Any, Any], None]] = {
    "pairs that fill up count": lambda memory, pairs, room: memory.fill("mask", 0, room.pairs, 1),
    "a step's own number of pairs": lambda memory, pairs, room: memory.arrays["scale"].fill(1.0 / room.pairs),
    "negatives are links": lambda memory, pairs, room: memory.put("labels", np.ones(pairs.heads.size)),
    "ends of the last row": lambda memory, pairs, room: memory.fill(
        "pair_indptr", pairs.indptr.size - 1, room.rows + 1, 0
    ),
    "places of tails": lambda memory, pairs, room: memory.put("pair_indices", pairs.ends),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, kept: pytest.MonkeyPatch) -> None:
    """Fails if what a device reads of pairs could be another thing and nothing would be noticed."""
    original = _Memory.put_pairs

    def faulty(self: _Memory, pairs: Any, room: Any) -> None:
        original(self, pairs, room)
        FAULTS[fault](self, pairs, room)

    kept.setattr(_Memory, "put_pairs", faulty)
    with pytest.raises(AssertionError):
        compare(pairs_config("network", BATCH | {"plan": "bound"}), kept)


def test_more_pairs_than_planned_are_refused(kept: pytest.MonkeyPatch) -> None:
    """Fails if pairs are written behind their memory."""
    original = LinkDraws._pairs

    def more(self: LinkDraws, heads: Any, tails: Any, *rest: Any) -> Any:
        return original(self, np.concatenate([heads, heads[:1]]), np.concatenate([tails, tails[:1]]), *rest)

    kept.setattr(LinkDraws, "_pairs", more)
    with pytest.raises(PlanError, match=r"pairs of 61 rows, but at most \d+ of 61 were planned"):
        on_ranks(pairs_config("dot", {}), graph_of(), steps_of)


@pytest.mark.parametrize("sample", [{}, BATCH], ids=["whole", "batch"])
@pytest.mark.parametrize("name", ["dot", "network"])
def test_a_step_on_pairs_can_be_recorded(name: str, sample: dict[str, Any]) -> None:
    """Fails if a step hides a number of its own in a launch, looks, or allocates, or does not train as the CPU."""
    device = StrictDevice(seed=5)

    def losses(rank: Rank) -> Any:
        trainer = rank.trainer
        return [trainer.step(epoch) for epoch in range(4)], trainer.steps, trainer.states, trainer.links()

    config = pairs_config(name, sample, device="cuda")
    assert not not_captured(config)
    ((found, steps, states, scores),) = on_ranks(config, graph_of(), losses, device_of=lambda *_: device)
    assert device.repeats == 4 * steps - WARM_CALLS - 1 > 0
    assert states["epoch"] == "captured"
    ((expected, _, _, on_cpu),) = on_ranks(pairs_config(name, sample), graph_of(), losses)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert scores.keys() == on_cpu.keys() == {"val", "test"}
    for split, every in scores.items():
        for metric, score in every.items():
            assert score == pytest.approx(on_cpu[split][metric], abs=0.02), (split, metric)


@pytest.mark.parametrize("name", ["dot", pytest.param("network", marks=pytest.mark.slow)])
def test_steps_on_links_are_recorded_once_and_parts_run_beside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step is recorded anew for a batch, or one that comes in parts loses pairs of some."""
    stand_in(monkeypatch, Allocator())
    (whole,) = on_ranks(pairs_config(name, BATCH), graph_of(), steps_of)
    planned(monkeypatch, 69, 0.5)
    device = CaptureDevice(seed=3)
    (found,) = on_ranks(pairs_config(name, BATCH, device="cuda"), graph_of(), steps_of, device_of=lambda *_: device)
    assert device.replays == len(whole) - 3 - WARM_CALLS
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("sample", [BATCH, BATCH | {"ahead": 0}], ids=["ahead", "alone"])
def test_pairs_are_sent_in_the_order_of_steps(sample: dict[str, Any]) -> None:
    """Fails if pairs are copied while a step may read those before, or host memory is written before its copy has ended."""
    device = StreamsDevice(seed=2)

    def body(rank: Rank) -> Any:
        work = rank.trainer._epoch._work

        def reading() -> None:
            pairs = rank.trainer.runtime.inputs.pairs  # kernels read it, which the detector does not see
            assert pairs is not None
            for array in (pairs.heads, pairs.tails, pairs.pair, pairs.matrix.indptr, pairs.matrix.indices):
                array.sum()
            work.step()

        with device.running(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(rank.trainer._epoch, "_repeatable", reading)
            return [rank.trainer.step(epoch) for epoch in range(3)]

    config = pairs_config("dot", sample, device="cuda")
    (found,) = on_ranks(config, graph_of(), body, device_of=lambda *_: device)
    assert device.races.found == []
    assert device.changed == []
    assert device.uploads
    (expected,) = on_ranks(
        pairs_config("dot", sample), graph_of(), lambda rank: [rank.trainer.step(e) for e in range(3)]
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sample", [{}, BATCH | {"batch": 400}], ids=["whole", "batch"])
@pytest.mark.parametrize("name", ["dot", "network"])
@pytest.mark.covering(2)
def test_a_gpus_memory_is_as_planned(
    name: str, sample: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if pairs take memory of a GPU that its plan does not know, or much is planned that they never take."""
    monkeypatch.setattr("mggcn.planning.links.PAIR_BYTES", 0)  # what scores take comes and goes, by torch
    taken = taken_on_gpus(monkeypatch)
    config = pairs_config(name, sample, ranks, "cuda")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden=(64,)))

    def share(rank: Rank) -> float:
        rank.trainer.step(0)
        assert rank.plan.pinned_bytes > 0
        return share_of_plan(rank, taken)

    graph = graph_of("community", 3)
    for found in on_ranks(config, graph, share, device_of=EMULATED.device_of):
        assert 0.93 < found <= 1.0


def test_links_are_scored_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if scores depend on how many pairs are scored at once on a device, or it holds more than some at once."""
    graph, found = graph_of("random", 40), list[Any]()
    largest = 0

    def body(rank: Rank) -> Any:
        nonlocal largest
        scorer = rank.trainer._ranking._decoder  # type: ignore[union-attr]  # of a run on links
        original = scorer._of

        def noted(one: Any, others: Any) -> Any:
            nonlocal largest
            largest = max(largest, others.numel())
            return original(one, others)

        monkeypatch.setattr(scorer, "_of", noted)
        return rank.trainer.links()

    for nbytes in (1 << 20, 8 * 5 * 40 * 3):
        monkeypatch.setattr("mggcn.train.link_scores.PAIR_BYTES", nbytes)
        largest = 0
        config = pairs_config("network", {}, device="cuda")
        found += on_ranks(config, graph, body, device_of=EMULATED.device_of)
        assert largest <= nbytes / 8
    for split, every in found[0].items():
        assert found[1][split] == pytest.approx(every, rel=1e-12)


def test_cusparse_is_refused() -> None:
    """Fails if a product is prepared for the matrix of the first step's pairs."""
    config = pairs_config("dot", {}, device="cuda")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, spmm="cusparse"))
    with pytest.raises(ConfigError, match="every step that predicts links has others; use own"):
        on_ranks(config, graph_of(), steps_of, device_of=EMULATED.device_of)


@pytest.mark.cuda
@pytest.mark.parametrize("sample", [{}, BATCH, BATCH | {"ahead": 0}], ids=["whole", "batch", "batch alone"])
@pytest.mark.parametrize("name", LINKS)
def test_a_gpu_records_steps_on_links(name: str, sample: dict[str, Any]) -> None:
    """Fails if a step cannot be captured, or its replays over other pairs differ from the CPU's steps."""

    def losses(rank: Rank) -> Any:
        return [rank.trainer.step(epoch) for epoch in range(5)], rank.trainer.states["epoch"]

    config = pairs_config(name, sample, device="cuda")
    ((found, state),) = on_ranks(config, graph_of(), losses, device_of=GPU.device_of)
    assert state == "captured"
    ((expected, _),) = on_ranks(pairs_config(name, sample), graph_of(), losses)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
