"""NCCL's share of the GPUs' memory in a run, measured and planned: a record of result.json."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mggcn.comm.nccl_memory import MOMENTS, largest_taken
from mggcn.comm.nccl_settings import SETTINGS, user_settings
from mggcn.memory.device import runs_nccl
from mggcn.planning.run import RunPlan

if TYPE_CHECKING:
    from mggcn.backend.base import KernelBackend
    from mggcn.comm.base import Communicator


def nccl_record(plan: RunPlan, comm: Communicator, backend: KernelBackend) -> dict[str, Any]:
    """Return NCCL's planned and measured bytes on the rank that uses most, and its settings; {} without it. Collective.

    Call it after the first epochs, which open every connection.
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
