"""Runs with rows on the host between the passes (run.capacity = host): the bits of runs in memory, whatever the copies'
stream does beside the kernels; and what a missing wait, or a slot that two values share, would do.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError
from mggcn.graph.csr import Graph
from mggcn.model.kinds.hosted import Fetched, OnHost, ToHost
from mggcn.train.hosted import PinnedRows
from tests.devices import EMULATED, DeviceOf
from tests.emulator.capture import Allocator, CaptureDevice, stand_in
from tests.emulator.device import EmulatedDevice
from tests.emulator.late import LateDevice
from tests.emulator.streams import StreamsDevice
from tests.graphs import make_graph, pattern
from tests.train.poisoned import reads_what_it_was_given

ANY, ALL_AT_ONCE = 1 << 40, 1
"""Limits for which all copies run beside sums over neighbours, and beside nothing."""
DROPS: dict[str, Any] = {"hidden": (12, 12, 9), "dropout": 0.4}
MODELS: dict[str, dict[str, Any]] = {
    "gcn": DROPS,
    "gcn, layer norm, residuals": DROPS | {"norm_layer": "layer", "residual": "linear", "activation": "gelu"},
    "gcn, jumping": DROPS | {"jumping": "max", "residual": "identity", "hidden": (8, 8, 8), "activation": "elu"},
    "sage mean": DROPS | {"kind": "sage", "aggregator": "mean"},
    "sage max": DROPS | {"kind": "sage", "aggregator": "max"},
    "gin, batch norm": DROPS | {"kind": "gin", "norm_layer": "batch"},
    "gat": DROPS | {"kind": "gat", "heads": 2, "hidden": (12, 12), "attention_dropout": 0.3},
    "gatv2": DROPS | {"kind": "gatv2", "heads": 2, "hidden": (12, 12)},
    "mlp": DROPS | {"kind": "mlp"},
}
FLOATS = ("gat", "gatv2", "sage max")
"""Models that keep numbers of vertices, which bfloat16 cannot hold."""


def config_of(name: str = "gcn", ranks: int = 1, capacity: str = "host", **run: Any) -> Config:
    return Config(
        model=ModelConfig(**MODELS[name]),
        train=TrainConfig(seed=8821, epochs=4),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            device="cuda",
            transport="threads" if ranks > 1 else "single",
            capacity=capacity,  # type: ignore[arg-type]
            **run,
        ),
    )


@functools.cache
def graph_of() -> Graph:
    return make_graph(pattern("directed", 37, 6), num_features=7, num_classes=3, seed=8)


def late(config: Config, comm: Communicator) -> Any:
    return LateDevice(seed=7919 * comm.rank + 13)


def on_ranks(config: Config, body: Any, limit: int = ANY, device_of: DeviceOf = EMULATED.device_of) -> list[Any]:
    """What `body` gives on each rank of a run that may use `limit` bytes."""
    config, graph = resolve(config, graph_of()), graph_of()
    plan, owners = plan_graph(config, graph, limit=limit)

    def run(comm: Communicator) -> Any:
        return body(make_rank(config, graph, plan, owners, comm, device_of=device_of))

    return run_threads(config.run.ranks, run, 60) if config.run.ranks > 1 else [run(SingleCommunicator())]


def trained(rank: Rank) -> Any:
    """Losses, weights, scores and logits."""
    losses = [rank.trainer.step(epoch) for epoch in range(2)]
    return losses, rank.trainer.runtime.weights.state_dict(), rank.trainer.evaluate(), rank.trainer.scores()


def same_bits(one: Any, other: Any) -> bool:
    weights = all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())
    return bool(one[0] == other[0] and weights and one[2] == other[2] and np.array_equal(one[3], other[3]))


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("device_of", [EMULATED.device_of, late], ids=["at once", "late"])
@pytest.mark.parametrize("limit", [ANY, ALL_AT_ONCE])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (2, "broadcast"), (2, "halo"), (2, "slice")])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, precision: str, ranks: int, strategy: str, limit: int, device_of: DeviceOf) -> None:
    """Fails if rows come back to the wrong place, too late or from another value, or a kernel reads others."""
    if name in FLOATS and precision in ("bf16", "mixed"):
        precision = "fp32"
    if name == "sage max" and strategy == "slice":
        strategy = "halo"  # slice refuses it
    run = {"precision": precision, "strategy": strategy}
    expected = on_ranks(config_of(name, ranks, "memory", **run), trained)
    found = on_ranks(config_of(name, ranks, **run), trained, limit, device_of)
    for one, other in zip(expected, found, strict=True):
        assert same_bits(one, other)
        assert np.isfinite(one[0]).all()


@pytest.mark.parametrize("limit", [ANY, ALL_AT_ONCE])
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_every_op_reads_what_it_was_given(name: str, limit: int) -> None:
    """Fails if an op reads memory of the arena outside of its planned life: of a value that is on the host."""
    assert on_ranks(config_of(name), reads_what_it_was_given, limit) == [True]


@pytest.mark.parametrize("fault", ["", "OnHost", "Fetched", "slot"])
def test_a_missing_wait_and_a_shared_slot_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run without a wait, or with two values in one slot, has the bits of one in memory all the same."""
    expected = on_ranks(config_of(capacity="memory"), trained)[0]
    if fault == "slot":
        begin = PinnedRows.begin

        def shared(self: PinnedRows) -> None:
            begin(self)
            self._slots[1] = self._slots[0]

        monkeypatch.setattr(PinnedRows, "begin", shared)
    elif fault:
        monkeypatch.setattr({"OnHost": OnHost, "Fetched": Fetched}[fault], "run", lambda *_: None)
    found = on_ranks(config_of(), trained, ALL_AT_ONCE, late)[0]
    assert same_bits(expected, found) == (not fault)


