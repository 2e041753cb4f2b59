"""NCCL's share of the GPUs' memory in a run, measured and planned: a record of result.json."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mggcn.comm.nccl_settings import SETTINGS, user_settings
from mggcn.memory.device import runs_nccl
from mggcn.planning.run import RunPlan

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import KernelBackend
    from mggcn.comm.base import Communicator

MOMENTS: Final = ("start", "broadcast", "all_reduce", "all_to_all")
"""Moments at which NCCL takes memory: as its communicator is made, and in the first calls of a kind."""


def nccl_record(plan: RunPlan, comm: Communicator, backend: KernelBackend) -> dict[str, Any]:
    """Return planned and measured bytes, of the rank that has most, and NCCL's settings; empty without NCCL. Collective.

    To be called after the first epochs, which make every connection.
    """
    if not runs_nccl(plan.config.run):
        return {}
    largest = largest_taken(comm, backend.allocate)
    settings = user_settings(os.environ)
    return {
        "nccl": {
            "planned_bytes": max(rank.regions["NCCL"] for rank in plan.ranks),
            "planned_from": "estimate" if plan.nccl.found(len(plan.ranks)) is None else "measurement",
            "measured_bytes": largest["all"],
            "measured": {moment: largest[moment] for moment in MOMENTS},
            "settings": {name: settings[name] for name in SETTINGS if name in settings},
        }
    }


def largest_taken(comm: Communicator, allocate: Callable[[int], Tensor]) -> dict[str, int]:
    """Return the bytes that a transport took of a device in each moment, and in all: each the largest of any rank's.

    allocate: returns bytes of the device, all 0. Collective.
    """
    import torch

    taken = comm.device_bytes()
    mine = [taken.get(moment, 0) for moment in MOMENTS]
    every = allocate(8 * comm.size * (len(MOMENTS) + 1)).view(torch.float64).view(comm.size, -1)
    every[comm.rank] = torch.tensor([*mine, sum(mine)], dtype=torch.float64)
    comm.all_reduce(every).wait()
    return dict(zip((*MOMENTS, "all"), every.amax(0).long().tolist(), strict=True))
