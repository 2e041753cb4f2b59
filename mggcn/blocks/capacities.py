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


def with_extents(
    bound: Stack, most: Sequence[tuple[int, int]], least: Sequence[Capacity] = (), spare: float = 0.05
) -> Stack:
    """Return the stack with the most sources and edges that each hop had, hop 0 first, and a share more, within bounds.

    least: what the first hops must have room for.
    """
    capacities, targets = list[Capacity](), bound.capacities[-1].targets
    for hop, ((sources, edges), size) in enumerate(zip(most, reversed(bound.capacities), strict=True)):
        wanted = [math.ceil(count * (1 + spare)) for count in (sources, edges)]
        if hop < len(least):
            wanted = [max(wanted[0], least[hop].sources), max(wanted[1], least[hop].edges)]
        more = max(min(wanted[0], size.sources), targets)
        capacities.append(Capacity(targets, more, min(wanted[1], size.edges)))
        targets = more
    return hops_of(capacities)
