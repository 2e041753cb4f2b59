"""Which GPUs a run will use, and what they have free, with stand-ins for the driver's libraries."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mggcn.assemble.plan import memory_limit
from mggcn.backend.cuda import driver as cuda_driver
from mggcn.backend.cuda.driver import Gpu, free_bytes, free_bytes_in_child, visible_gpus
from mggcn.backend.cuda.memory import gpu_free_bytes
from mggcn.config import Config, RunConfig
from mggcn.errors import BackendError
from mggcn.host import python
from tests.backend.gpu_libraries import Card, Machine

NVML = frozenset({"libnvidia-ml.so.1"})
FAST, SLOW, BUSY = Card(7, 900), Card(2, 800), Card(1, 3)


def not_asked(num_gpus: int) -> list[int]:
    raise AssertionError("the driver makes contexts to tell, and was not needed")


def test_gpus_come_in_cudas_order() -> None:
    """Fails if a GPU is taken for another, or its address is not as Linux writes it."""
    machine = Machine([FAST, SLOW, Card(0x1B, 5)])
    found = visible_gpus(machine.load)
    assert found[0] == Gpu(FAST.uuid, "0000:07:00.0")
    assert [gpu.uuid for gpu in found] == [card.uuid for card in machine.shown]
    assert found[2].pci == "0000:1b:00.0"


@pytest.mark.parametrize(
    ("num_gpus", "least", "asked"), [(1, 900, [7]), (2, 800, [7, 2]), (3, 3, [7, 2, 1]), (8, 3, [7, 2, 1])]
)
def test_only_the_gpus_of_the_ranks_are_asked(num_gpus: int, least: int, asked: list[int]) -> None:
    """Fails if a busy GPU that no rank uses, or one that CUDA hides, decides; the libraries count in different orders."""
    machine = Machine([FAST, SLOW, BUSY], hidden=[Card(0, 1)])
    assert gpu_free_bytes(num_gpus, machine.load, not_asked) == least
    assert machine.asked == asked
    assert (machine.open, machine.contexts) == (0, [])


def test_an_instance_of_a_divided_gpu_has_its_own_memory() -> None:
    """Fails if a MIG instance is looked up as a GPU."""
    machine = Machine([Card(3, 40, "MIG"), Card(4, 20, "MIG")], hidden=[Card(9, 1)])
    assert gpu_free_bytes(1, machine.load, not_asked) == 40
    assert gpu_free_bytes(2, machine.load, not_asked) == 20


@pytest.mark.parametrize(
    ("absent", "failing"),
    [(NVML, ""), (frozenset(), "nvmlInit_v2"), (frozenset(), "nvmlDeviceGetMemoryInfo")],
)
def test_without_the_management_library_the_driver_is_asked(absent: frozenset[str], failing: str) -> None:
    """Fails if a machine whose loader does not find NVML, or whose NVML does not tell, passes for one without a GPU."""
    machine = Machine([FAST, BUSY], absent=absent, failing=failing)
    asked: list[int] = []

    def driver(num_gpus: int) -> list[int]:
        asked.append(num_gpus)
        return free_bytes(num_gpus, machine.load)

    assert gpu_free_bytes(1, machine.load, driver) == 900
    assert gpu_free_bytes(4, machine.load, driver) == 3
    assert asked == [1, 2]
    assert (machine.open, machine.contexts) == (0, [])


def test_what_is_missing_is_said() -> None:
    """Fails if a machine without driver, without GPU or with broken libraries ends in a traceback."""
    with pytest.raises(BackendError, match=r"needs an NVIDIA GPU and driver.*no libcuda\.so\.1"):
        gpu_free_bytes(1, Machine([], absent=frozenset({"libcuda.so.1"})).load, not_asked)
    with pytest.raises(BackendError, match="no GPU is visible"):
        gpu_free_bytes(1, Machine([]).load, not_asked)
    with pytest.raises(BackendError, match=r"driver could not tell a GPU's UUID \(CUDA error 15\)"):
        gpu_free_bytes(1, Machine([FAST], failing="cuDeviceGetUuid_v2").load, not_asked)
    broken = Machine([FAST], failing="nvmlDeviceGetMemoryInfo")

    def refuse(num_gpus: int) -> list[int]:
        raise BackendError("CUDA's driver did not tell")

    with pytest.raises(
        BackendError, match=rf"read the memory of the GPU {FAST.uuid} \(status 15\).*; CUDA's driver did"
    ):
        gpu_free_bytes(1, broken.load, refuse)
    assert broken.open == 0


def test_the_driver_is_asked_by_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the child is not the program it should be, its answer is not read, or its words get lost."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="[12, 7]\n")

    monkeypatch.setattr(cuda_driver.subprocess, "run", run)
    assert free_bytes_in_child(2) == [12, 7]
    assert asked == [[*python("mggcn.backend.cuda.driver"), "2"]]
    machine = Machine([FAST, SLOW], context_bytes=100)
    monkeypatch.setattr(cuda_driver, "free_bytes", lambda num_gpus: free_bytes(num_gpus, machine.load))
    monkeypatch.setattr(sys, "argv", ["gpu_driver", "2"])
    assert cuda_driver.main() == 0
    assert machine.contexts == []


def test_a_child_that_cannot_ask_says_why() -> None:
    """Fails if the real program ends in a traceback on a machine without a driver, or its reason does not come back."""
    try:
        visible_gpus()
    except BackendError:
        with pytest.raises(BackendError, match=r"did not report the free memory of the GPUs: .*no libcuda|no GPU is v"):
            free_bytes_in_child(1)
    else:
        assert len(free_bytes_in_child(1)) == 1


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a driver that does not answer stops the command, or ends it in a traceback."""

    def run(command: list[str], timeout: float, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cuda_driver.subprocess, "run", run)
    with pytest.raises(BackendError, match="timed out after 60"):
        free_bytes_in_child(1)


@pytest.mark.parametrize(("ranks", "transport", "limit"), [(1, "single", 900), (2, "nccl", 800), (3, "threads", 300)])
def test_a_plan_takes_what_the_gpus_of_the_run_have(
    ranks: int, transport: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if one rank is planned with the memory of a GPU that it does not use."""
    machine = Machine([FAST, SLOW, BUSY])
    monkeypatch.setattr("mggcn.assemble.plan.gpu_free_bytes", lambda num: gpu_free_bytes(num, machine.load, not_asked))
    assert memory_limit(Config(run=RunConfig(device="cuda", ranks=ranks, transport=transport))) == limit


@pytest.mark.cuda
def test_the_driver_and_torch_mean_the_same_gpus() -> None:
    """Fails if a UUID is read or written otherwise than NVIDIA does, or one library tells of another GPU's memory."""
    gpus = visible_gpus()
    assert [gpu.uuid for gpu in gpus] == [
        str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())
    ]
    free, _ = torch.cuda.mem_get_info(0)
    for told in (gpu_free_bytes(1), *free_bytes_in_child(1)):
        assert (
            abs(told - free) < 2 << 30
        )  # the contexts of this process and of the child, and what others take meanwhile
