"""Ranges of consecutive vertices, cut where all that should be even among the ranks is.

N vertices, P ranks, C measures.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import Graph
from mggcn.graph.splits import first_splits
from mggcn.partition.locality.chunks import both_directions, num_entries

RELABELLED = "relabelled"
"""Entry of a graph's meta: how its vertices were put in order, and the bounds of the parts that were cut."""


def range_bounds(graph: Graph, ranks: int) -> npt.NDArray[np.int64]:
    """Return bounds int64 (P + 1,): rank r has the vertices bounds[r] to bounds[r + 1] - 1.

    Measured are vertices, nonzeros, and vertices of the first training, validation and test split. Each bound lies where
    the measure that is furthest from its share of all before it is nearest; among about equal places, where all together
    are. A graph that was cut into P parts when it was relabelled keeps these.
    Cost: reads the row pointers and N bytes a split; 8 N bytes a measure. Raises: GraphError for kept bounds of another
    graph.
    """
    num = graph.num_vertices
    kept = graph.meta.get(RELABELLED)
    bounds = kept.get("bounds") if isinstance(kept, dict) else None
    if isinstance(bounds, list) and len(bounds) == ranks + 1:
        if any(type(bound) is not int for bound in bounds) or [0, *sorted(bounds)[1:-1], num] != bounds:
            raise GraphError(
                f"meta.json of {graph.name} has bounds of parts that do not ascend from 0 to {num:,}; relabel it again"
            )
        return np.array(bounds, np.int64)
    matrices = both_directions(graph)
    sums = [np.arange(num + 1) / num, _shares(num_entries(matrices) + len(matrices))]
    sums += [_shares(mask) for mask in first_splits(graph).values()]
    return np.array([0, *(_nearest(sums, rank / ranks) for rank in range(1, ranks)), num], np.int64)


def _shares(weights: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return the share of all weights (N,) that lies before each place, (N + 1,)."""
    ends = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
    shares: npt.NDArray[np.float64] = ends / ends[-1]
    return shares


def _nearest(sums: list[npt.NDArray[np.float64]], share: float) -> int:
    """Return the first place at which the largest distance of a sum from its share is least, and a hundredth of the mean
    distance, which decides where a sum stands still.
    """
    places = [int(np.searchsorted(ends, share)) for ends in sums]
    low, high = max(min(places) - 1, 0), max(places) + 1  # outside, all sums are on one side and move away
    distance = np.abs(np.array([ends[low:high] for ends in sums]) - share)
    return low + int((distance.max(0) + 0.01 * distance.mean(0)).argmin())
