"""The threads of a rank's kernels: those that a plan counts with, and how many of them compute now."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Team:
    """Threads of the kernels of one rank.

    `planned` decides variants, blocks and work space. `running`, 1 .. planned, may change between any two calls: every
    kernel gives the same bits on any number of threads.
    """

    planned: int
    running: int = field(init=False)

    def __post_init__(self) -> None:
        self.running = self.planned
