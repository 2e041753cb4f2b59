"""The blocks of a drawn step, hop by hop from the seeds, with the extents that are planned for them. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mggcn.blocks.block import Block, Capacity, RowSet, Stack
from mggcn.blocks.draws import Draws

SPARE = 0.05
"""Share of what drawn batches have at most for which there is room beside it."""


def hops_of(capacities: Sequence[Capacity]) -> Stack:
    """Return the blocks of a step whose hops have these capacities, that of the hop at the seeds first."""
    blocks, above = list[Block](), RowSet("seeds")
    for hop in range(1, len(capacities) + 1):
        below = RowSet(f"{hop} hop{'s' * (hop > 1)} from the seeds")
        blocks.append(Block(f"hop {hop}", above, below))
        above = below
    return Stack(tuple(reversed(blocks)), tuple(reversed(capacities)))


def layers_of(depth: int) -> tuple[Block, ...]:
    """Return blocks for aggregations one after the other that are computed layer by layer, the input's first."""
    sets = [RowSet(f"layer {layer}") for layer in range(depth + 1)]
    return tuple(Block(f"into layer {k + 1}", sets[k + 1], sets[k]) for k in range(depth))


def with_extents(
    bound: Stack, most: Sequence[tuple[int, int]], least: Sequence[Capacity] = (), spare: float = SPARE
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


def shared_hops(together: Sequence[Capacity], draws: Draws, ranks: int, owned: int, own_entries: int) -> Stack:
    """Return the blocks of a step that ranks share, within bounds: every rank may have any of the rows that it owns.

    together: bounds of the rows of all ranks, hop 0 first. owned: the most vertices of a rank. own_entries: as `bounds`.
    """
    capacities, rows = list[Capacity](), -(-together[0].targets // ranks)
    # Seeds are dealt evenly: a rank may have some that it does not own.
    most = owned + rows
    for hop, size in enumerate(together):
        fanout = draws.most(hop)
        edges = size.edges if fanout is None else min(size.edges, rows * (fanout + own_entries))
        sources = max(min(size.sources, most), rows)
        capacities.append(
            Capacity(
                rows,
                sources,
                edges,
                received=min(size.sources, edges),
                sent=min(sources * (ranks - 1), size.edges),
                received_back=min(size.targets, size.edges),
                sent_back=min(rows * (ranks - 1), edges),
                edges_back=size.edges,
            )
        )
        rows = sources
    stack = hops_of(capacities)
    return dataclasses.replace(stack, together=tuple(reversed(together)), exchanged=stack.blocks)


def with_shared_extents(
    bound: Stack,
    together: Stack,
    most: Sequence[Sequence[int]],
    least: Sequence[Capacity],
    overlap: float,
    spare: float = SPARE,
) -> Stack:
    """Return the stack of `shared_hops` with the most that any rank had of each hop, hop 0 first, and a share more.

    most: as the fields of a Capacity after targets. least: what the first hops must have room for. together: the rows of
    all ranks, as `with_extents` has them.
    """
    capacities, targets = list[Capacity](), bound.capacities[-1].targets
    for hop, (found, size) in enumerate(zip(most, reversed(bound.capacities), strict=True)):
        wanted = [math.ceil(count * (1 + spare)) for count in found]
        if hop < len(least):
            wanted = [max(pair) for pair in zip(wanted, dataclasses.astuple(least[hop])[1:], strict=True)]
        sources, *others = map(min, wanted, dataclasses.astuple(size)[1:])
        capacities.append(Capacity.of((targets, max(sources, targets), *others)))
        targets = capacities[-1].sources
    return dataclasses.replace(
        hops_of(capacities), together=together.capacities, exchanged=bound.exchanged, overlap=overlap
    )
