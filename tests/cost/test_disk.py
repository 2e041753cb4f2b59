"""Seconds of stages beside a disk: the slower of both, and what nothing hides."""

from __future__ import annotations

import dataclasses

import pytest

from mggcn.cost.disk import DiskCost, StageCost
from mggcn.cost.epoch import Cost
from mggcn.cost.work import KINDS
from mggcn.memory.pages import DiskRates

DISK = DiskRates(read=10.0, write=5.0, both=8.0)


def computing(seconds: float) -> Cost:
    return Cost(seconds, (dict.fromkeys(KINDS, 0.0) | {"dense": seconds},), 0.0)


def stage_of(compute: float, read: int, written: int, parts: int) -> StageCost:
    return StageCost(compute=computing(compute), read=read, written=written, parts=parts)


@pytest.mark.parametrize(
    ("compute", "read", "written", "parts", "seconds"),
    [
        (1.0, 100, 0, 1, 11.0),  # one part: nothing beside it
        (1.0, 100, 0, 4, 10.25),  # the disk sets the pace, a part is computed behind it
        (20.0, 100, 0, 4, 22.5),  # computing does, and waits for the first part
        (0.0, 0, 50, 4, 10.0),
        (0.0, 40, 40, 4, 10.0),  # both at once
        (3.0, 0, 0, 4, 3.0),
    ],
)
def test_a_stage(compute: float, read: int, written: int, parts: int, seconds: float) -> None:
    """Fails if reading, writing and computing do not overlap as the parts of a stage do."""
    stage = stage_of(compute, read, written, parts)
    assert stage.seconds(DISK) == pytest.approx(seconds)
    assert stage.waits(DISK) == (stage.disk_s(DISK) > compute)
    # What is copied keeps the cores from computing, as edges that are waited for do.
    other = stage_of(compute + 2.0, read, written, parts)
    same = dataclasses.replace(stage, edges=10, copied_s=1.0)
    assert same.seconds(DISK) == pytest.approx(other.seconds(DISK))


def test_a_program() -> None:
    """Fails if stages overlap, what follows them is lost, or what bounds the program is not what takes longer."""
    stages = (stage_of(1.0, 100, 0, 2), stage_of(8.0, 0, 20, 2))
    cost = DiskCost(stages, computing(2.0), DISK)
    assert cost.cost.seconds == pytest.approx(10.5 + 10.0 + 2.0)
    assert (cost.compute_s, cost.disk_s, cost.waiting, cost.bound) == (11.0, 14.0, 1, "the disk")
    assert cost.cost.ranks[0]["dense"] == 11.0
    assert DiskCost(stages, computing(20.0), DISK).bound == "computing"
