"""Predicted seconds of a program whose values lie on disk between its stages. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.cost.epoch import Cost
from mggcn.cost.work import KINDS
from mggcn.memory.pages import DiskRates


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """A stage: what the ranks compute, the bytes that the disk at hand reads and writes, and the parts that it runs in.

    edges: bytes of edges that products read through a map, and wait for. copied_s: seconds in which threads copy rows from
    and to panels, on the cores that compute.
    """

    compute: Cost
    read: int
    written: int
    parts: int
    edges: int = 0
    copied_s: float = 0.0

    def compute_s(self, disk: DiskRates) -> float:
        """Return the seconds of computing, in which edges come from disk and rows are copied."""
        return self.compute.seconds + self.edges / disk.read + self.copied_s

    def disk_s(self, disk: DiskRates) -> float:
        """Return the seconds for which the disk is busy: one device reads and writes."""
        return disk.seconds(self.read, self.written)

    def seconds(self, disk: DiskRates) -> float:
        """Return the seconds of the stage.

        While a part is computed, the next is read and the last is written. So the slower of both sets the pace, and the
        other adds one part: computing waits for the first read and the last write, the disk for a part between them.
        """
        moving, computing = self.disk_s(disk), self.compute_s(disk)
        return max(moving, computing) + min(moving, computing) / self.parts

    def waits(self, disk: DiskRates) -> bool:
        """Return whether the disk sets the pace."""
        return self.disk_s(disk) > self.compute_s(disk)


@dataclass(frozen=True, slots=True)
class DiskCost:
    """A program's stages, in order, on a disk; after: what follows the last one, and moves no rows."""

    stages: tuple[StageCost, ...]
    after: Cost
    disk: DiskRates

    @property
    def cost(self) -> Cost:
        """The seconds until the last rank has ended. Where time went is said of computing alone."""
        costs = [*(stage.compute for stage in self.stages), self.after]
        ranks = tuple(
            {kind: sum(parts[kind] for parts in same) for kind in KINDS}
            for same in zip(*(cost.ranks for cost in costs), strict=True)
        )
        seconds = sum(stage.seconds(self.disk) for stage in self.stages) + self.after.seconds
        return Cost(seconds, ranks, sum(cost.link_s for cost in costs))

    @property
    def compute_s(self) -> float:
        """Seconds of computing alone, with the edges that it reads and the rows that are copied."""
        return sum(stage.compute_s(self.disk) for stage in self.stages) + self.after.seconds

    @property
    def disk_s(self) -> float:
        """Seconds of reading and writing alone."""
        return sum(stage.disk_s(self.disk) for stage in self.stages)

    @property
    def waiting(self) -> int:
        """Stages of which the disk sets the pace."""
        return sum(stage.waits(self.disk) for stage in self.stages)

    @property
    def bound(self) -> str:
        """What sets the pace of most of the time."""
        return "the disk" if self.disk_s > self.compute_s else "computing"