@pytest.mark.parametrize("fault", [False, True])
def test_copies_are_ordered_by_events(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a copy races with torch's operations on its rows, or the detector sees no race without the wait."""
    device = StreamsDevice(seed=2)
    if fault:
        monkeypatch.setattr(Fetched, "run", lambda *_: None)

    def body(rank: Rank) -> Any:
        with device.running():
            rank.trainer.runtime.begin_epoch(0)
            rank.trainer.runtime.run(rank.trainer.runtime.programs["train"])

    on_ranks(config_of("mlp"), body, device_of=lambda *_: device)
    assert device.uploads
    assert bool(device.races.found) == fault


def test_epochs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run with rows on the host is not recorded, or its replays differ from epochs op by op."""
    stand_in(monkeypatch, Allocator())

    def replayed(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(4)]
        return losses, rank.trainer.states["epoch"]

    ((expected, _),) = on_ranks(config_of(capacity="memory"), replayed)
    ((found, state),) = on_ranks(config_of(), replayed, device_of=lambda *_: CaptureDevice(seed=3))
    assert state == "captured"
    assert found == expected


def test_memory_is_pinned_once_before_the_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if memory is pinned in an epoch, or other than planned, or to score alone, or a refusal says not what to do."""
    pinned = list[tuple[int, bool]]()

    def pin(self: EmulatedDevice, nbytes: int, *, required: bool = False) -> torch.Tensor:
        pinned.append((nbytes, required))
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(EmulatedDevice, "pinned", pin)

    def body(rank: Rank) -> None:
        rank.trainer.evaluate()
        assert pinned == []
        for epoch in range(2):
            rank.trainer.step(epoch)
        assert pinned == [(rank.plan.host_bytes, True)]
        sent = [op for op in rank.plan.train.ops if isinstance(op.kind, ToHost)]
        assert rank.plan.host_bytes == sum(rank.plan.train.arena[op.operands[0]].spec.nbytes for op in sent) > 0

    on_ranks(config_of(), body)

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise BackendError("the system does not pin 7 bytes of the host's memory: out of memory")

    monkeypatch.setattr(EmulatedDevice, "pinned", refused)
    with pytest.raises(BackendError, match=r"rows on the host need .* pinned memory .* 7 bytes .*; raise .*ulimit -l"):
        on_ranks(config_of(), lambda rank: rank.trainer.step(0))


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_has_the_same_bits(name: str) -> None:
    """Fails if copies of a GPU are not ordered with its kernels, op by op or in a recorded graph, or none was recorded."""

    def replayed(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(4)]
        return losses, rank.trainer.runtime.weights.state_dict(), rank.trainer.states["epoch"]

    from tests.devices import GPU

    expected, *found = (
        on_ranks(config_of(name, capacity=capacity), replayed, limit, GPU.device_of)[0]
        for capacity, limit in (("memory", ANY), ("host", ANY), ("host", ALL_AT_ONCE))
    )
    for one in found:
        assert one[0] == expected[0]
        assert all(torch.equal(weight, expected[1][name]) for name, weight in one[1].items())
        assert one[2] == "captured"


def test_a_step_fewer_has_the_bits_too() -> None:
    """Fails if some values on the host and others in memory are taken for each other."""
    expected = on_ranks(config_of(capacity="memory"), trained)[0]
    config = config_of()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, memory_limit=ANY))
    assert same_bits(expected, on_ranks(config, trained)[0])
