"""Where a test of the whole core runs: the CPU backend, the CUDA backend under the emulator, or on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from mggcn.assemble.rank import Rank, gpu_of_rank
from mggcn.backend.cuda.backend import CudaBackend
from mggcn.backend.cuda.base import Device
from mggcn.comm.base import Communicator
from mggcn.config import Config

DeviceOf = Callable[[Config, Communicator], Device]


def emulated(config: Config, comm: Communicator) -> Device:
    """A rank's own emulated device; every rank shuffles its threads with another seed."""
    from tests.emulator.device import EmulatedDevice

    return EmulatedDevice(seed=7919 * comm.rank + 13)


@dataclass(frozen=True)
class Where:
    """device: run.device of the configuration; device_of: what serves a rank."""

    name: str
    device: Literal["cpu", "cuda"]
    device_of: DeviceOf

    def config(self, config: Config) -> Config:
        return dataclasses.replace(config, run=dataclasses.replace(config.run, device=self.device))


CPU = Where("cpu", "cpu", gpu_of_rank)
EMULATED = Where("emulated", "cuda", emulated)
GPU = Where("cuda", "cuda", gpu_of_rank)


def everywhere(cases: Iterable[Any], emulate: Callable[[int], bool] = lambda number: True) -> list[Any]:
    """Return (where, case) parameters: all cases on CPU and GPU, those that `emulate` picks under the emulator."""
    listed = list(cases)
    return [
        *(pytest.param(CPU, case, id=f"cpu-{case}") for case in listed),
        *(pytest.param(EMULATED, case, id=f"emulated-{case}") for i, case in enumerate(listed) if emulate(i)),
        *(pytest.param(GPU, case, id=f"cuda-{case}", marks=pytest.mark.cuda) for case in listed),
    ]


WHERE = [
    pytest.param(CPU, id="cpu"),
    pytest.param(EMULATED, id="emulated"),
    pytest.param(GPU, id="cuda", marks=pytest.mark.cuda),
]
"""For tests that are small enough to run everywhere."""


def taken_on_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[CudaBackend, int]:
    """Bytes that each GPU's backend allocates or uploads from now on.

    By the backends themselves: the number of one that has gone may be another's.
    """
    taken: dict[CudaBackend, int] = {}
    for name in ("allocate", "upload"):
        original = getattr(CudaBackend, name)

        def count(self: CudaBackend, what: Any, _original: Any = original) -> torch.Tensor:
            tensor: torch.Tensor = _original(self, what)
            taken[self] = taken.get(self, 0) + tensor.nbytes
            return tensor

        monkeypatch.setattr(CudaBackend, name, count)
    return taken


def share_of_plan(rank: Rank, taken: dict[CudaBackend, int]) -> float:
    """What a rank has of its GPU's memory, as a share of what is planned.

    The best weights and Adam's two states are torch's own; 16 KiB: losses by chunk and epoch, counts, clock.
    """
    plan, backend = rank.plan, rank.trainer.runtime.backend
    held = taken[backend] + 3 * plan.gradient_bytes - 2**14  # type: ignore[index]
    return held / (sum(plan.regions.values()) - plan.regions["runtime"] - plan.regions["cuBLAS work space"])
