"""How a source becomes a graph: symmetry, repeated edges, self-loops, scale of features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from mggcn.errors import ConfigError

Duplicates = Literal["auto", "merge", "sum", "error"]
SelfLoops = Literal["keep", "drop", "add"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOptions:
    """How a source becomes a graph: the `options` of `load`.

    Examples:
        >>> edges = np.array([[0, 1, 1], [1, 2, 2]])
        >>> mggcn.load(edges, options=mggcn.GraphOptions(symmetrize=True)).num_edges
        4
    """

    symmetrize: bool = False
    """Add the reverse of every edge. Off: the graph stays directed, unless the source lists both directions."""
    duplicates: Duplicates = "auto"
    """Repeated edges: "merge" keeps one (their weights must agree), "sum" adds up their weights (1 each if unweighted),
    "error" refuses them. "auto" sums in PyG's, DGL's and networkx's graphs, which count them, and merges in all other
    sources, and with `symmetrize`, as PyG's to_undirected does; values of a matrix's entries add up in any case. With
    `symmetrize` the reverse of an edge counts as a repetition for "sum", not for "error"."""
    self_loops: SelfLoops = "keep"
    """Keep self-loops as they are, drop them, or add the missing ones with weight 1."""
    row_normalize: bool = False
    """Divide the features of each vertex by the sum of their absolute values; empty rows stay zero."""

    def __post_init__(self) -> None:
        for name, known in [("duplicates", get_args(Duplicates)), ("self_loops", get_args(SelfLoops))]:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def resolved(self, counted: bool = False) -> GraphOptions:
        """Return the options with what `auto` stands for; counted: the source counts repeated edges."""
        if self.duplicates != "auto":
            return self
        return replace(self, duplicates="sum" if counted and not self.symmetrize else "merge")


DEFAULT_OPTIONS = GraphOptions()
