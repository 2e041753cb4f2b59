"""What `mggcn tune` measures of messages: their seconds, and NCCL's memory by ranks over the stand-in, up to plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.assemble.plan import plan_shape
from mggcn.backend.cuda import driver as cuda_driver
from mggcn.backend.cuda import presence as cuda_presence
from mggcn.comm.base import Communicator
from mggcn.comm.nccl_settings import SETTINGS
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig
from mggcn.cost.machine import read_machine, tuned_path
from mggcn.errors import CommError
from mggcn.host import python
from mggcn.planning.shape import GraphShape
from mggcn.planning.text import render
from mggcn.runs import messages, tune
from mggcn.runs.messages import KINDS, LARGE, link_table, message_seconds
from mggcn.runs.tune import TuneSettings, write_machine
from tests.comm.fake_nccl import TAKEN
from tests.comm.worlds import Nccl
from tests.machines import XEON

SHAPE = GraphShape(
    name="shape", num_vertices=100_000, num_edges=2_000_000, num_features=64, num_classes=10, symmetric=True
)
COLLECTIVE = TAKEN["start"] + TAKEN["broadcast"] + TAKEN["all_reduce"]


@pytest.fixture(autouse=True)
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting, file of NCCL's or tuned file of whoever runs the tests is read."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(messages, "NCCL_COUNT", 64)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, missing: str = "") -> None:
    monkeypatch.setattr(cuda_presence, "missing_for_cuda", lambda: missing)
    monkeypatch.setattr(cuda_driver, "visible_gpus", lambda: [None] * count)


def test_links_as_the_cost_model_reads_them() -> None:
    """Fails if rates do not give back the seconds that were measured, or gloo's share of the cores is another."""
    small = {"broadcast": 2e-4, "all_to_all": 3e-4, "all_reduce": 4e-4}
    large = {"broadcast": 0.011, "all_to_all": 0.031, "all_reduce": 0.021}
    found: dict[str, Any] = {
        "small_s": small,
        "large_s": large,
        "processor_s": {"broadcast": 0.049, "all_to_all": 0.1, "all_reduce": 0.04},
    }
    table = link_table("gloo", 3, 4, found)
    received = {"broadcast": 2 * 4 * LARGE, "all_to_all": 6 * 4 * LARGE, "all_reduce": 4 * 4 * LARGE}
    assert table["latency_s"] == small
    for kind, nbytes in received.items():
        assert table["latency_s"][kind] + nbytes / table["rates"][kind] == pytest.approx(large[kind], rel=0.01)
    assert (table["busy"], table["pooled"], table["ranks"]) == (0.75, True, 3)
    assert link_table("threads", 3, 4, found)["busy"] == 1.0
    assert link_table("gloo", 3, 1, found)["busy"] == 1.0


def test_ranks_measure_together() -> None:
    """Fails if ranks make different numbers of calls, a kind is left out, or more bytes take no longer."""
    found = run_threads(3, lambda comm: message_seconds(comm, 0.01, 1), 60)
    for result in found:
        assert set(result["small_s"]) == set(KINDS)
        for kind in KINDS:
            assert 0 < result["small_s"][kind] < result["large_s"][kind]
            assert result["processor_s"][kind] > 0
    assert found[0] == found[1] == found[2]


def test_ranks_find_what_every_kind_of_message_takes() -> None:
    """Fails if a kind, a peer or the rank that loses most is left out."""
    world = Nccl(4)
    world.library.greedy = {2: 5}

    def case(comm: Communicator) -> dict[str, int]:
        return messages.nccl_bytes(comm, zeros)

    usual = {**TAKEN, "all_to_all": 3 * TAKEN["all_to_all"]}
    expected = {moment: 5 * nbytes for moment, nbytes in usual.items()}
    assert world.run(case) == [{**expected, "all": sum(expected.values())}] * 4


