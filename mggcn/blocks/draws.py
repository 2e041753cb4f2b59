"""Draws: how many in-neighbours of a vertex each hop of a batch takes, and by what; and bounds on what they give.

Hops count from the seeds outwards. N vertices of the graph, T targets, S sources, E edges of a hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from mggcn.blocks.block import Capacity
from mggcn.errors import ConfigError

MAX_ENTRIES: Final = 2**31 - 1
"""Most entries of a hop: places in it are numbers of 32 bits."""
By = Literal["uniform", "weight", "labor", "labor-one"]
ALL: Final = -1
"""The fan-out that takes every neighbour."""
MAX_TYPES: Final = 2**14
"""Words of draws are numbered with 32 bits, and each type has 2^18."""
MAX_FANOUT: Final = 2**16 - 1
"""The words of an edge type begin at draw 2^18 times its number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How in-neighbours are drawn. Raises: ConfigError for fan-outs or a combination that cannot be.

    A vertex with fewer neighbours than its fan-out gives all of them. Source: LABOR-0, Balin and Catalyurek, NeurIPS 2023.
    """

    fanouts: tuple[int | tuple[int, ...], ...]
    """Neighbours of a vertex, of the hop at the seeds first: 1 to 65,535, or ALL; or a tuple by type of edge, in which 0
    leaves a type out."""
    by: By = "uniform"
    """uniform: each neighbour alike. weight: the heavier an edge the sooner; edges of weight 0 are never drawn. labor: with
    one random number for each source of a hop, which takes fewer sources for the same variance, and the fan-out only on
    average. labor-one: with the same numbers in every hop."""
    replace: bool = False
    """Draw with replacement: an edge that is drawn k times is one edge of value k."""

    def __post_init__(self) -> None:
        if not self.fanouts:
            raise ConfigError("a batch needs a fan-out for each hop, got none; give for example (15, 10, 5)")
        for fanout in self.fanouts:
            by_type, least = isinstance(fanout, tuple), 0 if isinstance(fanout, tuple) else 1
            counts = fanout if isinstance(fanout, tuple) else (fanout,)
            if not all(least <= count <= MAX_FANOUT or count == ALL for count in counts) or not any(counts):
                some = " for some type" if by_type else ""
                raise ConfigError(f"a fan-out must lie in 1 .. {MAX_FANOUT} or be {ALL} for all{some}, got {fanout}")
        most = max((len(fanout) for fanout in self.fanouts if isinstance(fanout, tuple)), default=0)
        if most > MAX_TYPES:
            raise ConfigError(
                f"neighbours are drawn by type for at most {MAX_TYPES:,} types of edges, got {most:,}; draw so many of all "
                "types together (sample.by_type = false)"
            )
        if len({len(fanout) for fanout in self.fanouts if isinstance(fanout, tuple)}) > 1:
            raise ConfigError(f"fan-outs by type must be as many in each hop, got {self.fanouts}")
        if self.by not in get_args(By):
            raise ConfigError(f"neighbours are drawn by {', '.join(get_args(By))}, got {self.by!r}")
        if self.replace and self.by != "uniform":
            raise ConfigError(
                f"only uniform draws are made with replacement, got {self.by!r}; leave out one of the two"
            )

    @property
    def has_values(self) -> bool:
        """Whether drawn edges have values: counts, the inverse of the chance to be drawn, or weights of whole rows."""
        return self.replace or self.by != "uniform"

    @property
    def looks_at_rows(self) -> bool:
        """Whether drawing passes over the whole rows of the targets."""
        return self.by != "uniform" or any(isinstance(fanout, tuple) for fanout in self.fanouts)

    def of_types(self, hop: int) -> tuple[int, ...]:
        """Return the fan-outs of a hop by type of edge; one alone if types do not matter."""
        fanout = self.fanouts[hop]
        return fanout if isinstance(fanout, tuple) else (fanout,)

    def most(self, hop: int) -> int | None:
        """Return the most neighbours that a vertex gives in a hop; None if only its degree limits them."""
        counts = self.of_types(hop)
        return None if ALL in counts or self.by.startswith("labor") else sum(counts)


def bounds(
    num_seeds: int, draws: Draws, *, num_vertices: int, num_edges: int, own_entries: int = 0
) -> tuple[Capacity, ...]:
    """Return capacities, of the hop at the seeds first, that no batch exceeds, or as many as a hop can have.

    own_entries: the most that a row has of itself, which are never drawn: with self-loops 1, or as many as a graph with
    types of edges stores of a vertex; without them 0, and those that are stored are drawn as others.
    E <= T times the fan-out, at most the graph's edges, and own entries; S <= min(N, T + E).
    """
    capacities, rows = list[Capacity](), min(num_seeds, num_vertices)
    for hop in range(len(draws.fanouts)):
        most = draws.most(hop)
        drawn = min(num_edges if most is None else min(num_edges, rows * most), MAX_ENTRIES - rows)
        sources = min(num_vertices, rows + drawn)
        # Own entries beyond the first of a row are edges of the graph.
        most_edges = min(num_edges + rows * (own_entries > 0), MAX_ENTRIES)
        capacities.append(Capacity(rows, sources, min(drawn + rows * own_entries, most_edges)))
        rows = sources
    return tuple(capacities)
