"""What NCCL takes of the GPUs, from a run over the stand-in to result.json, beside what was planned."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble import rank as assemble_rank
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import make_rank
from mggcn.cli.train import summary
from mggcn.comm.base import Communicator
from mggcn.comm.nccl_settings import SETTINGS
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.memory.units import human
from mggcn.planning.run import RunPlan
from mggcn.runs import train as jobs_train
from mggcn.train.engine import Stop
from tests.comm.fake_nccl import TAKEN, FakeStream
from tests.comm.worlds import Nccl
from tests.emulator.device import EmulatedDevice
from tests.graphs import make_graph, pattern

RANKS = 3


class DeviceWithStream:
    """An emulated device whose messages go over one of the stand-in's streams."""

    def __init__(self, stream: FakeStream) -> None:
        self._device = EmulatedDevice()
        self.comm_stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def trained(strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], RunPlan]:
    """Train an epoch over the stand-in; return what result.json holds, and the plan."""
    graph = make_graph(pattern("random", 60, 5), num_features=9, num_classes=4, seed=3)
    run = RunConfig(ranks=RANKS, device="cuda", strategy=strategy, transport="nccl")  # type: ignore[arg-type]
    config = resolve(Config(model=ModelConfig(hidden=(5,)), train=TrainConfig(epochs=1), run=run), graph)
    plan, partition = plan_graph(config, graph)
    world = Nccl(RANKS)
    world.start = False
    world.library.taken[2] = 12345  # of others, before
    world.library.greedy = {1: 3}

    def device_of(_: Config, comm: Communicator) -> Any:
        return DeviceWithStream(world.streams[comm.rank])

    monkeypatch.setattr(assemble_rank, "make_rank", functools.partial(make_rank, device_of=device_of))

    def case(comm: Communicator) -> None:
        jobs_train.train_rank(comm, jobs_train.PlannedRun(folder, plan, partition), graph, quiet=True, stop=Stop())

    world.run(case)
    return json.loads((folder / "result.json").read_text()), plan


@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_result_has_what_nccl_took_beside_what_was_planned(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run does not record NCCL's memory by moment, of the rank that has most, or the plan's figure for it."""
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "12")
    for name in ("NCCL_ALGO", "NCCL_MAX_P2P_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    result, plan = trained(strategy, tmp_path, monkeypatch)
    record = result["nccl"]
    sends = strategy == "halo"
    assert record["measured"] == {
        "start": 3 * TAKEN["start"],
        "broadcast": 0 if sends else 3 * TAKEN["broadcast"],
        "all_reduce": 3 * TAKEN["all_reduce"],
        "all_to_all": 3 * (RANKS - 1) * TAKEN["all_to_all"] if sends else 0,
    }
    assert record["measured_bytes"] == sum(record["measured"].values())
    assert record["planned_bytes"] == plan.ranks[0].regions["NCCL"]
    assert record["planned_from"] == "estimate"
    assert record["settings"]["NCCL_MAX_NCHANNELS"] == "12"
    assert set(record["settings"]) <= set(SETTINGS)
    took = f"{record['measured_bytes'] / 2**10:.2f} KiB"
    assert summary(result).endswith(f"NCCL took {took} of it ({human(record['planned_bytes'])} planned)")