def started_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have ranks be threads over the stand-in rather than processes with a GPU each; return the sizes that are started."""
    sizes: list[int] = []

    def run_ranks(command: list[str], size: int, folder: Path, timeout_s: float) -> None:
        assert command[:5] == [*python("mggcn.runs.messages"), "nccl"]
        sizes.append(size)
        found = Nccl(size).run(lambda comm: messages.nccl_bytes(comm, zeros))
        Path(command[command.index("--result") + 1]).write_text(json.dumps(found[0]))

    monkeypatch.setattr(messages, "run_ranks", run_ranks)
    return sizes


def test_what_was_measured_reaches_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the figures are not written, not read, or not used by plans of this machine."""
    gpus(monkeypatch, 8)
    sizes = started_here(monkeypatch)
    measured: list[tuple[int, bool]] = []
    monkeypatch.setattr(tune, "figures_of", lambda host, _, *, anew: measured.append((host.threads, anew)) or XEON)
    monkeypatch.setattr(tune, "device_table", lambda *_: DEVICE)
    monkeypatch.setattr(tune, "measure_links", lambda *_: [LINK])
    monkeypatch.setattr(tune, "epoch_rates", lambda *_: {"op_s": 1.23456e-4, "matrix_s": 2e-4, "pace": 1.5})
    said: list[str] = []
    content = tune.tune_machine(TuneSettings(2, (2, 16)), tmp_path, said.append)
    assert sizes == [2, 8]
    assert measured == [(2, True)], "all threads together, of which ranks take their share"
    assert said == [
        "gathers, passes and dense products, by which kernels are chosen too",
        "NCCL's memory between 2 GPUs",
        "NCCL's memory between 8 GPUs",
        "epochs of generated graphs, for what they take beside their kernels",
    ]
    assert content["device"] == {**DEVICE, "op_s": 1.23e-4, "matrix_s": 2e-4, "pace": 1.5}
    write_machine(content, tuned_path())
    found = {measured.ranks: measured for measured in read_machine(tuned_path()).nccl}
    assert {ranks: (m.collective_bytes, m.p2p_bytes) for ranks, m in found.items()} == {
        2: (COLLECTIVE, TAKEN["all_to_all"]),
        8: (COLLECTIVE, 7 * TAKEN["all_to_all"]),
    }
    run = RunConfig(ranks=4, device="cuda", strategy="halo")
    plan = plan_shape(Config(run=run), SHAPE)
    assert plan.ranks[0].regions["NCCL"] == COLLECTIVE + 7 * TAKEN["all_to_all"]
    assert "NCCL's bytes are as measured between 8 ranks" in render(plan)
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "32")
    assert "NCCL's bytes are an estimate, for 16 channels, 16 of them to each peer" in render(
        plan_shape(Config(run=run), SHAPE)
    )


@pytest.mark.parametrize(("count", "missing"), [(0, ""), (1, ""), (8, "CuPy is missing")])
def test_nothing_is_started_without_two_gpus(
    count: int, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a machine without GPUs, or one that cannot use them, cannot be tuned."""
    gpus(monkeypatch, count, missing)
    monkeypatch.setattr(messages, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    assert messages.measure_nccl((2, 4), tmp_path, lambda text: None) == []


def test_ranks_that_leave_nothing_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a missing result is taken for no memory, or an older one for this."""
    gpus(monkeypatch, 2)
    (tmp_path / "nccl-2.json").write_text(json.dumps(dict.fromkeys(TAKEN, 1)))
    monkeypatch.setattr(messages, "run_ranks", lambda *_, **__: None)
    with pytest.raises(CommError, match=r"2 ranks over NCCL have left no result in .*nccl-2\.json"):
        messages.measure_nccl((2,), tmp_path, lambda text: None)


DEVICE: dict[str, Any] = {
    "kind": "cpu",
    "count": 1,
    "shared": True,
    "cores": 2,
    "memory_bytes": 10**9,
    "copy": [[1e6, 1e10]],
    "gather": [[1e6, 1e10]],
    "row_s": 0.0,
    "call_s": 1e-6,
    "gemm": {"fp32": 1e10},
}
LINK: dict[str, Any] = {
    "transport": "gloo",
    "ranks": 2,
    "rates": dict.fromkeys(("broadcast", "all_to_all", "all_reduce"), 1e9),
    "latency_s": dict.fromkeys(("broadcast", "all_to_all", "all_reduce"), 1e-5),
    "pooled": True,
    "busy": 0.5,
}
