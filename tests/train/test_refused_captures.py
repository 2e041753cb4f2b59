"""Runs whose CUDA graphs are refused: at every call that a recording holds they go on eagerly, with the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.comm.base import Communicator
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError
from mggcn.graph.csr import Graph
from mggcn.runs.train import captures
from mggcn.train.log import RunLog
from tests.comm.worlds import Nccl
from tests.emulator.capture import BEGIN, END, Allocator, CaptureDevice, stand_in
from tests.emulator.device import EmulatedDevice
from tests.graphs import make_graph, on_ranks, pattern

EPOCHS = 4
ERRORS = [
    RuntimeError("operation not permitted when stream is capturing"),
    torch.OutOfMemoryError("CUDA out of memory"),
    BackendError("cusparseSpMM failed with cuSPARSE status 7"),
    type("CompileException", (Exception,), {})("nvrtc: error"),
]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    stand_in(monkeypatch, found)
    return found


def config_of(ranks: int = 1, strategy: str = "broadcast") -> Config:
    return Config(
        model=ModelConfig(hidden=(5,), dropout=0.5),
        train=TrainConfig(seed=7103, epochs=EPOCHS, lr=0.02, eval_every=1),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            device="cuda",
            transport="nccl" if ranks > 1 else "single",
            strategy=strategy,  # type: ignore[arg-type]
            memory_limit=1 << 34,
        ),
    )


def small() -> Graph:
    return make_graph(pattern("directed", 23, 4), num_features=7, num_classes=3, seed=5)


def results(rank: Rank) -> dict[str, Any]:
    """What a run computes and what result.json says of its captures."""
    trainer = rank.trainer
    trainer.fit(RunLog(None, True, EPOCHS), None)
    return {
        "losses": trainer._epoch.history(0, EPOCHS)[:, 0].tobytes(),
        "weights": trainer.runtime.weights.flat.numpy().tobytes(),
        "scores": trainer.evaluate(),
        "sent": rank.comm.bytes_sent,
        "states": trainer.states,
    }


def run_on(device: Any) -> dict[str, Any]:
    return on_ranks(config_of(), small(), results, device_of=lambda *_: device)[0]  # type: ignore[no-any-return]


def computed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "states"}


@pytest.mark.slow
def test_a_run_refused_at_every_call_goes_on(
    allocator: Allocator, caplog: pytest.LogCaptureFixture, sample: Any
) -> None:
    """Fails if any refusal changes a bit, is told twice or not at all, or spoils the next process's capture."""
    expected = run_on(EmulatedDevice(seed=3))
    assert expected["states"] == {"epoch": "eager", "evaluation": "eager"}
    device = CaptureDevice(seed=3)
    assert run_on(device) == expected | {"states": {"epoch": "captured", "evaluation": "captured"}}
    assert device.replays > EPOCHS
    assert not caplog.records
    for number in (BEGIN, END, *sample(range(1, device.calls + 1), 2)):
        error = ERRORS[number % len(ERRORS)]
        caplog.clear()
        found = run_on(CaptureDevice(seed=3, number=number, error=error))
        assert computed(found) == computed(expected), number
        refused = f"refused: {type(error).__name__}: {error}"
        assert refused in found["states"].values()
        assert set(found["states"].values()) <= {refused, "captured"}
        assert len(caplog.records) == 1
        assert not allocator.underway
    again = CaptureDevice(seed=3)
    assert run_on(again)["states"] == {"epoch": "captured", "evaluation": "captured"}
    assert again.replays == device.replays


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
@pytest.mark.parametrize("number", [None, BEGIN, 9])
def test_ranks_give_up_together(
    strategy: str, number: int | None, allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if one rank replays a graph while another launches, or counts or compares other calls than it does."""

    def train(fail: bool, capture: bool) -> list[dict[str, Any]]:
        world = Nccl(2)
        devices = [
            CaptureDevice(
                seed=3, number=number if fail and rank == 1 else None, error=ERRORS[0], comm_stream=comm_stream
            )
            for rank, comm_stream in enumerate(world.streams)
        ]
        for device, stream in zip(devices, world.streams, strict=True):
            stream.is_capturing = lambda device=device: device.phase != ""
        world.library.recording = lambda rank: devices[rank].phase == "recording"
        config = resolve(config_of(2, strategy), graph := small())

        def body(comm: Communicator) -> dict[str, Any]:
            device = devices[comm.rank]
            if not capture:
                device.refusals.add("not tried")
            plan, owners = plan_graph(config, graph)
            rank = make_rank(config, graph, plan, owners, comm, device_of=lambda *_: device)
            return results(rank)

        world.start = False
        return world.run(body)

    eager = train(False, False)
    caplog.clear()
    found = train(True, True)
    assert [computed(each) for each in found] == [computed(each) for each in eager]
    if number is None:
        assert [each["states"]["epoch"] for each in found] == ["captured"] * 2
        assert not caplog.records
    else:
        refused = f"refused: rank 1: RuntimeError: {ERRORS[0]}"
        assert [each["states"] for each in found] == [{"epoch": refused, "evaluation": refused}] * 2
        assert len(caplog.records) == 1


def test_result_says_how_epochs_were_launched() -> None:
    """Fails if a run that never tries to capture does not say why, or a CPU speaks of captures."""
    config = config_of()
    states = {"epoch": "captured", "evaluation": "eager"}
    assert captures(config, states) == {
        "captured": {"epoch": "captured", "evaluation": "eager: fewer than three were run"}
    }
    watched = dataclasses.replace(config, run=dataclasses.replace(config.run, timeline=True))
    eager = {"epoch": "eager", "evaluation": "eager"}
    assert captures(watched, eager)["captured"]["epoch"] == "eager: the timeline measures each op"
    on_cpu = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
    assert captures(on_cpu, eager) == {}
