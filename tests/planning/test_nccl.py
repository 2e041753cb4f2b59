"""NCCL's memory in plans: by strategy and ranks, by the user's settings, as measured, and through a run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mggcn.aggregate.steps import Send
from mggcn.assemble.plan import STRATEGIES, nccl_memory, plan_recorded, plan_shape
from mggcn.comm.nccl_memory import MIB, NcclMeasured, NcclMemory
from mggcn.comm.nccl_settings import SETTINGS, sizes_of
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.machine import MACHINES, default_machine, find_machine, read_machine
from mggcn.memory.units import GIB
from mggcn.planning.advice import _estimate, require_fit
from mggcn.planning.record import to_dict
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape
from mggcn.planning.text import render
from tests.shapes import PAPERS, shape_of

SHAPE = shape_of(100_000, 2_000_000, 64, 10)
STARTED = 256 + 8 * 16 * 512 // 1024


@pytest.fixture(autouse=True)
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting, file of NCCL's or tuned file of whoever runs the tests is read."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def plan_of(strategy: str, ranks: int, shape: GraphShape = SHAPE, kind: str = "gcn", **run: Any) -> RunPlan:
    settings: Any = {"device": "cuda", "strategy": strategy, **run}
    model = ModelConfig(kind=kind, hidden=(32,))  # type: ignore[arg-type]
    return plan_shape(Config(model=model, run=RunConfig(ranks=ranks, **settings)), shape, replication=1.5)


@pytest.mark.parametrize(
    ("strategy", "two", "eight"),
    [
        ("broadcast", 16 * 12, 32 * 12),
        ("halo", (16 + 8) * 12, (32 + 56) * 12),
        ("slice", (16 + 8) * 12, (32 + 56) * 12),
        ("delayed", (16 + 8) * 12, (32 + 56) * 12),
    ],
)
def test_nccl_has_a_region(strategy: str, two: int, eight: int) -> None:
    """Fails if a plan over NCCL forgets its connections, or counts sends where a strategy broadcasts."""
    for ranks, connections in ((2, two), (8, eight)):
        plan = plan_of(strategy, ranks)
        for rank in plan.ranks:
            assert rank.regions["NCCL"] == (STARTED + connections) * MIB
            assert rank.total_bytes >= sum(rank.regions.values())
            assert rank.setup_bytes >= rank.regions["runtime"] + rank.regions["NCCL"]


def test_one_rank_pays_for_nccl_only_where_it_starts() -> None:
    """Fails if one GPU or ranks without NCCL are charged for it, or one under torchrun is not."""
    assert "NCCL" not in plan_of("broadcast", 1).ranks[0].regions
    assert "NCCL" not in plan_of("halo", 1, transport="single").ranks[0].regions
    assert plan_of("halo", 1, transport="nccl").ranks[0].regions["NCCL"] == STARTED * MIB
    for run in ({"transport": "threads"}, {"device": "cpu"}, {"device": "cpu", "transport": "gloo"}):
        plan = plan_of("halo", 4, **run)
        assert not any("NCCL" in rank.regions for rank in plan.ranks)
        assert "NCCL" not in render(plan)
        assert to_dict(plan)["nccl"] is None


def test_a_model_without_a_graph_sends_nothing_to_single_ranks() -> None:
    """Fails if an MLP, whose ranks only add up gradients, is charged for sends."""
    found = plan_of("halo", 8, kind="mlp").ranks[0].regions["NCCL"]
    assert found == plan_of("broadcast", 8).ranks[0].regions["NCCL"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sends_are_counted_where_epochs_have_them(strategy: str) -> None:
    """Fails if what decides about the region is not what training epochs and evaluations do."""
    rank = plan_of(strategy, 3).ranks[0]
    lists = [steps for program in (rank.train, rank.evaluate) for steps in rank.steps(program)]
    sends = any(isinstance(step, Send) and step.kind == "all_to_all" for steps in lists for step in steps)
    assert (rank.regions["NCCL"] > plan_of("broadcast", 3).ranks[0].regions["NCCL"]) == sends


def test_the_users_settings_are_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan goes by mggcn's channels where the user set others."""
    usual = plan_of("halo", 8).ranks[0].regions["NCCL"]
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "16")
    more = plan_of("halo", 8)
    assert more.ranks[0].regions["NCCL"] - usual == (7 * 8 * 12 + 64) * MIB
    assert "for 16 channels, 16 of them to each peer" in render(more)


