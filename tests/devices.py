"""Where a test of the whole core runs: the CPU backend, the CUDA backend under the emulator, or on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mggcn.assemble.rank import gpu_of_rank
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
