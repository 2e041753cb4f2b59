"""Blocks: over which rows and edges an aggregation runs. The whole graph, a pruned layer and a sampled hop are blocks.

A step runs over a stack of blocks, the input's first: the targets of each are the sources of the next. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mggcn.errors import PlanError


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of a rank, by name: values of one row set have the same rows, in the same order."""

    name: str


OWNED = RowSet("owned")
"""All rows of a rank."""
EVERYONE = RowSet("all vertices")
"""All vertices of the graph, in their order, on every rank."""
PAIRS = RowSet("pairs")
"""Pairs of vertices that a step scores on a rank, links and negatives."""


@dataclass(frozen=True, slots=True)
class Block:
    """Edges from source rows to target rows, which are the first of the sources, in their order.

    hops: leave out the in-edges of rows further than this many hops from the training vertices, which the loss does not
    read; these rows are zero. None: nothing is left out.
    """

    name: str
    targets: RowSet
    sources: RowSet
    hops: int | None = None


WHOLE = Block("whole graph", OWNED, OWNED)


def required(hops: int) -> Block:
    """Return the block of a layer whose result the loss reads up to `hops` hops from the training vertices."""
    return Block(f"within {hops} hops", OWNED, OWNED, hops)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most target rows, source rows and edges that a block has in any step, on any rank.

    Where ranks share a batch: the most rows that one receives from the others, and sends them, to sum over neighbours, and
    likewise on the way back, on which a rank has the edges from its sources.
    """

    targets: int
    sources: int
    edges: int
    received: int = field(default=0, kw_only=True)
    sent: int = field(default=0, kw_only=True)
    received_back: int = field(default=0, kw_only=True)
    sent_back: int = field(default=0, kw_only=True)
    edges_back: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Capacity:
        """Return the capacity with these sizes, in the order of the fields."""
        return cls(**dict(zip((one.name for one in fields(cls)), sizes, strict=False)))


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of a step, and the capacity of each. Raises: PlanError if they do not follow each other.

    mean: source rows and edges of each block as drawn batches have them on average, of one rank, where ranks share a batch
    of the busiest one, and all other fields of its capacity; () if none were drawn.
    looked: entries of the targets' rows over which drawing a batch passes on average, beside those that it draws; 0 for
    draws that pass over none, or if none were drawn.
    nonzeros: the most nonzeros of sparse features that the rows of each row set have, in the order of `rows`; () where rows
    are gathered dense.
    Where ranks share a batch: together, the capacities of the rows of all ranks; exchanged: the blocks of which a rank has
    the source rows that it owns, and receives the others that it reads; overlap: the rows that ranks with batches of their
    own would compute over the distinct ones, as drawn, 0 if that is not known.
    """

    blocks: tuple[Block, ...]
    capacities: tuple[Capacity, ...]
    mean: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    looked: int = field(default=0, kw_only=True)
    nonzeros: tuple[int, ...] = field(default=(), kw_only=True)
    together: tuple[Capacity, ...] = field(default=(), kw_only=True)
    exchanged: tuple[Block, ...] = field(default=(), kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.blocks or len(self.blocks) != len(self.capacities):
            raise PlanError(
                f"a stack needs a capacity for each block, got {len(self.capacities)} of {len(self.blocks)}"
            )
        for (below, size), (above, next_size) in pairwise(zip(self.blocks, self.capacities, strict=True)):
            if below.targets != above.sources or size.targets != next_size.sources:
                raise PlanError(
                    f"the targets of block {below.name!r}, {size.targets} of {below.targets.name!r}, must be the sources "
                    f"of block {above.name!r}, {next_size.sources} of {above.sources.name!r}"
                )
        if len(self.rows) != len(self.blocks) + 1:
            raise PlanError("every block of a stack needs a row set of its own for its targets")

    @property
    def rows(self) -> dict[RowSet, int]:
        """The capacity of every row set, the sources of the first block first."""
        first = {self.blocks[0].sources: self.capacities[0].sources}
        return first | {b.targets: c.targets for b, c in zip(self.blocks, self.capacities, strict=True)}

    @property
    def seeds(self) -> RowSet:
        """The rows whose scores the loss compares with targets."""
        return self.blocks[-1].targets


@dataclass(frozen=True, slots=True)
class HaloRows:
    """The source rows of a block in a step that other ranks own, and own ones to push, where others' come from a cache.

    places int32 (R,): where they are, ascending; numbers int32 (R,): among the K of the halo, by owner and id, -1 for a
    vertex that no row of the rank's reads. pushed: for each rank the places of the rows that it gets, and their numbers
    among those that it reads of this rank, both int32.
    """

    places: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    pushed: tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], ...]