def test_the_text_says_what_the_bytes_are_worth() -> None:
    """Fails if an estimate looks like a measurement, or the other way round."""
    plan = plan_of("halo", 8)
    assert "NCCL's bytes are an estimate, for 16 channels, 8 of them to each peer; mggcn tune measures them" in render(
        plan
    )
    measured = NcclMemory(plan.nccl.sizes, (NcclMeasured(8, plan.nccl.sizes, 1, 1),))
    text = render(dataclasses.replace(plan, nccl=measured))
    assert "NCCL's bytes are as measured between 8 ranks" in text
    assert "estimate" not in text


def test_cublas_has_its_work_space_where_torch_holds_it() -> None:
    """Fails if cuBLAS's work space is not in the bytes that torch's allocator holds, or a CPU has one."""
    for ranks, transport in ((1, "single"), (4, "threads")):
        plan = plan_of("broadcast", ranks, transport=transport)
        for rank in plan.ranks:
            assert rank.regions["cuBLAS work space"] == 32 * MIB
            assert rank.setup_bytes >= rank.regions["runtime"] + 32 * MIB
        assert (
            plan.process_bytes
            == sum(r.total_bytes for r in plan.ranks) - (ranks - 1) * plan.ranks[0].regions["runtime"]
        )
    assert "cuBLAS work space" not in plan_of("broadcast", 1, device="cpu").ranks[0].regions


def test_papers100m_fits_on_eight_gpus_of_80_gb() -> None:
    """Fails if NCCL's memory drives MG-GCN's largest run from a DGX, by default."""
    config = Config(model=ModelConfig(hidden=(208, 208)), run=RunConfig(ranks=8, device="cuda"))
    for symmetric in (True, False):
        plan = plan_shape(config, dataclasses.replace(PAPERS, symmetric=symmetric))
        assert plan.largest.regions["NCCL"] == 704 * MIB
        require_fit(plan, find_machine("dgx-h100").memory_per_rank(8))
        require_fit(plan, 80 * GIB)


def test_advice_keeps_the_transport() -> None:
    """Fails if narrower layers for ranks that are threads of one GPU are refused because NCCL would not fit."""
    plan = plan_of("broadcast", 4, transport="threads")
    assert _estimate(plan, 4, 1.0) == plan.largest.total_bytes
    assert _estimate(plan, 8, 1.0) > plan_of("broadcast", 8).ranks[0].regions["NCCL"]


MEASURED = """
[[nccl]]
ranks = 8
channels = 16
p2p_channels = 8
connection_bytes = 12582912
shared_bytes = 67108864
collective_bytes = 1000000
p2p_bytes = 200000
"""


def tuned(tmp_path: Path, kind: str) -> Path:
    """A tuned file for a kind of device, with what was measured of NCCL."""
    name = {"cpu": "xeon-cluster", "cuda": "dgx-h100"}[kind]
    path = tmp_path / "mggcn" / "machine.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text((MACHINES / f"{name}.toml").read_text() + MEASURED)
    return path


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_plans_of_a_measured_machine_use_what_was_measured(tmp_path: Path, kind: str) -> None:
    """Fails if the figure is left in the file of a machine whose cores, not GPUs, were tuned, or in another's plans."""
    path = tuned(tmp_path, kind)
    assert read_machine(path).nccl == (NcclMeasured(8, sizes_of({}), 1_000_000, 200_000),)
    assert default_machine("cuda", path).nccl == read_machine(path).nccl
    assert plan_of("broadcast", 8).ranks[0].regions["NCCL"] == 1_000_000
    assert plan_of("halo", 4).ranks[0].regions["NCCL"] == 1_200_000
    config = plan_of("halo", 8).config
    assert nccl_memory(config, find_machine("dgx-h100")).measured == ()


def test_a_run_folder_keeps_what_it_was_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that read a plan again get other bytes, because their settings or their file differ."""
    tuned(tmp_path, "cpu")
    plan = plan_of("halo", 8)
    content = to_dict(plan)
    (tmp_path / "mggcn" / "machine.toml").unlink()
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "32")
    again = plan_recorded(plan.config, content)
    assert [rank.regions for rank in again.ranks] == [rank.regions for rank in plan.ranks]
    assert again.nccl == plan.nccl
