from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from mggcn.comm.rank import COUNTS, connect_torchrun, gpu_index, num_gpus_used, torchrun_env
from mggcn.errors import BackendError, CommError, ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "LOCAL_WORLD_SIZE", *COUNTS):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


WHOLE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize(
    ("values", "found"),
    [
        (WHOLE, (3, 8, 1)),
        ({}, None),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script: its steps are not begun
        (WHOLE | {"SLURM_STEP_NUM_TASKS": "8"}, (3, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, None),
    ],
)
def test_torchrun_env(values: dict[str, str], found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torchrun's ranks are not recognised, or a process that is alone is taken for one of several."""
    set_all(monkeypatch, values)
    assert torchrun_env() == found
    if found is None:
        with pytest.raises(CommError, match="torchrun"):
            connect_torchrun(1.0)


@pytest.mark.usefixtures("no_torchrun")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            r"WORLD_SIZE=2 is set and LOCAL_RANK is",
        ),
        ({"RANK": "3"}, r"RANK=3 is set and WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 is set and RANK, "),
        (
            WHOLE | {"MASTER_PORT": ""},
            r"MASTER_PORT is not: this process would train alone; start the ranks with torchrun",
        ),
        (WHOLE | {"RANK": "8"}, r"expected RANK in 0 \.\. WORLD_SIZE - 1 .* got RANK=8, WORLD_SIZE=8"),
        (WHOLE | {"WORLD_SIZE": "two"}, r"got RANK=3, WORLD_SIZE=two"),
        (
            WHOLE | {"LOCAL_WORLD_SIZE": "two"},
            r"expected LOCAL_WORLD_SIZE to be how many ranks .*, got 'two'; start with",
        ),
        (WHOLE | {"LOCAL_WORLD_SIZE": "0"}, r"got '0'; start with torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"a launcher started 4 processes \(SLURM_STEP_NUM_TASKS=4\)"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, r"OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "16"}, r"unset PMI_SIZE if that is meant"),
    ],
)
def test_ranks_of_other_launchers_do_not_train_alone(
    values: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if each of P processes trains the whole graph because a launcher left a variable out."""
    set_all(monkeypatch, values)
    with pytest.raises(ConfigError, match=said):
        torchrun_env()


@pytest.mark.usefixtures("no_torchrun")
def test_gpu_is_that_of_the_rank_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two ranks of a machine share a GPU, or if a missing one is found out by CUDA."""
    assert gpu_index(1, 2) == 1
    with pytest.raises(BackendError, match=r"rank 2 needs its own GPU, but this machine shows 2; start fewer"):
        gpu_index(2, 2)
    for name, value in zip(NAMES, ("9", "16", "1", "a", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert gpu_index(9, 8) == 1
    assert gpu_index(9, 1) == 0  # the launcher's choice; whether it is this rank's alone: test_gather.py
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendError, match=r"rank 9 \(local rank 2\) needs .* shows 2"):
        gpu_index(9, 2)


@pytest.mark.usefixtures("no_torchrun")
def test_as_many_gpus_as_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if memory is asked of GPUs that no rank of this machine uses."""
    assert [num_gpus_used(4, transport) for transport in ("nccl", "auto", "threads")] == [4, 4, 1]
    assert num_gpus_used(1, "auto") == num_gpus_used(1, "single") == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert num_gpus_used(16, "nccl") == 16  # not torchrun's
    for name, value in zip(NAMES, ("9", "16", "1", "a", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert num_gpus_used(16, "nccl") == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_gpus_used(16, "nccl") == 16


def test_transport_decides_what_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if nccl gets lost on the way from the command to the transport."""
    asked: list[tuple[object, ...]] = []
    fake = SimpleNamespace(connect=lambda *args: asked.append(args))
    monkeypatch.setitem(sys.modules, "mggcn.comm.distributed", fake)  # type: ignore[arg-type]
    for name, value in zip(NAMES, ("1", "2", "1", "a", "1"), strict=True):
        monkeypatch.setenv(name, value)
    connect_torchrun(3.0, "nccl")
    connect_torchrun(3.0)
    assert asked == [(1, 2, "env://", 3.0, False, kind) for kind in ("nccl", "gloo")]
