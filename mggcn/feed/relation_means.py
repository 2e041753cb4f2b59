"""What drawn edges count in means over the in-neighbours of each relation.

T targets, E edges of a block, R relations. Source: Schlichtkrull et al. 2018, eq. 2; D_vr is the number of in-neighbours of
v of relation r, or the sum of their weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.sampler import DrawnHop
from mggcn.config import SampleConfig
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR

Vector = npt.NDArray[Any]


class RelationMeans:
    """Turns what drawn edges count in a sum into weights of means. adj_t: has types.

    sample.weights block: a mean over what was drawn. Else what was drawn stands for all edges and is divided by D_vr, so
    that its expectation is the whole graph's mean: of uniform draws of each relation this is the mean over what was drawn,
    too. Raises: GraphError for edges without types.
    """

    def __init__(self, adj_t: CSR, sample: SampleConfig) -> None:
        if adj_t.types is None or adj_t.type_degrees is None:
            raise GraphError("means over relations need types of edges, and this graph has none; give edge_types")
        self._types, self._degrees = adj_t.types.array(), adj_t.type_degrees.array()
        self._indptr, self._block = adj_t.indptr.array(), sample.weights == "block"
        labor = sample.draw.startswith("labor")
        self._completed = sample.by_type and (sample.weights == "mean" or not labor)
        # D_vr is the number of edges that may be drawn, or, drawn by weight, their sum: else those must be counted.
        self._counts = adj_t.values is not None and sample.draw != "weight"

    def write(self, ids: Vector, hop: DrawnHop, values: Vector) -> Vector:
        """Turn the values (E,) of a hop's edges into weights of means; return the types (E,) of the edges.

        ids (T,): its targets. Cost: a sort of E groups, and, of weighted graphs drawn by type, a pass over the targets'
        rows.
        """
        assert hop.places is not None
        types, degrees = self._types[hop.places], self._degrees[hop.places]
        groups = _groups(np.diff(hop.indptr), types)
        if self._block:
            degrees = _sums(groups, values)
        elif self._completed:
            drawn = _sums(groups, np.ones(groups.size) if hop.values is None else hop.values)
            values *= (self._in_store(ids, groups) if self._counts else degrees) / drawn
        np.divide(values, degrees, out=values, where=degrees != 0, casting="unsafe")
        values[degrees == 0] = 0  # as whole-graph tiles have it where weights add up to 0
        return types

    def _in_store(self, ids: Vector, groups: Vector) -> Vector:
        """Return (E,), how many edges of the graph are of the target and relation of each drawn one."""
        starts, lengths = self._indptr[ids], self._indptr[ids + 1] - self._indptr[ids]
        places = np.arange(int(lengths.sum())) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        stored = np.sort(_groups(lengths, self._types[places]))
        left, right = (np.searchsorted(stored, groups, side) for side in ("left", "right"))
        return right - left


def _groups(lengths: Vector, types: Vector) -> Vector:
    """Return int64 (E,): the same number for edges of a row that have one relation. lengths (T,): edges of each row."""
    return np.repeat(np.arange(lengths.size) << 16, lengths) + types


def _sums(groups: Vector, values: Vector) -> Vector:
    """Return (E,), the sum of the values of each edge's group."""
    _, at = np.unique(groups, return_inverse=True)
    return np.bincount(at, values)[at]
