"""What a rank runs: a flat list of ops over the named buffers of one arena."""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.memory.arena import ArenaPlan
from mggcn.model.values import Op


@dataclass(frozen=True, slots=True)
class Program:
    """A flat list of ops and the arena that its buffers need. result: the buffer that stays readable after it, or ""."""

    name: str
    ops: tuple[Op, ...]
    arena: ArenaPlan
    result: str = ""
