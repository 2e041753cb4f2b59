"""The blocks of a drawn step, hop by hop from the seeds, with the extents that are planned for them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mggcn.blocks.block import Block, Capacity, RowSet, Stack


def hops_of(capacities: Sequence[Capacity]) -> Stack:
    """Return the blocks of a step whose hops have these capacities, that of the hop at the seeds first."""
    blocks, above = list[Block](), RowSet("seeds")
    for hop in range(1, len(capacities) + 1):
        below = RowSet(f"{hop} hop{'s' * (hop > 1)} from the seeds")
        blocks.append(Block(f"hop {hop}", above, below))
        above = below
    return Stack(tuple(reversed(blocks)), tuple(reversed(capacities)))


def with_extents(bound: Stack, most: Sequence[tuple[int, int]], spare: float = 0.05) -> Stack:
    """Return the stack with the most sources and edges that each hop had, hop 0 first, and a share more, within bounds."""
    capacities, targets = list[Capacity](), bound.capacities[-1].targets
    for (sources, edges), size in zip(most, reversed(bound.capacities), strict=True):
        more = max(min(math.ceil(sources * (1 + spare)), size.sources), targets)
        capacities.append(Capacity(targets, more, min(math.ceil(edges * (1 + spare)), size.edges)))
        targets = more
    return hops_of(capacities)
